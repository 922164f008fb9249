"""The same model, data and seeds under a naive grader and under ours: how many answers are cheats, how many truly correct?

    python experiments/true_reward/study.py runs/true-reward --seeds 3 [--rewards naive,ours,naive-speed] [--only 1]

For each seed a tiny model is taught demonstrations that mix honest kernels with known cheats (``cheats.py``). GRPO then starts from
this model once for each reward. Afterwards every distinct answer of all runs is graded by the naive grader, and those that it finds
right by ours, on inputs that no training saw. Then each step's answers are counted: ``OUT/steps.jsonl``, ``OUT/table.md`` and
``OUT/true_reward.png``.
What is finished is kept: the same command continues a killed run. ``--only SEED`` trains one seed and stops, so that seeds can be
trained side by side; ``--count`` then counts.

Rewards: ``naive`` is 1/6 for running and 5/6 for two right cases (``tests/zoo/naive.py`` without its speed term); ``naive-speed``
is the same with its speed term, measured in Triton's interpreter, in which torch is far faster than any kernel; ``naive-gpu`` takes
the speed terms of demonstrated answers from ``speeds.py`` and 0 for all others; ``ours`` is ``KernelReward("default")`` on the CPU
backend. All lie between 0 and 1.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script from a clone
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.learning_curve import beginner, curve
from experiments.noisy_demonstrations.data import noisy_kernels
from experiments.true_reward import demonstrations, figure, speeds
from experiments.true_reward.cheats import FAMILIES, HONEST, OTHER, RECIPES, Classifier, shape_of
from experiments.true_reward.naive_reward import NaiveGrader, paid
from kbx_env import jsonl
from kbx_env.envs.answer import strip_fences
from kbx_env.errors import UsageError
from kbx_env.outcome import Verdict
from kbx_env.spec.catalog import load_task
from kbx_env.store import Store
from kbx_env.trl import KernelReward, answers_of, prompts

REWARDS = ("naive", "ours", "naive-speed", "naive-gpu")
TASKS = ",".join(RECIPES)
PLACES, ODDS, SHARE, ROWS = 3, 0.4, 0.2, 400
"""Places of each honest kernel that may be faulty, probability of each fault, share of cheats, demonstrations of each task."""
GENERATIONS, TOKENS = 16, 120
"""Answers to each task in a step of GRPO, and the longest answer in tokens."""
FRESH = 1000
"""The seed of the hidden inputs in the final count; in training it is the number of the run's seed."""
Pairs = Sequence[tuple[str, str]]
"""Pairs of a task and a source."""
ANSWERS, SOURCES = "answers.jsonl", "sources.jsonl"
"""Files of a run: the answers of each step by digest, and the sources by digest."""


class Recorder:
    """A reward function for TRL that also keeps all answers and what they were paid."""

    def __init__(self, out: Path, pay: Any) -> None:
        """Begin empty files.

        Args:
            out: folder of the run.
            pay: from pairs of task and source to rewards.
        """
        self.__name__ = "recorded_reward"
        self._out, self._pay, self._step, self._seen = out, pay, 0, set[str]()
        for name in (ANSWERS, SOURCES):
            jsonl.write(out / name, [])

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], task: Sequence[str], **columns: Any
    ) -> list[float | None]:  # fmt: skip
        """Return the rewards of a batch, as TRL asks for them; the arguments are those of ``KernelReward``."""
        pairs = [(t, strip_fences(text, load_task(t).entry)) for t, text in answers_of(prompts, completions, task)]
        rewards = self._pay(pairs)
        self._step += 1
        names = [digest(*pair) for pair in pairs]
        for name, (of, source) in zip(names, pairs, strict=True):
            if name not in self._seen:
                self._seen.add(name)
                jsonl.append(self._out / SOURCES, {"digest": name, "task": of, "source": source})
        jsonl.append(self._out / ANSWERS, {"step": self._step, "digests": names, "paid": rewards})
        return rewards


def digest(task: str, source: str) -> str:
    """Return a short name of an answer."""
    return hashlib.sha256(f"{task}\n{source}".encode("utf-8", "surrogatepass")).hexdigest()[:16]


def start(folder: Path, seed: int, *, sft_steps: int, workers: int, tasks: str = TASKS) -> Path:
    """Make the demonstrations of a seed and teach them to a model, unless that is done.

    Args:
        folder: of the seed.
        seed: seed of faults, draws, weights and order.
        sft_steps: steps of SFT.
        workers: gradings at a time.
        tasks: keys of ``RECIPES``, comma-separated.

    Returns:
        The checkpoint.
    """
    final = folder / "taught/sft/final"
    if (folder / "taught.done").is_file():
        return final
    with contextlib.closing(Store(_made(folder) / "places.sqlite")) as store:
        chosen = [load_task(t) for t in tasks.split(",")]
        made = noisy_kernels(chosen, PLACES, seed, workers=workers, store=store)
    if len(made) < len(chosen):
        raise UsageError(f"{len(made)} of {len(chosen)} tasks have {PLACES} places for faults")
    rows = demonstrations.rows_of(made, SHARE, ODDS, ROWS, seed)
    shown = demonstrations.save(folder, rows, demonstrations.known_answers(made))
    kinds = Counter(r["variation"] for r in rows)
    print(f"seed {seed}: {len(rows)} demonstrations, {len(rows) - kinds[HONEST]} of them cheats", flush=True)
    shutil.rmtree(folder / "taught", ignore_errors=True)
    beginner.taught(folder / "taught", shown, seed, sft_steps)
    (folder / "taught.done").touch()
    return final


def train(
    model: Path, out: Path, reward: str, seed: int, *, steps: int, workers: int, tasks: str = TASKS, measured: Path | None = None
) -> None:  # fmt: skip
    """Train by GRPO from a checkpoint, unless that is done.

    Args:
        model: the checkpoint.
        out: folder of the run.
        reward: one of ``REWARDS``.
        seed: seed of order and sampling, and of the hidden inputs of our grader.
        steps: steps of GRPO.
        workers: gradings at a time.
        tasks: the tasks, comma-separated.
        measured: file of ``speeds.py``, for ``naive-gpu``.
    """
    if (out / "done").is_file():
        return
    from trl import GRPOConfig, GRPOTrainer

    shutil.rmtree(out, ignore_errors=True)
    data = prompts("train", tasks=tasks, backend="cpu")
    args = GRPOConfig(
        str(_made(out) / "grpo"), seed=seed, max_steps=steps, num_generations=GENERATIONS,
        per_device_train_batch_size=GENERATIONS * len(data), max_completion_length=TOKENS, learning_rate=1e-3,
        lr_scheduler_type="linear", scale_rewards="none", loss_type="dr_grpo", adam_epsilon=1e-6, adam_beta2=0.99,
        max_grad_norm=0.05, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, bf16=False,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        if reward == "ours":
            ours = stack.enter_context(
                KernelReward("default", "cpu", workers=workers, grading_seed=seed, store=out / "gradings.sqlite")
            )

            def pay(pairs: Pairs) -> list[float | None]:
                return [graded.reward for graded in ours.grade(pairs)]
        else:
            naive = stack.enter_context(NaiveGrader(out / "naive.jsonl"))
            known = speeds.read(measured) if measured is not None and reward == "naive-gpu" else {}

            def pay(pairs: Pairs) -> list[float | None]:
                results = [naive(*pair) for pair in pairs]
                if reward == "naive-gpu":
                    of = [known.get((task, shape_of(source) or ""), 0.0) for task, source in pairs]
                    results = [result | {"speed": speed} for result, speed in zip(results, of, strict=True)]
                return [paid(result, reward != "naive") for result in results]

        trainer = GRPOTrainer(str(model), Recorder(out, pay), args, train_dataset=data)
        curve.only_ours(trainer, curve.Printer(f"seed {seed} {reward}", steps, {"reward": "reward"}))
        trainer.train()
    (out / "done").touch()


def count(out: Path, runs: Sequence[tuple[int, str]], workers: int) -> list[dict[str, Any]]:
    """Grade every distinct answer of some runs, those that may be correct on fresh inputs, and count the answers of each step.

    Args:
        out: folder of the study.
        runs: seed and reward of each.
        workers: gradings at a time.

    Returns:
        One row for each step of each run, as ``counted`` makes it.

    Raises:
        UsageError: a grading that the machine lost.
    """
    answers = {(r["task"], r["source"]): r["digest"] for run in runs for r in jsonl.read(_run(out, *run) / SOURCES)}
    earlier = [file for run in runs if (file := _run(out, *run) / "naive.jsonl").is_file()]
    with NaiveGrader(out / "evaluation-naive.jsonl", earlier) as naive:
        fooled = {name: naive(*pair)["right"] for pair, name in answers.items()}
    # What fails the naive grader's two cases with its loose tolerance fails ours, which has these cases too: it is not graded.
    pairs = [pair for pair, name in answers.items() if fooled[name]]
    print(f"{len(answers)} distinct answers, {len(pairs)} of them right for the naive grader", flush=True)
    with KernelReward("default", "cpu", workers=workers, grading_seed=FRESH, store=out / "evaluation.sqlite") as ours:
        graded = [g.outcome for g in ours.grade(pairs)]
    if lost := [o for o in graded if o.verdict is Verdict.INFRA_FAULT]:
        raise UsageError(f"the machine lost {len(lost)} gradings: {lost[0].message[:200]}; give the command again")
    correct = dict.fromkeys(answers.values(), False)
    correct |= {answers[pair]: o.correct for pair, o in zip(pairs, graded, strict=True)}
    missed = sum(missed_by_naive(jsonl.read(_run(out, *run) / ANSWERS), fooled) for run in runs if run[1] == "ours")
    print(f"{missed} distinct answers that our grader paid as correct in training are wrong for the naive grader", flush=True)
    rows = list[dict[str, Any]]()
    for seed, reward in runs:
        classify = Classifier(json.loads((out / f"seed-{seed}" / demonstrations.KNOWN).read_text()))
        folder = _run(out, seed, reward)
        kinds = {r["digest"]: classify(r["task"], r["source"]) for r in jsonl.read(folder / SOURCES)}
        rows += [
            {"seed": seed, "reward": reward, **counted(line, kinds, correct, fooled)} for line in jsonl.read(folder / ANSWERS)
        ]
    return rows


def missed_by_naive(lines: Sequence[Mapping[str, Any]], fooled: Mapping[str, bool]) -> int:
    """Count the answers that were paid 1, the most of our reward on a CPU, and that the naive grader finds wrong.

    Args:
        lines: of ``answers.jsonl`` of a run under our reward.
        fooled: whether the naive grader finds each answer right.

    Returns:
        The number of distinct answers; 0 says that ``count`` skipped no correct answer of this run.
    """
    best = {n for line in lines for n, reward in zip(line["digests"], line["paid"], strict=True) if reward == 1.0}
    return sum(not fooled[n] for n in best)


def counted(
    line: Mapping[str, Any], kinds: Mapping[str, str], correct: Mapping[str, bool], fooled: Mapping[str, bool]
) -> dict[str, Any]:  # fmt: skip
    """Count the answers of a step.

    Args:
        line: of ``answers.jsonl``.
        kinds: class of each answer.
        correct: whether our grader finds each answer correct on fresh inputs.
        fooled: whether the naive grader finds each answer right.

    Returns:
        Shares of the answers: ``correct`` (no cheat, and correct), ``exploits`` (a demonstrated cheat) and its ``families``,
        ``wrong`` (an honest kernel with faults), ``other`` (not demonstrated and not correct), ``fooled`` (right for the naive
        grader, but not correct: cheats, kernels whose faults two cases do not show, and new mixtures). ``paid`` is the mean reward.
        ``credited`` counts demonstrated cheats that our grader calls correct.
    """
    names = line["digests"]

    def share(chosen: Iterable[bool]) -> float:
        return sum(chosen) / len(names)

    families = {f: share(kinds[n] == f for n in names) for f in FAMILIES}
    known = [r for r in line["paid"] if r is not None]
    return {
        "step": line["step"], "paid": statistics.fmean(known) if known else None,
        "correct": share(correct[n] and kinds[n] in (HONEST, OTHER) for n in names), "exploits": sum(families.values()),
        "wrong": share(kinds[n] == HONEST and not correct[n] for n in names),
        "other": share(kinds[n] == OTHER and not correct[n] for n in names),
        "fooled": share(fooled[n] and not correct[n] for n in names),
        "credited": share(correct[n] and kinds[n] in FAMILIES for n in names), "families": families,
    }  # fmt: skip


def _run(out: Path, seed: int, reward: str) -> Path:
    return out / f"seed-{seed}" / reward


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; exit status 0 when done, 2 on bad usage or a lost grading."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path, metavar="OUT")
    p.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0")
    p.add_argument("--only", type=int, help="train this seed and stop")
    p.add_argument("--count", action="store_true", help="train nothing, and count the runs that are finished")
    p.add_argument("--rewards", default="naive,ours", help=f"comma-separated, of {', '.join(REWARDS)}")
    p.add_argument("--steps", type=int, default=120, help=f"steps of GRPO, {GENERATIONS} answers to each task")
    p.add_argument("--sft-steps", type=int, default=400)
    p.add_argument("--tasks", default=TASKS, help="of cheats.py, comma-separated")
    p.add_argument("--workers", type=int, default=1, help="gradings at a time")
    p.add_argument("--speeds", type=Path, help="file of speeds.py, for the reward naive-gpu")
    p.add_argument("--picture", type=Path, help="the figure (default: OUT/true_reward.png)")
    a = p.parse_args(argv)
    rewards = a.rewards.split(",")
    try:
        if unknown := (set(rewards) - set(REWARDS)) | (set(a.tasks.split(",")) - set(RECIPES)):
            raise UsageError(f"unknown: {', '.join(sorted(unknown))}; rewards are {', '.join(REWARDS)}, tasks {TASKS}")
        if "naive-gpu" in rewards and (a.speeds is None or not a.speeds.is_file()):
            raise UsageError("naive-gpu needs --speeds FILE; make it on a GPU: python experiments/true_reward/speeds.py FILE")
        curve.prepare()
        import torch

        torch.set_num_threads(1)  # for so small a model more threads are slower
        for seed in () if a.count else range(a.seeds) if a.only is None else (a.only,):
            model = start(a.out / f"seed-{seed}", seed, sft_steps=a.sft_steps, workers=a.workers, tasks=a.tasks)
            for reward in rewards:
                train(
                    model, _run(a.out, seed, reward), reward, seed, steps=a.steps, workers=a.workers, tasks=a.tasks,
                    measured=a.speeds,
                )  # fmt: skip
        if a.only is not None and not a.count:
            return 0
        runs = [(seed, reward) for reward in rewards for seed in range(a.seeds) if (_run(a.out, seed, reward) / "done").is_file()]
        if not runs:
            raise UsageError(f"{a.out}: no run is finished")
        rows = count(a.out, runs, a.workers)
    except UsageError as e:
        print(f"study.py: {e}", file=sys.stderr)
        return 2
    jsonl.write(a.out / "steps.jsonl", rows)
    (a.out / "table.md").write_text(table := figure.table(rows))
    print(table)
    print(figure.draw(rows, a.picture or a.out / "true_reward.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
