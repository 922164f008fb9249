"""What the children of `train_evidence.py` do until their time is over: learn, be asked, grade schedules."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MARKS = 16
"""Checkpoints of a GRPO run, evenly over its gradings: one that was cut off is compared where all were."""

AT_ONCE = 3
"""Tasks of which all schedules are graded at a time: what a kill takes is no more than that."""


class _Late(Exception):
    """Asked to stop a second time."""


_STOP = SimpleNamespace(asked=False)


def _interrupted(*_: Any) -> None:
    if _STOP.asked:
        raise _Late
    _STOP.asked = True


def _fits(end: float, steps: Sequence[float], look: int = 3) -> bool:
    """Whether one more step ends in time, by the longest of the last three, or so many."""
    return not _STOP.asked and time.monotonic() + max(steps[-max(3, look) :], default=0.0) < end


def updates_of(args: Any) -> int:
    """Updates that learn from one batch of answers; 1 in SFT."""
    parts = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
    return max(1, parts * getattr(args, "num_iterations", 1) // args.gradient_accumulation_steps)


def _save(trainer: Any, folder: Path, gradings: int) -> None:
    """A checkpoint with its counts, whole or not at all."""
    from kbx_env.train.runs import finish

    part = folder.with_name(folder.name + ".part")
    finish(trainer, part)
    (part / "gradings.json").write_text(json.dumps({"gradings": gradings, "step": trainer.state.global_step}))
    part.rename(folder)


def _until(end: float, gradings: int | None, folder: Path | None) -> Any:
    """A callback that ends training in time or at so many gradings, and keeps in a folder what the model was on the way there."""
    from transformers import TrainerCallback

    class Until(TrainerCallback):
        trainer: Any = None
        times: list[float] = []
        last, mark, done = time.monotonic(), 0, 0

        def on_step_begin(self, *_: Any, **kw: Any) -> None:
            self.last = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            self.times.append(time.monotonic() - self.last)
            # Of a batch's updates the first takes long, for it generates and grades; the others are not given up.
            whole = state.global_step % updates_of(args) == 0
            if _STOP.asked or (whole and not _fits(end, self.times, updates_of(args))):
                control.should_training_stop = True

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kw: Any) -> None:
            done = (logs or {}).get("gradings")
            if done is None or gradings is None:
                return
            self.done = done
            if state.global_step % updates_of(args):
                return  # a batch that was graded is learnt from whole
            mark = min(MARKS, MARKS * done // gradings) if folder is not None else 0
            if folder is not None and mark > self.mark:
                for k in range(self.mark + 1, mark + 1):
                    _save(self.trainer, folder / f"at-{k}", done)
                self.mark = mark
            if done >= gradings:
                control.should_training_stop = True

    return Until()


def learn(job: Mapping[str, Any], end: float) -> None:
    """SFT or GRPO until the time is over."""
    from kbx_env.train import grpo, settings, sft
    from kbx_env.train.runs import FINAL

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
    """Ask a checkpoint for every task, some samples of all of them at a time; a row for each episode. Held-out shapes count."""
    import torch
    from kbx_env.baselines.llm.conversation import Conversation
    from kbx_env.train import models, rows
    from kbx_env.train.judge import Judge, Judged
    from kbx_env.train.rollout import REWARD, Rollout
    from transformers import GenerationConfig

    from kbx_env.spec.catalog import load_tasks
    from kbx_env.spec.task import Task

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # As they were trained: in half precision most of what small steps have changed would be rounded away.
    model, tokenizer = models.load(job["model"], dtype="float32")
    model = model.to(device).eval()
    conversation, context = Conversation(tokenizer), models.context_of(model) or 1 << 20

    def generate(trainer: Any, prompts: list[list[int]], most: int) -> tuple[list[list[int]], None]:
        width = max(map(len, prompts))
        pad = tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        config = GenerationConfig(
            max_new_tokens=max(1, min(most, job["length"], context - width)), do_sample=True, top_k=0, top_p=1.0,
            temperature=job["temperature"], min_p=job["min_p"] or None,
            eos_token_id=sorted(conversation.ends), pad_token_id=pad,
        )  # fmt: skip
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
        cut = [next((i + 1 for i, t in enumerate(row) if t in conversation.ends), len(row)) for row in made]
        return [row[:n] for row, n in zip(made, cut)], None

    heard: list[list[Judged]] = []
    told = SimpleNamespace(add=lambda *a: None)
    alone: Any = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=1), state=SimpleNamespace(global_step=0), processing_class=tokenizer
    )
    tasks = load_tasks(split=job["split"], pattern=job["tasks"])
    earlier = [json.loads(x) for x in Path(job["rows"]).read_text().splitlines()] if Path(job["rows"]).is_file() else []
    done = {(r["task"], r["sample"]) for r in earlier if "turns" in r}
    with Judge(backend=job["backend"], workers=job["workers"], timing=False, targets=(), wall=job["wall"], split="eval") as judge:

        asked: list[tuple[Task, int]] = []
        lines: list[dict[str, Any]] = []

        def keep() -> None:
            with Path(job["rows"]).open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))

        def listen(answers: Sequence[tuple[str, str]]) -> list[Judged]:
            heard.append(judge(answers))
            if len(heard) == 1:  # if time runs out before the other turns, first answers count all the same
                lines[:] = [
                    {
                        "task": t.id, "sample": k, "first": j.reward, "verdict": str(j.outcome.verdict),
                        "compiled": None if j.reward is None else float(j.compiled),
                        "correct": None if j.reward is None else float(j.outcome.correct),
                    } for (t, k), j in zip(asked, heard[0], strict=True)
                ]  # fmt: skip
                keep()
            return heard[-1]

        play = Rollout(
            listen, told, conversation, generate, job["turns"], job["room"], context, each=job["length"]  # type: ignore[arg-type]
        )
        took: list[float] = []
        for begin in range(0, job["samples"], job["round"]):
            if not _fits(end, took):
                break
            before = time.monotonic()
            asked[:] = [(t, k) for k in range(begin, min(begin + job["round"], job["samples"])) for t in tasks]
            if all((t.id, k) in done for t, k in asked):
                continue
            torch.manual_seed(1000 * job["seed"] + begin)  # of each round: what an earlier command asked is not drawn again
            heard.clear()
            played = play([[rows.message(t, judge.backend) | {"task": t.id}] for t, _ in asked], alone)
            for line, best, spans in zip(lines, played[REWARD], played["turn_spans"], strict=True):
                line |= {"best": best, "turns": len(spans)}
            keep()
            took.append(time.monotonic() - before)
            print(f"{len(lines)} episodes in {took[-1]:.1f} s", flush=True)


def schedules(job: Mapping[str, Any], end: float) -> None:
    """Grade schedules beside each other at published and held-out sizes, over and over: every repetition is timed anew."""
    from kbx_env.train.judge import Judge

    sources = {sizes: _sources(job["runs"], sizes) for sizes in ("held-out", "published")}
    preset = "default" if job["backend"] == "cuda" else "estimated"
    took: list[float] = []
    with contextlib.ExitStack() as stack:
        judges = {
            sizes: stack.enter_context(
                Judge(preset, job["backend"], workers=job["workers"], targets=(), wall=60.0, sizes=sizes, split="eval")
            ) for sizes in sources
        }  # fmt: skip
        parts = [(sizes, asked[k : k + AT_ONCE]) for sizes, asked in sources.items() for k in range(0, len(asked), AT_ONCE)]
        for repetition, (sizes, part) in itertools.product(range(job["repetitions"]), parts):
            if not _fits(end, took):
                return
            before, lines = time.monotonic(), []
            asked = [(*who, task, text) for task, found in part for who, text in found]
            judged = judges[sizes]([(task, text) for _, _, task, text in asked])
            for (seed, name, task, _), j in zip(asked, judged, strict=True):
                o = j.outcome
                lines.append({
                    "sizes": sizes, "schedule": name, "seed": seed, "task": task, "repetition": repetition, "reward": j.reward,
                    "verdict": str(o.verdict), "speedup": o.speedup, "low": o.timing.low if o.timing else None,
                    "high": o.timing.high if o.timing else None, "share": o.estimate.estimated_share if o.estimate else None,
                })  # fmt: skip
            with Path(job["rows"]).open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
            took.append(time.monotonic() - before)
            print(f"{len(asked)} gradings in {took[-1]:.1f} s", flush=True)


Who = tuple[int | None, str]
"""The seed of a policy (``None``: no policy's) and which of its schedules: policy, best, or default."""


def _sources(runs: Mapping[str, str], sizes: str) -> list[tuple[str, list[tuple[Who, str]]]]:
    """By task the sources: what each run's policy chooses for these sizes, the best of its training, and the expert as it is."""
    from kbx_env.train.schedule_export import ExportSettings, export

    found: dict[str, dict[Who, str]] = {}
    for seed, folder in runs.items():
        about = json.loads((Path(folder) / "run.json").read_text())
        for name in ("policy", "best"):
            out = str(Path(folder) / f"{name}-{sizes}.jsonl")
            _, beside, rows = export(ExportSettings(folder, about["tasks"], about["split"], out, name == "best", sizes))
            for r in rows:
                found.setdefault(r["task"], {})[int(seed), name] = r["predict"]
            for r in map(json.loads, beside.read_text().splitlines()):
                found.setdefault(r["task"], {})[None, "default"] = r["predict"]
    return [(task, list(of.items())) for task, of in found.items()]


def child(path: str) -> int:
    """Do a job; 0 also where the time was over."""
    job = json.loads(Path(path).read_text())
    signal.signal(signal.SIGINT, _interrupted)
    end = time.monotonic() + job["until"] - time.time()
    try:
        {"sft": learn, "grpo": learn, "evaluate": evaluate, "schedules": schedules}[job["kind"]](job, end)
    except _Late:
        return 130
    return 0
