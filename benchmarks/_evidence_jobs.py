"""What the children of `train_evidence.py` do until their time is over: learn, be asked, grade schedules."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MARKS = 16
"""Checkpoints of a GRPO run, evenly over its gradings: one that was cut off is compared where all were."""


class _Late(Exception):
    """Asked to stop a second time."""


_STOP = SimpleNamespace(asked=False)


def _interrupted(*_: Any) -> None:
    if _STOP.asked:
        raise _Late
    _STOP.asked = True


def _fits(end: float, steps: Sequence[float]) -> bool:
    """Whether one more step ends in time, by the longest of the last three."""
    return not _STOP.asked and time.monotonic() + max(steps[-3:], default=0.0) < end


def _until(end: float, gradings: int | None, folder: Path | None) -> Any:
    """A callback that ends training in time or at so many gradings, and keeps what the model was on the way there."""
    from kbx_env.train.runs import finish
    from transformers import TrainerCallback

    class Until(TrainerCallback):
        trainer: Any = None
        times: list[float] = []
        last, mark, done = time.monotonic(), 0, 0

        def on_step_begin(self, *_: Any, **kw: Any) -> None:
            self.last = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            self.times.append(time.monotonic() - self.last)
            if not _fits(end, self.times):
                control.should_training_stop = True

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kw: Any) -> None:
            done = (logs or {}).get("gradings")
            if done is None or gradings is None or folder is None:
                return
            self.done = done
            mark = min(MARKS, MARKS * done // gradings)
            if mark > self.mark:
                for k in range(self.mark + 1, mark + 1):
                    part = folder / f"at-{k}.part"
                    finish(self.trainer, part)
                    (part / "gradings.json").write_text(json.dumps({"gradings": done, "step": state.global_step}))
                    part.rename(folder / f"at-{k}")
                self.mark = mark
            if done >= gradings:
                control.should_training_stop = True

    return Until()


def learn(job: Mapping[str, Any], end: float) -> None:
    """SFT or GRPO until the time is over."""
    from kbx_env.train import grpo, settings, sft
    from kbx_env.train.runs import FINAL, finish

    with contextlib.ExitStack() as stack:
        s: Any
        if job["kind"] == "sft":
            s = settings.read(sft.Settings, [job["settings"]])
            trainer = sft.trainer_of(s)
        else:
            s = settings.read(grpo.Settings, [job["settings"]])
            trainer = grpo.trainer_of(s, stack)
        out = Path(s.out)
        until = _until(end, job.get("gradings"), out if job["kind"] == "grpo" else None)
        until.trainer = trainer
        trainer.add_callback(until)
        trainer.train()
        finish(trainer, out / FINAL)
        (out / FINAL / "gradings.json").write_text(json.dumps({"gradings": until.done, "step": trainer.state.global_step}))


def evaluate(job: Mapping[str, Any], end: float) -> None:
    """Ask a checkpoint for every task, some samples of all of them at a time; a row for each episode."""
    import torch
    from kbx_env.baselines.llm.conversation import Conversation
    from kbx_env.train import models, rows
    from kbx_env.train.judge import Judge, Judged
    from kbx_env.train.rollout import REWARD, Rollout
    from transformers import GenerationConfig

    from kbx_env.catalog import load_tasks
    from kbx_env.task import Task

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = models.load(job["model"], dtype="bfloat16" if device == "cuda" else "float32")
    model = model.to(device).eval()
    conversation, context = Conversation(tokenizer), models.context_of(model) or 1 << 20
    torch.manual_seed(job["seed"])

    def generate(trainer: Any, prompts: list[list[int]], most: int) -> tuple[list[list[int]], None]:
        width = max(map(len, prompts))
        pad = tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        config = GenerationConfig(
            max_new_tokens=max(1, min(most, job["length"], context - width)), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
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
    tasks = load_tasks(split="eval", pattern=job["tasks"])
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
            listen, told, conversation, generate, job["turns"], job["length"] * job["turns"], context  # type: ignore[arg-type]
        )
        took: list[float] = []
        for begin in range(0, job["samples"], job["round"]):
            if not _fits(end, took):
                break
            before = time.monotonic()
            asked[:] = [(t, k) for k in range(begin, min(begin + job["round"], job["samples"])) for t in tasks]
            heard.clear()
            played = play([[rows.message(t, judge.backend) | {"task": t.id}] for t, _ in asked], alone)
            for line, best, spans in zip(lines, played[REWARD], played["turn_spans"], strict=True):
                line |= {"best": best, "turns": len(spans)}
            keep()
            took.append(time.monotonic() - before)
            print(f"{len(lines)} episodes in {took[-1]:.1f} s", flush=True)


def schedules(job: Mapping[str, Any], end: float) -> None:
    """Grade exported schedules beside each other, over and over: every repetition is timed anew."""
    from kbx_env.train.judge import Judge

    sources = {name: [json.loads(x) for x in Path(f).read_text().splitlines()] for name, f in job["files"].items()}
    preset = "default" if job["backend"] == "cuda" else "estimated"
    took: list[float] = []
    with Judge(preset, job["backend"], workers=job["workers"], targets=(), wall=60.0) as judge:
        for repetition in range(job["repetitions"]):
            if not _fits(end, took):
                break
            before = time.monotonic()
            asked = [(name, r["task"], r["predict"]) for name, found in sources.items() for r in found]
            judged = judge([(task, text) for _, task, text in asked])
            with Path(job["rows"]).open("a") as file:
                for (name, task, _), j in zip(asked, judged, strict=True):
                    t = j.outcome.timing
                    line = {"schedule": name, "task": task, "repetition": repetition, "reward": j.reward,
                            "verdict": str(j.outcome.verdict), "speedup": j.outcome.speedup,
                            "low": t.low if t else None, "high": t.high if t else None}  # fmt: skip
                    file.write(json.dumps(line) + "\n")
            took.append(time.monotonic() - before)
            print(f"{len(asked)} gradings in {took[-1]:.1f} s", flush=True)


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
