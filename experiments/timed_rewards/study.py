"""Steps 2 and 3, on a CPU: train on the measured rewards of step 1, and compare with best-of-n and random search.

    python experiments/timed_rewards/study.py TABLE.jsonl runs/timed-rewards [--seeds 3] [--steps 60]

For each seed a tiny model is taught the project's kernels with varied schedules and faults. GRPO then pays its answers what step 1
measured at training sizes: the reward is that of one of the measurements, drawn anew for every answer. An answer with faults is
paid what the same faults earned with the project's own schedule, and an answer outside the set of ``answers.py`` nothing; neither
is graded. Everything is scored at held-out sizes, which no method sees: ``OUT/table.md`` and ``OUT/results.json``. A schedule that
step 1 has not measured at both sizes is left out of the study. What is finished is kept.

Best-of-n draws n answers of the SFT model, and random search draws n of the set; each keeps the answer with the highest reward.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script from a clone
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from kbx_env.train import data as training_data
from kbx_env.train.models import tokenizer_for
from kbx_env.train.rows import about, message, write

from experiments.learning_curve import beginner, curve
from experiments.learning_evidence.stats import interval
from experiments.timed_rewards.answers import HELD_OUT, SPACES, TRAINED, Answer, Schedule, by_shape
from experiments.timed_rewards.grade import HELD, PUBLISHED
from experiments.true_reward.cheats import shape_of
from experiments.true_reward.study import Recorder
from kbx_env import jsonl
from kbx_env.envs.answer import strip_fences
from kbx_env.errors import UsageError
from kbx_env.outcome import Verdict
from kbx_env.spec.catalog import load_task
from kbx_env.trl import prompts

ODDS, ROWS = 0.3, 400
"""Probability of each fault in a demonstration, and demonstrations of each task."""
GENERATIONS, TOKENS, SAMPLES = 16, 120, 128
"""Answers to each task in a step of GRPO, tokens of the longest answer, answers to each task in an evaluation."""
BUDGETS = (4, 16, 64)
"""Gradings of each task for best-of-n and random search, beside as many as GRPO had."""
REPEATS = 200
"""Repetitions of a search, whose results are averaged."""
METRICS = ("log2_speedup", "correct", "fast@1.0", "fast@1.2")


class Table:
    """The measurements of step 1."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Sort the rows of ``grade.py``; infrastructure faults and times that nobody believes are left out.

        Args:
            rows: the rows.

        Raises:
            UsageError: a task lacks its faulty kernels, or fewer than two of its schedules are measured.
        """
        self._rows = dict[tuple[str, Schedule, int, str], list[Mapping[str, Any]]]()
        for r in rows:
            if r["verdict"] != Verdict.INFRA_FAULT and not any(c["void"] for c in r["cases"]):
                key = r["task"], tuple(r["schedule"]), r["faults"], r["sizes"]
                self._rows.setdefault(key, []).append(r)
        self.tasks = [t for t in SPACES if any(key[0] == t for key in self._rows)]
        self._shapes = {t: by_shape(t) for t in self.tasks}
        self.schedules: dict[str, list[Schedule]] = {}
        for task in self.tasks:
            sizes = (HELD,) if task in HELD_OUT else (PUBLISHED, HELD)
            known = [s for s in SPACES[task].schedules() if all((task, s, 0, z) in self._rows for z in sizes)]
            own, faults = SPACES[task].schedules()[0], range(1, 1 << len(SPACES[task].faults))
            if lacking := [f for f in faults if (task, own, f, PUBLISHED) not in self._rows]:
                raise UsageError(f"{task}: no grading of the faults {lacking}; continue step 1")
            if len(known) < 2:
                raise UsageError(f"{task}: {len(known)} schedules are measured at all sizes; continue step 1")
            self.schedules[task] = known

    def find(self, task: str, source: str) -> Answer | None:
        """Return the answer of the study that a source is; ``None`` if it is none, or its schedule is not measured."""
        found = self._shapes[task].get(shape_of(source) or "")
        return found if found is not None and found.schedule in self.schedules[task] else None

    def answers(self, task: str) -> list[Answer]:
        """Return all answers for a task whose schedules are measured."""
        faults = range(1 << len(SPACES[task].faults))
        return [Answer(task, s, f) for s in self.schedules[task] for f in faults]

    def reward(self, answer: Answer | None, draw: random.Random) -> float:
        """Return the reward of an answer at training sizes: that of one measurement, drawn by chance."""
        if answer is None:
            return 0.0
        schedule = answer.schedule if not answer.faults else SPACES[answer.task].schedules()[0]
        rewards = [r["reward"] for r in self._rows[answer.task, schedule, answer.faults, PUBLISHED]]
        return float(draw.choice(rewards))

    def log2_speedup(self, answer: Answer | None) -> float | None:
        """Return the mean logarithm of the measured speedups at held-out sizes; ``None`` for a kernel that is not correct."""
        if answer is None or answer.faults:
            return None
        rows = self._rows[answer.task, answer.schedule, 0, HELD]
        speeds = [r["speedup"] for r in rows if r["verdict"] == Verdict.CORRECT and r["speedup"]]
        return statistics.fmean(map(math.log2, speeds)) if len(speeds) == len(rows) else None


def scores(values: Sequence[float | None]) -> dict[str, float]:
    """Return the metrics of some answers.

    Args:
        values: log2 of each answer's speedup at held-out sizes; ``None`` where it is not correct.

    Returns:
        ``log2_speedup``: mean over correct answers (nan without any); ``correct``, ``fast@p``: shares of all answers.
    """
    right = [v for v in values if v is not None]
    found = {"log2_speedup": statistics.fmean(right) if right else math.nan, "correct": len(right) / len(values)}
    return found | {f"fast@{p}": sum(v > math.log2(p) for v in right) / len(values) for p in (1.0, 1.2)}


def searched(
    table: Table, drawn: Callable[[random.Random, int], Sequence[Answer | None]], count: int, draw: random.Random
) -> dict[str, float]:  # fmt: skip
    """Score a search that grades ``count`` answers at training sizes and keeps the one with the highest reward.

    Args:
        table: the measurements.
        drawn: draws that many answers for one task.
        count: gradings.
        draw: random numbers.

    Returns:
        The metrics at held-out sizes, over ``REPEATS`` repetitions.
    """
    kept = list[float | None]()
    for _ in range(REPEATS):
        paid = [(table.reward(a, draw), draw.random(), a) for a in drawn(draw, count)]
        kept.append(table.log2_speedup(max(paid, key=lambda p: p[:2])[2]))
    return scores(kept)


def demonstrations(table: Table, seed: int) -> list[dict[str, Any]]:
    """Draw demonstrations of all tasks: every measured schedule is equally frequent, each fault is there with ``ODDS``."""
    rows = list[dict[str, Any]]()
    for task in map(load_task, table.tasks):
        draw = random.Random(f"{seed} {task.id} timed")
        for _ in range(ROWS):
            faults = sum((draw.random() < ODDS) << k for k in range(len(SPACES[task.id].faults)))
            answer = Answer(task.id, draw.choice(table.schedules[task.id]), faults)
            shown = {"prompt": [message(task, "cuda")], "completion": [training_data.answer(answer.source)]}
            rows.append({**shown, "variation": f"{answer.schedule} {faults}", **about(task)})
    return rows


def sampled(model: Path, tasks: Sequence[str], count: int, seed: int) -> dict[str, list[str]]:
    """Draw answers of a model at temperature 1.

    Args:
        model: folder of the checkpoint.
        tasks: the tasks.
        count: answers to each.
        seed: seed of the draws.

    Returns:
        The sources, by task.
    """
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer, found = tokenizer_for(model), dict[str, list[str]]()
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    torch.manual_seed(seed)
    for task in map(load_task, tasks):
        asked = tokenizer.apply_chat_template(
            [message(task, "cuda")], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            ids = network.generate(
                **asked, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=TOKENS, num_return_sequences=count,
                pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
        texts = tokenizer.batch_decode(ids[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        found[task.id] = [strip_fences(text, task.entry) for text in texts]
    return found


def train(table: Table, model: Path, out: Path, seed: int, steps: int) -> Path:
    """Train by GRPO on the rewards of the table, unless that is done.

    Args:
        table: the measurements.
        model: the checkpoint to begin with.
        out: folder of the run.
        seed: seed of order, sampling, and draws of measurements.
        steps: steps of GRPO.

    Returns:
        The trained checkpoint.
    """
    if (out / "done").is_file():
        return out / "final"
    from trl import GRPOConfig, GRPOTrainer

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    data = prompts("train", tasks=",".join(t for t in table.tasks if t in TRAINED), backend="cuda")
    args = GRPOConfig(
        str(out / "grpo"), seed=seed, max_steps=steps, num_generations=GENERATIONS,
        per_device_train_batch_size=GENERATIONS * len(data), max_completion_length=TOKENS, learning_rate=1e-3,
        lr_scheduler_type="linear", scale_rewards="none", loss_type="dr_grpo", adam_epsilon=1e-6, adam_beta2=0.99,
        max_grad_norm=0.05, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, bf16=False,
    )  # fmt: skip
    draw = random.Random(f"{seed} measurements")

    def pay(pairs: Sequence[tuple[str, str]]) -> list[float]:
        return [table.reward(table.find(*pair), draw) for pair in pairs]

    trainer = GRPOTrainer(str(model), Recorder(out, pay), args, train_dataset=data)
    curve.only_ours(trainer, curve.Printer(f"seed {seed}", steps, {"reward": "reward"}))
    trainer.train()
    trainer.save_model(str(out / "final"))
    (out / "done").touch()
    return out / "final"


def evaluated(table: Table, folder: Path, start: Path, final: Path, seed: int, steps: int) -> dict[str, dict[str, Any]]:
    """Score all methods of one seed at held-out sizes.

    Args:
        table: the measurements.
        folder: of the seed.
        start: the SFT checkpoint.
        final: the trained checkpoint.
        seed: the seed.
        steps: steps of GRPO, whose answers to a task are its gradings.

    Returns:
        For each method the metrics by task; ``distinct`` is the number of different answers that GRPO had graded, by task.
    """
    drawn = {
        name: {t: [table.find(t, s) for s in sources] for t, sources in sampled(model, table.tasks, SAMPLES, seed).items()}
        for name, model in (("SFT start", start), ("GRPO", final))
    }
    found: dict[str, dict[str, Any]] = {
        name: {t: scores([table.log2_speedup(a) for a in some]) for t, some in of.items()} for name, of in drawn.items()
    }
    seen = [(r["task"], r["source"]) for r in jsonl.read(folder / "grpo/sources.jsonl")]
    found["distinct"] = {}
    draw = random.Random(f"{seed} search")
    for task in (t for t in table.tasks if t in TRAINED):
        every = table.answers(task)
        distinct = len({a for of, source in seen if of == task and (a := table.find(task, source))})
        found["distinct"][task] = distinct
        for count, name in [(n, str(n)) for n in BUDGETS] + [(max(1, distinct), "distinct"), (GENERATIONS * steps, "equal")]:
            found.setdefault(f"best-of-n, {name}", {})[task] = searched(
                table, lambda rng, n, pool=drawn["SFT start"][task]: rng.choices(pool, k=n), count, draw
            )
            found.setdefault(f"random search, {name}", {})[task] = searched(
                table, lambda rng, n, pool=every: rng.sample(pool, min(n, len(pool))), count, draw
            )
    return found


def told(table: Table, by_seed: Sequence[Mapping[str, Mapping[str, Any]]], steps: int) -> tuple[str, dict[str, Any]]:
    """Return the results of all seeds as Markdown and as plain JSON types.

    Args:
        table: the measurements.
        by_seed: of ``evaluated``, for each seed.
        steps: steps of GRPO.

    Returns:
        Both. Intervals are 95 % bootstraps that draw seeds and tasks; differences are of equal seeds and tasks.
    """
    asked, untrained = ([t for t in table.tasks if (t in TRAINED) is trained] for trained in (True, False))
    results: dict[str, Any] = {"distinct": [dict(of["distinct"]) for of in by_seed]}
    names = {str(n): f"{n} gradings of a task" for n in BUDGETS}
    names |= {"distinct": "as many as GRPO had different answers", "equal": f"{GENERATIONS * steps} gradings of a task, as GRPO"}
    lines = list[str]()
    for title, tasks in (("Trained tasks, held-out sizes", asked), ("Held-out tasks, held-out sizes", untrained)):
        if not tasks:
            continue
        methods = [m for m in by_seed[0] if m != "distinct" and tasks[0] in by_seed[0][m]]
        lines += [f"## {title}", "", "| method | " + " | ".join(METRICS) + " |", "|---|" + "---|" * len(METRICS)]
        of = {m: {k: np.array([[seed[m][t][k] for t in tasks] for seed in by_seed]) for k in METRICS} for m in methods}
        pairs = {f"GRPO - {m}": {k: of["GRPO"][k] - of[m][k] for k in METRICS} for m in methods if m != "GRPO"}
        results[title] = {m: {k: interval(values[k]) for k in METRICS} for m, values in (of | pairs).items()}
        for method, values in results[title].items():
            kind, _, budget = method.partition(", ")
            called = f"{kind}, {names[budget]}" if budget else kind
            lines.append(f"| {called} | " + " | ".join(_cell(values[k]) for k in METRICS) + " |")
        lines.append("")
    lines += ["## By task: log2 of the speedup of correct answers, mean over seeds", ""]
    lines += ["| task | measured schedules | slowest | own | fastest | SFT start | GRPO |", "|---|---|---|---|---|---|---|"]
    for task in table.tasks:
        known = {s: table.log2_speedup(Answer(task, s)) for s in table.schedules[task]}
        right = [v for v in known.values() if v is not None]
        means = [float(np.nanmean([seed[m][task]["log2_speedup"] for seed in by_seed])) for m in ("SFT start", "GRPO")]
        numbers = [min(right, default=math.nan), known.get(SPACES[task].schedules()[0]), max(right, default=math.nan), *means]
        cells = ["none" if v is None or math.isnan(v) else f"{v:.3f}" for v in numbers]
        lines.append(f"| {task} | {len(known)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n", results


def _cell(of: Mapping[str, Any]) -> str:
    return "unknown" if of["mean"] is None else f"{of['mean']:.3f} [{of['low']:.3f}, {of['high']:.3f}]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; exit status 0 when done, 2 on bad usage."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("table", type=Path, metavar="TABLE.jsonl", help="of grade.py")
    p.add_argument("out", type=Path, metavar="OUT")
    p.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0")
    p.add_argument("--only", type=int, help="train this seed and stop")
    p.add_argument("--steps", type=int, default=60, help=f"steps of GRPO, {GENERATIONS} answers to each task")
    p.add_argument("--sft-steps", type=int, default=400)
    a = p.parse_args(argv)
    try:
        if not a.table.is_file():
            raise UsageError(f"no table {str(a.table)!r}; make it on a GPU: python experiments/timed_rewards/grade.py {a.table}")
        table = Table(jsonl.read(a.table, skip_broken=True))
    except UsageError as e:
        print(f"study.py: {e}", file=sys.stderr)
        return 2
    import torch
    from datasets import Dataset

    curve.prepare()
    torch.set_num_threads(1)  # for so small a model more threads are slower
    found = list[dict[str, dict[str, Any]]]()
    for seed in range(a.seeds) if a.only is None else (a.only,):
        folder = a.out / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        start = folder / "taught/sft/final"
        if not (folder / "taught.done").is_file():
            shutil.rmtree(folder / "taught", ignore_errors=True)
            shown = write(Dataset.from_list(demonstrations(table, seed)), folder / "demonstrations", "parquet")
            beginner.taught(folder / "taught", shown, seed, a.sft_steps)
            (folder / "taught.done").touch()
        final = train(table, start, folder / "grpo", seed, a.steps)
        if a.only is None:
            found.append(evaluated(table, folder, start, final, seed, a.steps))
    if a.only is not None:
        return 0
    text, results = told(table, found, a.steps)
    (a.out / "table.md").write_text(text)
    (a.out / "results.json").write_text(json.dumps({"tasks": found, **results}, indent=1))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
