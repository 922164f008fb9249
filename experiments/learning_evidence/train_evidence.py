"""Measure what SFT, GRPO (one answer, several turns) and PPO do to a small model in some minutes of a GPU.

    python experiments/learning_evidence/train_evidence.py OUT --data runs/data/demonstrations.parquet [--minutes 9] [--seeds 3]
        [--work W] [--parts sft,single,multi,shaping,report,ppo] [--config FILE.yaml] [--model CHECKPOINT]
    python experiments/learning_evidence/train_evidence.py OUT2 --parts report --work W        continues with the checkpoints in W

``sft``: a model with random weights learns demonstrations, except those of a share ``--hold`` of the tasks and those that are too
long. ``single`` and ``multi``: GRPO continues on the tasks held back (or others: ``--grpo-on``). All seeds run side by side, and a
turn may be as long as a single answer. Runs are compared at the largest number of gradings that all of them reached. ``shaping``:
GRPO on tasks of fusion and quantization with shaped and unshaped rewards, compared by the gradings that shaped runs need for the
final rates of unshaped ones. ``report`` evaluates the SFT checkpoint and all of ``single`` and ``multi`` on the whole eval split
with held-out shapes. ``ppo`` learns schedules (measured, on a GPU) and grades them beside the unchanged experts at published and
at held-out sizes.

Each step has a share of the minutes. A step that runs out of time is stopped with SIGINT, and its results so far count. OUT gets
evidence.json, training.json, shaping.json, evaluation.json and ppo.json; they are written every 15 s, atomically, and also when
SIGINT or SIGTERM ends this script. Checkpoints are in ``--work``; a later command with the same folder continues from them.
``--config`` has sections ``build``, ``sft``, ``grpo`` and ``ppo`` with settings of these scripts.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.learning_evidence.budget import SHARES, Budget, say, together
from experiments.learning_evidence.demonstrations import shown
from experiments.learning_evidence.evaluate import common, ppo, report
from experiments.learning_evidence.evidence import Evidence, replace
from experiments.learning_evidence.jobs import MARKS, child
from experiments.learning_evidence.learn import grpo, presets_of, sft, shaping
from experiments.learning_evidence.stats import beside, compared, curves, quarters

__all__ = ["SHARES", "Budget", "beside", "common", "compared", "curves", "quarters", "replace", "shown", "together"]
PARTS = ("sft", "single", "multi", "shaping", "report", "ppo")
STEPS: Mapping[str, Callable[[Evidence], None]] = {"sft": sft, "grpo": grpo, "shaping": shaping, "report": report, "ppo": ppo}
PPO_TASKS = (
    "loss/cross_entropy,fusion/fused_sigmoid_batch_norm,spatialops/interpolate,index/permute_copy,math/bessel_j1"
)
"""Tasks of the train split that are cheap to grade and for which the cost model estimates that better schedules exist. None is a
matrix product: its larger tiles take the assembler longer than a grading may take."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line.

    Args:
        argv: the arguments; ``None`` for those of the process.

    Returns:
        The options.
    """
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path)
    p.add_argument("--data", help="demonstrations, as train/data.py writes them (part sft)")
    p.add_argument("--minutes", type=float, default=9.0)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--sft-minutes", type=float, help="of these; default: a share, as every step has one")
    p.add_argument("--parts", default="sft,single,multi,report,ppo", help="default: all but shaping")
    p.add_argument("--config", help="YAML with sections build, sft, grpo, ppo: over this script's own values")
    p.add_argument("--model", help="begin with this checkpoint instead of random weights")
    p.add_argument("--work", help="folder of checkpoints, kept, and those that are there are used; default: a temporary one")
    p.add_argument("--backend", default="cpu", help="of gradings but PPO's: cpu, or cuda (never timed: runs share the GPU)")
    p.add_argument("--workers", type=int, help="gradings at a time of each process; default: the cores, shared out")
    p.add_argument("--wall", type=float, default=20.0, help="seconds of one grading")
    for name, value, text in (
        ("hidden", 512, "width"), ("layers", 8, "of the model"), ("heads", 8, "of attention"), ("vocab", 4096, "tokens"),
        ("context", 4096, "tokens"), ("length", 1024, "tokens of one answer"), ("turns", 2, "of multi, and of the evaluation"),
        ("feedback", 512, "tokens of the verdict after a turn, beside those of answers"),
        ("most-tokens", 1000, "of a completion; longer demonstrations are left out"),
        ("least-steps", 50, "of SFT; from fewer nothing goes on"), ("hold-seed", 0, "of the choice of tasks held back"),
        ("generations", 8, "answers of a group"), ("batch", 64, "answers graded at a time, at most"),
        ("minibatches", 1, "parts of these, an update each"), ("at-once", 16, "answers of a backward pass, at most"),
        ("gradings", 1024, "of each run"), ("samples", 4, "answers to each task of the eval split"),
        ("round", 1, "of these at a time"), ("repetitions", 5, "of the grading of schedules"),
        ("ppo-seeds", 1, "policies, trained side by side"),
    ):  # fmt: skip
        p.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    for name, share, text in (
        ("hold", 0.33, "share of the tasks with short demonstrations that SFT is not shown, for GRPO; 0: GRPO has them all"),
        ("temperature", 0.8, "of sampling, in GRPO and in the evaluation"), ("min-p", 0.0, "of the same; above 0 entropy climbs"),
    ):  # fmt: skip
        p.add_argument(f"--{name}", type=float, default=share, help=f"{text} (default: {share})")
    p.add_argument("--tasks", "--train-tasks", default="*", help="patterns of train tasks for GRPO; some of these are held back")
    p.add_argument("--grpo-on", choices=("held", "unseen", "all"), default="held",
                   help="those of --tasks held back, all not shown to SFT (too long ones also), or all; default: held")  # fmt: skip
    p.add_argument("--eval-tasks", default="", help="patterns of the eval split: reported by themselves too, beside all")
    p.add_argument("--report-on", default="", help="patterns of train tasks that report asks for instead of the eval split")
    p.add_argument("--reward", default="default", help="preset for single and multi; evaluated is under default (default: default)")
    p.add_argument("--shaping-tasks", default="fusion=fusion/*;quantization=quantization/*", help="PRESET=PATTERNS;...")
    p.add_argument("--ppo-tasks", default=PPO_TASKS, help=f"patterns of train tasks (default: {PPO_TASKS})")
    p.add_argument("--child", help=argparse.SUPPRESS)
    a = p.parse_args(argv)
    parts = a.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        p.error(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    if not a.child and "sft" in parts and not (a.data and Path(a.data).exists()):
        p.error("--data: no demonstrations; make them with train/data.py")
    if min(a.seeds, a.turns, a.ppo_seeds, a.samples, a.round, a.length, a.repetitions) < 1 or not a.minutes > 0:
        p.error("--seeds, --minutes, --turns, --samples, --round, --length, --repetitions and --ppo-seeds are above 0")
    if a.sft_minutes is not None and not 0 < a.sft_minutes <= a.minutes:
        p.error(f"--sft-minutes {a.sft_minutes}: above 0, at most --minutes {a.minutes}")
    if not 0 <= a.hold < 1 or not a.temperature > 0 or not 0 <= a.min_p < 1:
        p.error("--hold and --min-p are from 0 to below 1, --temperature is above 0")
    if not a.child:
        _check(p, a)
    parts = ("generations", "turns", "minibatches")
    if min(a.minibatches, a.at_once) < 1 or a.batch % math.prod(vars(a)[n] for n in parts):
        p.error(f"--batch {a.batch} is no multiple of {' x '.join(f'--{n} {vars(a)[n]}' for n in parts)}; all are above 0")
    if math.ceil(a.gradings / MARKS) < a.batch:
        p.error(f"--gradings {a.gradings}: at least {MARKS} batches of --batch {a.batch}, {MARKS * a.batch} in all")
    return a


def _check(p: argparse.ArgumentParser, a: argparse.Namespace) -> None:
    """Check patterns and presets, before anything slow starts."""
    from kbx_env.rewards.compose import load_preset

    from kbx_env.errors import UsageError
    from kbx_env.spec.catalog import load_tasks

    option = "--reward"
    try:
        load_preset(a.reward)
        option = "--shaping-tasks"
        presets = presets_of(a.shaping_tasks)
        for preset in presets:
            load_preset(preset)
        patterns = [("--tasks", "train", a.tasks), ("--ppo-tasks", "train", a.ppo_tasks), ("--eval-tasks", "eval", a.eval_tasks),
                    ("--report-on", "train", a.report_on)]  # fmt: skip
        for checked, split, pattern in [*((option, "train", v) for v in presets.values()), *patterns]:
            option = checked
            load_tasks(split=split, pattern=pattern or "*")
    except (UsageError, ValueError) as e:
        p.error(f"{option}: {e}")


@contextlib.contextmanager
def _polite() -> Iterator[None]:
    """Let SIGTERM end the children as Ctrl-C does, and ignore further signals, so that results are written completely."""
    names = (signal.SIGTERM, signal.SIGINT)

    def stop(*_: Any) -> None:
        for s in names:
            signal.signal(s, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {s: signal.signal(s, stop) for s in names}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when all is done, 1 when something failed, 130 when interrupted. OUT has the results."""
    a = arguments(argv)
    if a.child:
        return child(a.child)
    with _polite():
        try:
            return Evidence(a).all(STEPS)
        except KeyboardInterrupt:
            say("interrupted")
            return 130


if __name__ == "__main__":
    sys.exit(main())
