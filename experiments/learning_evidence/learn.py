"""The steps of `train_evidence.py` that train a language model: SFT, GRPO in its modes, and GRPO with shaped rewards."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.learning_evidence.budget import say
from experiments.learning_evidence.demonstrations import fitting, shown
from experiments.learning_evidence.evidence import Evidence, lines_of
from experiments.learning_evidence.stats import curves, quarters

SFT_KEYS = ("step", "epoch", "seconds", "loss", "mean_token_accuracy")
GRPO_KEYS = (
    "step", "seconds", "gradings", "reward", "compile_rate", "correct_rate", "terms/cases", "masked", "turns", "grading_seconds",
    "entropy", "skipped_updates", "completions/clipped_ratio", "completions/mean_length", "frac_reward_zero_std", "grad_norm",
)  # fmt: skip
HELD = "held.json"
"""File in the work folder with the tasks that SFT was shown and those held back, for GRPO in a later command."""


@dataclass(frozen=True)
class Learner:
    """One run of GRPO."""

    name: str
    """Name of its folder."""
    mode: str
    """``single`` or ``multi``."""
    preset: str
    """The reward preset."""
    tasks: str
    """Patterns of train tasks."""
    seed: int


def answer_of(turns: int, length: int, feedback: int) -> int:
    """Return the tokens of an episode.

    Args:
        turns: number of turns.
        length: tokens of the answer of one turn.
        feedback: tokens of the feedback after a turn.

    Returns:
        Tokens of all answers and the feedback between them.
    """
    return length * turns + feedback * (turns - 1)


def sft(e: Evidence) -> None:
    """Build a model unless there is one, and train it on demonstrations.

    Args:
        e: the run of the script.

    Raises:
        RuntimeError: there is a result already, or SFT made no checkpoint or too few steps.
    """
    from kbx_env.train import models, rows, settings
    from kbx_env.train.memory import weights_of

    from experiments.small_models import build_model
    from kbx_env.spec.catalog import load_tasks

    a, out = e.a, e.work / "sft"
    if out.exists():
        raise RuntimeError(f"{out} is there already: leave part sft out to go on from it, or give another --work")
    seconds, before = e.budget.take("sft", None if a.sft_minutes is None else 60 * a.sft_minutes), time.monotonic()
    if e.model is None:
        sizes = {"hidden": a.hidden, "layers": a.layers, "heads": a.heads, "vocab": a.vocab, "context": a.context, "seed": 0}
        file = e.settings("build", "build", sizes, {"out": str(e.work / "model")})
        e.model = build_model.build(settings.read(build_model.Build, [file]))
    start, e.model = e.model, None  # no GRPO from a model without SFT
    e.result["weights"] = weights_of(start)
    tokenizer = models.tokenizer_for(start)
    data, facts = shown(
        rows.load(a.data), lambda texts: [len(x) for x in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]],
        {t.id for t in load_tasks(split="train", pattern=a.tasks)}, most=a.most_tokens, hold=a.hold, seed=a.hold_seed,
    )  # fmt: skip
    (e.work / HELD).write_text(json.dumps(facts))
    e.result["demonstrations"] = facts
    say(f"model: {e.result['weights']:,} weights; demonstrations: { {k: v for k, v in facts.items() if not k.endswith('_tasks')} }")
    ours = {"trainer": {
        "max_steps": 100_000, "learning_rate": 1e-3, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 20,
        "per_device_train_batch_size": 16 if e.cuda else 2, "logging_steps": 5 if e.cuda else 1, "save_strategy": "no",
        "max_grad_norm": 1.0, "disable_tqdm": True, "gradient_checkpointing": False,  # small models need little memory
    }}  # fmt: skip
    fixed = {"model": str(start), "data": str(rows.write(data, e.work / "shown", "parquet")), "out": str(out)}
    seconds -= time.monotonic() - before

    def collect(last: bool) -> None:
        log = lines_of(out / "log.jsonl")
        e.training["sft"] = [{k: x[k] for k in SFT_KEYS if k in x} for x in log]
        known = [x for x in log if x.get("loss") is not None]
        done = lines_of(out / "final/gradings.json") or [{"step": log[-1]["step"] if log else 0}]
        e.result["sft"] = {
            "steps": done[-1]["step"], "least_steps": a.least_steps, "checkpoint": (out / "final").is_dir(),
            **({k: known[-1].get(k) for k in SFT_KEYS[1:]} if known else {}),
        }  # fmt: skip

    def progress() -> str:
        return f"sft: {e.result['sft']}"

    e.collectors["sft"] = collect
    e.run("sft", {"sft": e.job("sft", seconds, kind="sft", settings=e.settings("sft", "sft", ours, fixed))}, seconds, progress)
    if not (out / "final").is_dir():
        raise RuntimeError("no checkpoint came out of SFT")
    collect(True)
    if (done := e.result["sft"]["steps"]) < a.least_steps:
        # Later steps would spend the remaining minutes on a model that has learnt too little.
        raise RuntimeError(f"SFT did {done} steps, fewer than --least-steps {a.least_steps}: more minutes; the start counts too")
    e.model = out / "final"


def grpo(e: Evidence) -> None:
    """Run GRPO in every mode with every seed side by side, from one checkpoint.

    Args:
        e: the run of the script.

    Raises:
        RuntimeError: no tasks are left for it.
    """
    from kbx_env.spec.catalog import load_tasks

    facts, among = (lines_of(e.work / HELD) or [{}])[-1], [t.id for t in load_tasks(split="train", pattern=e.a.tasks)]
    # The model may have memorized the tasks that SFT was shown.
    if e.a.grpo_on == "held" and facts.get("held_tasks"):
        among = [t for t in among if t in facts["held_tasks"]]
    elif e.a.grpo_on == "held":
        say(f"grpo: {e.work / HELD} names no tasks held back, so all of --tasks are learnt from")
    elif e.a.grpo_on == "unseen":
        if "shown_tasks" not in facts:
            raise RuntimeError(f"--grpo-on unseen: {e.work / HELD} does not say what SFT was shown; run part sft in this folder")
        among = [t for t in among if t not in facts["shown_tasks"]]
    if not among:
        raise RuntimeError(f"--grpo-on {e.a.grpo_on}: it leaves none of --tasks {e.a.tasks}; --grpo-on all takes them as they are")
    pattern = ",".join(among)
    runs = [Learner(f"{mode}-{k}", mode, e.a.reward, pattern, k) for k in range(e.a.seeds) for mode in e.modes]
    _learn(e, "grpo", runs)


def shaping(e: Evidence) -> None:
    """Run GRPO with shaped and with unshaped rewards on the tasks of the shaping, side by side."""
    runs = [
        Learner(f"{preset}-{kind}-{k}", "single", preset if kind == "shaped" else "default", tasks, k)
        for k in range(e.a.seeds) for preset, tasks in presets_of(e.a.shaping_tasks).items() for kind in ("unshaped", "shaped")
    ]  # fmt: skip
    _learn(e, "shaping", runs)


def presets_of(text: str) -> dict[str, str]:
    """Parse ``PRESET=PATTERNS;PRESET=PATTERNS``.

    Args:
        text: the text.

    Returns:
        Patterns of train tasks by preset.

    Raises:
        ValueError: the text has another form.
    """
    found = dict(part.partition("=")[::2] for part in text.split(";") if part)
    if not found or not all(found) or not all(found.values()):
        raise ValueError(f"{text!r}: write PRESET=PATTERNS;PRESET=PATTERNS")
    return found


def _learn(e: Evidence, step: str, runs: Sequence[Learner]) -> None:
    from kbx_env.spec.catalog import load_tasks

    a, seconds, began = e.a, e.budget.take(step), time.monotonic()
    if e.model is None:
        raise RuntimeError("GRPO begins with a checkpoint: --parts sft, --model, or --work of a command that did SFT")
    if there := [r.name for r in runs if (e.work / r.name).exists()]:
        raise RuntimeError(f"{e.work} holds {', '.join(there)} already: leave the part out, or give another --work")
    tasks_of: dict[str, list[str]] = {}
    longest = answer_of(a.turns, a.length, a.feedback)
    for r in runs:
        if r.tasks in tasks_of:
            continue
        every = [t.id for t in load_tasks(split="train", pattern=r.tasks)]
        tasks_of[r.tasks] = some = fitting(e.model, every, a.backend, longest)
        facts = {"tasks": some, "too_long": len(every) - len(some)}
        e.result.setdefault("train_tasks", {})["grpo" if step == "grpo" else r.name.split("-")[0]] = facts
        if not some:
            raise RuntimeError(f"no prompt of {r.tasks} leaves room for {longest} tokens of answers; raise --context")
    seconds -= time.monotonic() - began
    commands = {r.name: e.job(r.name, seconds, kind="grpo", settings=_settings(e, r, tasks_of[r.tasks], len(runs)),
                              gradings=a.gradings, marks=step == "grpo") for r in runs}  # fmt: skip

    def collect(last: bool) -> None:
        logs = {r.name: lines_of(e.work / r.name / "log.jsonl") for r in runs}
        for name, lines in logs.items():
            some = lines_of(e.work / name / "samples.jsonl")
            e.training[name] = [{k: x[k] for k in GRPO_KEYS if k in x} for x in lines]
            e.training[f"{name} samples"] = [*some[:2], *some[-4:]]
            e.result.setdefault("training", {})[name] = quarters(lines)
        if step == "shaping" and last:
            e.result["shaping"], e.files["shaping"] = curves(e.work, presets_of(a.shaping_tasks))

    def progress() -> str:
        facts = {r.name: e.result["training"][r.name] for r in runs}
        return "; ".join(
            f"{n} {x.get('updates', 0)} updates, {x.get('gradings', 0)} gradings, reward {x.get('reward_last_quarter')}"
            for n, x in facts.items()
        )

    e.collectors[step] = collect
    e.run(step, commands, seconds, progress)


def _settings(e: Evidence, r: Learner, tasks: Sequence[str], many: int) -> str:
    """Write the settings of a run and return their file."""
    a = e.a
    turns = a.turns if r.mode == "multi" else 1
    part = a.batch // turns // a.minibatches
    # Answers of a backward pass: several runs share the memory of a GPU.
    most = a.at_once if many <= 6 * max(1, len(e.gpus)) else max(1, a.at_once // 2)
    at_once = max(n for n in range(1, min(part, most) + 1) if part % n == 0)
    ours: dict[str, Any] = {
        # All cores are divided among the runs: while one run grades, others generate.
        "targets": "none", "wall": a.wall, "workers": a.workers or math.ceil(e.cores / many), "samples": 2, "vllm": "false",
        "per_turn_credit": r.mode == "multi",
        "trainer": {
            "learning_rate": 5e-5, "lr_scheduler_type": "constant", "max_grad_norm": 0.5,
            "temperature": a.temperature, "min_p": a.min_p or None,
            "num_generations": a.generations, "per_device_train_batch_size": at_once,
            "gradient_accumulation_steps": part // at_once, "disable_tqdm": True, "gradient_checkpointing": False,
            # Left out where it is TRL's default: --config may have generation_batch_size instead.
            **({"steps_per_generation": a.minibatches * (part // at_once)} if a.minibatches > 1 else {}),
        },
    }  # fmt: skip
    # Kernels are not timed: other processes use this GPU without holding the grader's lock.
    fixed: dict[str, Any] = {
        "model": str(e.model), "out": str(e.work / r.name), "mode": r.mode, "max_turns": turns, "seed": r.seed,
        "tasks": ",".join(tasks), "reward": r.preset, "backend": a.backend, "timing": False,
        "turn_length": a.length if r.mode == "multi" else None,
        "trainer": {"max_steps": 100_000, "save_strategy": "no", "logging_steps": 1,
                    "max_completion_length": answer_of(turns, a.length, a.feedback)},
    }  # fmt: skip
    return e.settings("grpo", f"grpo-{r.name}", ours, fixed)


def checkpoint_of(folder: Path) -> dict[str, int] | None:
    """Return gradings and updates of a checkpoint that was kept; ``None`` where there is none."""
    found = lines_of(folder / "gradings.json")
    return {"gradings": found[-1]["gradings"], "updates": found[-1]["step"]} if found else None
