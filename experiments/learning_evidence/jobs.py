"""The child processes of `train_evidence.py`: train, evaluate a checkpoint, grade schedules, until their time is over."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kbx_env import jsonl

if TYPE_CHECKING:
    from kbx_env.baselines.llm.conversation import Conversation
    from kbx_env.train.batch_grader import GradedAnswer

MARKS = 16
"""Checkpoints of a GRPO run, evenly over its gradings: runs that ended early are compared at the last one that all reached."""

AT_ONCE = 3
"""Tasks of which all schedules are graded at a time: a killed job loses the gradings of so many tasks at most."""


class _Late(Exception):
    """A second SIGINT came."""


_STOP = SimpleNamespace(requested=False)
"""Whether SIGINT came."""


def _interrupted(*_: Any) -> None:
    if _STOP.requested:
        raise _Late
    _STOP.requested = True


def _fits(end: float, steps: Sequence[float], look: int = 3) -> bool:
    """Return whether one more step ends in time.

    Args:
        end: the end of the time, in ``time.monotonic`` seconds.
        steps: seconds of the steps so far.
        look: the longest of the last steps counts: of so many, but of at least three.

    Returns:
        Whether it does.
    """
    return not _STOP.requested and time.monotonic() + max(steps[-max(3, look) :], default=0.0) < end


def updates_of(args: Any) -> int:
    """Return the number of updates that learn from one batch of answers; 1 in SFT."""
    parts = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
    return max(1, parts * getattr(args, "num_iterations", 1) // args.gradient_accumulation_steps)


def _save(trainer: Any, folder: Path, gradings: int) -> None:
    """Write a checkpoint and its number of gradings, atomically."""
    from kbx_env.train.runs import finish

    part = folder.with_name(folder.name + ".part")
    finish(trainer, part)
    (part / "gradings.json").write_text(json.dumps({"gradings": gradings, "step": trainer.state.global_step}))
    part.rename(folder)


def _until(end: float, gradings: int | None, folder: Path | None) -> Any:
    """Return a callback that ends training in time, and that keeps checkpoints.

    Args:
        end: the end of the time, in ``time.monotonic`` seconds.
        gradings: ends training after so many gradings; ``None`` for no such limit.
        folder: keeps ``MARKS`` checkpoints on the way to ``gradings``; ``None`` for none.

    Returns:
        A ``transformers.TrainerCallback``; its attribute ``trainer`` must be set.
    """
    from transformers import TrainerCallback

    class Until(TrainerCallback):
        trainer: Any = None
        times: list[float] = []
        last, mark, done = time.monotonic(), 0, 0

        def on_step_begin(self, *_: Any, **kw: Any) -> None:
            self.last = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            self.times.append(time.monotonic() - self.last)
            # The first update of a batch generates and grades, which takes long; the batch's other updates are then done too.
            whole = state.global_step % updates_of(args) == 0
            if _STOP.requested or (whole and not _fits(end, self.times, updates_of(args))):
                control.should_training_stop = True

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kw: Any) -> None:
            done = (logs or {}).get("gradings")
            if done is None or gradings is None:
                return
            self.done = done
            if state.global_step % updates_of(args):
                return  # not before all updates of the batch are done
            mark = min(MARKS, MARKS * done // gradings) if folder is not None else 0
            if folder is not None and mark > self.mark:
                for k in range(self.mark + 1, mark + 1):
                    _save(self.trainer, folder / f"at-{k}", done)
                self.mark = mark
            if done >= gradings:
                control.should_training_stop = True

    return Until()


def learn(job: Mapping[str, Any], end: float) -> None:
    """Run SFT or GRPO until the time is over.

    Args:
        job: the job's file.
        end: the end of the time, in ``time.monotonic`` seconds.
    """
    from kbx_env.train import settings
    from kbx_env.train.runs import FINAL

    from experiments.small_models import grpo, sft

    with contextlib.ExitStack() as stack:
        s: Any
        if job["kind"] == "sft":
            s = settings.read(sft.Settings, [job["settings"]])
            trainer = sft.trainer_of(s)
        else:
            s = settings.read(grpo.Settings, [job["settings"]])
            trainer = grpo.trainer_of(s, stack)
        out = Path(s.out)
        until = _until(end, job.get("gradings"), out if job.get("marks") else None)
        until.trainer = trainer
        trainer.add_callback(until)
        trainer.train()
        _save(trainer, out / FINAL, until.done)


def evaluate(job: Mapping[str, Any], end: float) -> None:
    """Evaluate a checkpoint on every task of a split, some samples of all tasks at a time, with held-out shapes.

    Appends a row for each episode to ``job["rows"]``; samples that the file has already are not drawn again.

    Args:
        job: the job's file.
        end: the end of the time, in ``time.monotonic`` seconds.
    """
    import torch
    from kbx_env.baselines.llm.conversation import Conversation
    from kbx_env.train import models, rows
    from kbx_env.train.batch_grader import BatchGrader
    from kbx_env.train.rollout import REWARD, Rollout

    from experiments.small_models.answer_prefix import AnswerPrefix, PrefixedGrader
    from kbx_env.spec.catalog import load_tasks

    # In float32 as in training: bfloat16 would round away most of what small steps have changed.
    model, tokenizer = models.load(job["model"], dtype="float32")
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    conversation, context = Conversation(tokenizer), models.context_of(model) or 1 << 20
    stub: Any = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=1), state=SimpleNamespace(global_step=0), processing_class=tokenizer
    )
    tasks = load_tasks(split=job["split"], pattern=job["tasks"])
    earlier = jsonl.read(job["rows"]) if Path(job["rows"]).is_file() else []
    done = {(r["task"], r["sample"]) for r in earlier if "turns" in r}
    with BatchGrader(
        backend=job["backend"], workers=job["workers"], timing=False, targets=(), wall=job["wall"], split="eval"
    ) as grader:
        answers = _FirstAnswers(PrefixedGrader(grader, AnswerPrefix(tokenizer, grader.backend)), Path(job["rows"]))
        metrics = SimpleNamespace(add=lambda *a: None)
        play = Rollout(
            answers, metrics, conversation, _generator(model, tokenizer, conversation, context, job), job["turns"],  # type: ignore[arg-type]
            job["room"], context, each=job["length"],
        )  # fmt: skip
        took: list[float] = []
        for begin in range(0, job["samples"], job["round"]):
            if not _fits(end, took):
                break
            before = time.monotonic()
            samples = [(t.id, k) for k in range(begin, min(begin + job["round"], job["samples"])) for t in tasks]
            if done.issuperset(samples):
                continue
            torch.manual_seed(1000 * job["seed"] + begin)  # of each round, so that a later command draws the same samples
            answers.begin(samples)
            known = {t.id: t for t in tasks}
            played = play([[rows.message(known[t], grader.backend) | {"task": t}] for t, _ in samples], stub)
            for line, best, spans in zip(answers.lines, played[REWARD], played["turn_spans"], strict=True):
                line |= {"best": best, "turns": len(spans)}
            answers.write()
            took.append(time.monotonic() - before)
            print(f"{len(answers.lines)} episodes in {took[-1]:.1f} s", flush=True)


class _FirstAnswers:
    """A grader that writes the rewards of first answers at once: they count also if time runs out before the later turns."""

    def __init__(self, grader: Callable[[Sequence[tuple[str, str]]], list[GradedAnswer]], file: Path) -> None:
        self._grader, self._file = grader, file
        self._samples, self.lines, self._calls = list[tuple[str, int]](), list[dict[str, Any]](), 0

    def begin(self, samples: list[tuple[str, int]]) -> None:
        """Begin a round of episodes, given by task and number of the sample."""
        self._samples, self._calls = samples, 0

    def __call__(self, answers: Sequence[tuple[str, str]]) -> list[GradedAnswer]:
        graded = self._grader(answers)
        self._calls += 1
        if self._calls == 1:
            self.lines = [
                {
                    "task": task, "sample": k, "first": g.reward, "verdict": str(g.outcome.verdict),
                    "compiled": None if g.reward is None else float(g.compiled),
                    "correct": None if g.reward is None else float(g.outcome.correct),
                } for (task, k), g in zip(self._samples, graded, strict=True)
            ]  # fmt: skip
            self.write()
        return graded

    def write(self) -> None:
        """Append the lines of the round."""
        with self._file.open("a") as file:
            file.write("".join(map(jsonl.encode, self.lines)))


def _generator(model: Any, tokenizer: Any, conversation: Conversation, context: int, job: Mapping[str, Any]) -> Any:
    """Return a function that samples answers, for ``Rollout``."""
    import torch
    from transformers import GenerationConfig

    def generate(trainer: Any, prompts: list[list[int]], most: int) -> tuple[list[list[int]], None]:
        width = max(map(len, prompts))
        pad = tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        config = GenerationConfig(
            max_new_tokens=max(1, min(most, job["length"], context - width)), do_sample=True, top_k=0, top_p=1.0,
            temperature=job["temperature"], min_p=job["min_p"] or None,
            eos_token_id=sorted(conversation.ends), pad_token_id=pad,
        )  # fmt: skip
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
        cut = [next((i + 1 for i, t in enumerate(row) if t in conversation.ends), len(row)) for row in made]
        return [row[:n] for row, n in zip(made, cut)], None

    return generate


def schedules(job: Mapping[str, Any], end: float) -> None:
    """Grade schedules at published and at held-out sizes, several times: each repetition times them again.

    Args:
        job: the job's file.
        end: the end of the time, in ``time.monotonic`` seconds.
    """
    from kbx_env.train.batch_grader import BatchGrader

    sources = {sizes: _sources(job["runs"], sizes) for sizes in ("held-out", "published")}
    preset = "default" if job["backend"] == "cuda" else "estimated"
    took: list[float] = []
    with contextlib.ExitStack() as stack:
        graders = {
            sizes: stack.enter_context(
                BatchGrader(preset, job["backend"], workers=job["workers"], targets=(), wall=60.0, sizes=sizes, split="eval")
            ) for sizes in sources
        }  # fmt: skip
        parts = [(sizes, every[k : k + AT_ONCE]) for sizes, every in sources.items() for k in range(0, len(every), AT_ONCE)]
        for repetition, (sizes, part) in itertools.product(range(job["repetitions"]), parts):
            if not _fits(end, took):
                return
            before, lines = time.monotonic(), []
            batch = [(*schedule, task, text) for task, found in part for schedule, text in found]
            graded = graders[sizes]([(task, text) for _, _, task, text in batch])
            for (seed, name, task, _), j in zip(batch, graded, strict=True):
                o = j.outcome
                lines.append({
                    "sizes": sizes, "schedule": name, "seed": seed, "task": task, "repetition": repetition, "reward": j.reward,
                    "verdict": str(o.verdict), "speedup": o.speedup, "low": o.timing.low if o.timing else None,
                    "high": o.timing.high if o.timing else None, "share": o.estimate.estimated_share if o.estimate else None,
                })  # fmt: skip
            with Path(job["rows"]).open("a") as file:
                file.write("".join(map(jsonl.encode, lines)))
            took.append(time.monotonic() - before)
            print(f"{len(batch)} gradings in {took[-1]:.1f} s", flush=True)


Schedule = tuple[int | None, str]
"""The seed of a policy (``None`` for the default schedule) and which schedule: policy, best, or default."""


def _sources(runs: Mapping[str, str], sizes: str) -> list[tuple[str, list[tuple[Schedule, str]]]]:
    """Return the sources by task: each policy's choice for these sizes, the best one of its training, and the expert's own."""
    from kbx_env.train.schedule_export import ExportSettings, export

    found: dict[str, dict[Schedule, str]] = {}
    for seed, folder in runs.items():
        about = json.loads((Path(folder) / "run.json").read_text())
        for name in ("policy", "best"):
            out = str(Path(folder) / f"{name}-{sizes}.jsonl")
            _, beside, rows = export(ExportSettings(folder, about["tasks"], about["split"], out, name == "best", sizes))
            for r in rows:
                found.setdefault(r["task"], {})[int(seed), name] = r["predict"]
            for r in jsonl.read(beside):
                found.setdefault(r["task"], {})[None, "default"] = r["predict"]
    return [(task, list(of.items())) for task, of in found.items()]


def child(path: str) -> int:
    """Do the job in a file; return exit status 0, also where the time was over, or 130 after a second SIGINT."""
    job = json.loads(Path(path).read_text())
    signal.signal(signal.SIGINT, _interrupted)
    end = time.monotonic() + job["until"] - time.time()
    try:
        {"sft": learn, "grpo": learn, "evaluate": evaluate, "schedules": schedules}[job["kind"]](job, end)
    except _Late:
        return 130
    return 0
