"""Compare reward presets on a learner without a language model: policies that choose at a few places. CPU only, minutes.

    python experiments/preset_comparison/compare_presets.py OUT.json --presets default,quantization --tasks 'quantization/*'
        [--places 8] [--sets 2] [--odds 0.65] [--rate 0.1] [--runs 16] [--gradings 6144] [--workers 2] [--store FILE.sqlite]
        [--oracle 0.18] [--kinds operator,number,name,line]

Each kernel has places that are faulty or not (``experiments/noisy_demonstrations``; sets of places by seed). All combinations are
graded once, on the CPU. Then each preset trains policies that choose each place independently and start with probability
``--odds`` for the fault. They learn by the gradient of GRPO (groups of 16 answers, rewards centred and divided by the group's
standard deviation, Adam). Learning curves are compared as in ``train/compare_rewards.py``: gradings needed for the first preset's
final correct rate. ``together`` has the mean of all tasks' curves, as in a run on all of them. ``--oracle`` adds one more reward:
the first preset and, for wrong kernels, so many times the share of places without a fault. No grader knows that share; it shows
the largest effect that a hint could have. The only noise is that of the draws, and no language model takes part: how far the
results carry over has to be measured with one. After an interruption the same command continues: gradings are in ``--store`` (by
default beside OUT).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kbx_env.rewards.compose import load_preset
from kbx_env.train import data
from kbx_env.train.mutation import with_faults
from kbx_env.train.reward_curves import Curves, Run, ratio

from experiments.noisy_demonstrations.data import RUNNING, NoisyKernel, line_of, noisy_kernels
from kbx_env import versions
from kbx_env.errors import KbxError, UsageError
from kbx_env.outcome import Fault, Outcome
from kbx_env.spec.catalog import load_tasks
from kbx_env.store import Store

GROUP, GROUPS = 16, 4
"""Answers to a prompt, and prompts of a step."""
ORACLE = "oracle"
"""Name of the reward of ``--oracle``."""
Array = np.ndarray[Any, np.dtype[np.float64]]


def table(one: NoisyKernel, workers: int, store: Store) -> list[Outcome]:
    """Grade all combinations of a kernel's faults.

    Args:
        one: the kernel.
        workers: gradings at a time.
        store: keeps the gradings.

    Returns:
        The outcomes; bit k of the index says whether place k is faulty.
    """
    count = len(one.faults)
    texts = [with_faults(one.source, [f for k, f in enumerate(one.faults) if n >> k & 1]) for n in range(2**count)]
    return data.graded([(one.task, "places", t) for t in texts], workers, store, True, None)


def learn(rewards: Array, right: Array, odds: float, rate: float, runs: int, steps: int, seed: int) -> Array:
    """Train policies on a reward for each combination.

    Args:
        rewards: (2^places,) reward of each combination.
        right: (2^places,) 1 where a combination is correct.
        odds: initial probability of each fault.
        rate: learning rate of Adam, for the logits.
        runs: number of policies.
        steps: number of updates.
        seed: seed of the draws.

    Returns:
        (runs, steps) correct rates.
    """
    draw, places = np.random.default_rng(seed), int(math.log2(len(rewards)))
    bits = 1 << np.arange(places)
    logits = np.full((runs, places), math.log(odds / (1 - odds)))
    first, second = np.zeros_like(logits), np.zeros_like(logits)
    rates = np.zeros((runs, steps))
    for step in range(steps):
        p = 1 / (1 + np.exp(-logits))
        chosen = draw.random((runs, GROUPS, GROUP, places)) < p[:, None, None, :]
        index = (chosen * bits).sum(-1)
        earned = rewards[index]
        advantage = (earned - earned.mean(-1, keepdims=True)) / (earned.std(-1, keepdims=True) + 1e-4)
        gradient = (advantage[..., None] * (chosen - p[:, None, None, :])).mean((1, 2))
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        logits += rate * (first / (1 - 0.9 ** (step + 1))) / (np.sqrt(second / (1 - 0.999 ** (step + 1))) + 1e-8)
        rates[:, step] = right[index].mean((1, 2))
    return rates


def curves(preset: str, rates: Array) -> Curves:
    """Return learning curves as ``train/compare_rewards.py`` makes them, from (runs, steps) correct rates of a preset."""
    at = np.arange(1, rates.shape[1] + 1) * float(GROUP * GROUPS)
    return Curves.of([Run(preset, k, at, {"correct": row}, 0.0) for k, row in enumerate(rates)], "correct", float(at[-1]))


def compared(rates: Mapping[str, Array]) -> dict[str, Any]:
    """Compare presets by the gradings that they need for the first one's final rate.

    Args:
        rates: (runs, steps) correct rates by preset.

    Returns:
        By preset its final rate, the gradings needed, and for all but the first the ratio to the first preset's.
    """
    made = {preset: curves(preset, r) for preset, r in rates.items()}
    base, *others = made
    found: dict[str, Any] = {}
    for preset, c in made.items():
        target = float(made[base].final.mean())
        found[preset] = {"final": float(c.final.mean()), "needed": c.reached(target) if target > 0 else None}
        if preset in others:
            found[preset] |= ratio(made[base], c)
    return found


def taught(outcomes: Sequence[Outcome], presets: Sequence[str], a: argparse.Namespace) -> dict[str, Array]:
    """Train policies under each preset, all with the same random numbers.

    Args:
        outcomes: outcomes of all combinations.
        presets: names of presets.
        a: options of the command line.

    Returns:
        (runs, steps) correct rates by preset.
    """
    right, steps = np.array([float(o.correct) for o in outcomes]), a.gradings // (GROUP * GROUPS)
    rewards = {p: np.array([load_preset(p)(o) or 0.0 for o in outcomes]) for p in presets}
    if a.oracle is not None:
        sound = 1 - np.array([n.bit_count() for n in range(len(right))]) / math.log2(len(right))
        rewards[ORACLE] = rewards[presets[0]] + np.where(right, 0.0, a.oracle * sound)
    return {p: learn(r, right, a.odds, a.rate, a.runs, steps, a.seed) for p, r in rewards.items()}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("out", type=Path)
    p.add_argument("--presets", default="default,quantization", help="the others are compared with the first")
    p.add_argument("--tasks", default="quantization/*", help="patterns of train tasks")
    for name, default, what in (
        ("places", 8, "places of each kernel that may be faulty"), ("sets", 2, "sets of places of each kernel"),
        ("runs", 16, "policies of each preset"), ("gradings", 6144, "gradings of each policy"),
        ("workers", 2, "gradings at a time"), ("seed", 0, "seed of places and draws"),
    ):  # fmt: skip
        p.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    p.add_argument("--odds", type=float, default=0.65, help="initial probability of each fault")
    p.add_argument("--rate", type=float, default=0.1, help="learning rate of the logits")
    p.add_argument("--kinds", default=",".join(RUNNING), help="kinds of faults, as in experiments/noisy_demonstrations")
    p.add_argument("--oracle", type=float, help="largest reward of a hint that knows the share of places without a fault")
    p.add_argument("--store", type=Path, help="file of gradings (default: beside OUT)")
    return p


def _check(p: argparse.ArgumentParser, a: argparse.Namespace) -> None:
    least = 10 * GROUP * GROUPS
    positive = [a.rate] if a.oracle is None else [a.rate, a.oracle]
    if min(a.places, a.sets, a.workers) < 1 or a.runs < 2 or a.gradings < least or not 0 < a.odds < 1 or not min(positive) > 0:
        p.error(
            f"--places, --sets, --workers at least 1, --runs 2, --gradings {least}; --odds in (0, 1), --rate and --oracle above 0"
        )


def compare(a: argparse.Namespace) -> dict[str, Any]:
    """Compare presets on all tasks, and write the result after each kernel.

    Args:
        a: options of the command line.

    Returns:
        The result.

    Raises:
        UsageError: no task has a kernel with so many places.
    """
    presets = [load_preset(n).name for n in a.presets.split(",")]
    tasks = load_tasks(split="train", pattern=a.tasks)
    result: dict[str, Any] = {"together": None}
    kinds = [k.strip() for k in a.kinds.split(",")]
    rows, rates = list[dict[str, Any]](), list[dict[str, Array]]()
    with closing(Store(a.store or a.out.with_suffix(".sqlite"))) as store:
        for number in range(a.sets):
            for one in noisy_kernels(tasks, a.places, a.seed + number, workers=a.workers, store=store, kinds=kinds):
                outcomes = table(one, a.workers, store)
                rates.append(taught(outcomes, presets, a))
                row: dict[str, Any] = {
                    "task": one.task.id, "set": number, "right": sum(o.correct for o in outcomes),
                    "masked": sum(o.fault is Fault.INFRA for o in outcomes), "presets": compared(rates[-1]),
                    "places": [line_of(one.source, f) for f in one.faults],
                }  # fmt: skip
                rows.append(row)
                finals = ", ".join(f"{p} {x['final']:.3f}" for p, x in row["presets"].items())
                print(f"{one.task.id}, set {number}: final correct rates {finals}", flush=True)
                # As in a run on all of these tasks: the target is the first preset's mean over all of them.
                pooled = {p: np.mean([r[p] for r in rates], axis=0) for p in rates[0]}
                result |= {
                    "about": versions.environment("cpu"), "settings": {k: str(v) for k, v in vars(a).items()}, "rows": rows,
                    "together": compared(pooled),
                }  # fmt: skip
                part = a.out.with_suffix(".part")
                part.write_text(json.dumps(result, indent=1))
                part.replace(a.out)
    if not rows:
        raise UsageError(f"no task of {a.tasks!r} has a kernel with {a.places} such places")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when written, 2 on bad usage, 130 when interrupted (the same command continues)."""
    p = parser()
    a = p.parse_args(argv)
    _check(p, a)
    try:
        result = compare(a)
    except KbxError as e:
        p.error(str(e))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    print(json.dumps(result["together"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
