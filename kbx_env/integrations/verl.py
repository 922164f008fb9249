"""verl (0.9): a reward function, an agent loop over several turns, and the export of prompts.

    python -m kbx_env.integrations.verl data/train.parquet --backend cuda
    ... data.train_files=data/train.parquet reward.custom_reward_function.path=pkg://kbx_env.integrations.verl \\
        reward.custom_reward_function.name=compute_score +reward.custom_reward_function.reward_kwargs.url=http://HOST:8300

For episodes of several turns let rows name the agent loop (``--agent``) and give ``agent.yaml`` as
``actor_rollout_ref.rollout.agent.agent_loop_config_path``: ``- {name: kbx_kernel, _target_:
kbx_env.integrations.verl_agent.KernelAgentLoop, max_turns: 3, url: http://HOST:8300}``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kbx_env.errors import UsageError
from kbx_env.integrations import rows
from kbx_env.train.warm_grader import shared

AGENT = "kbx_kernel"
"""Name of the agent loop in rows of data and in verl's configuration."""
TRIES = 3
"""Gradings of an answer before an infrastructure fault is paid 0.0: verl has no unknown reward."""


async def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, preset: str = "default",
    backend: str = "auto", **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the reward of an answer, as verl's ``custom_reward_function``.

    verl has no unknown reward. An answer whose grading the machine lost is graded again; after ``TRIES`` gradings its score is
    0.0, and ``masked`` is 1.0: watch that number in verl's log. The agent loop leaves such an answer out of the loss.

    Args:
        data_source: not used.
        solution_str: the answer.
        ground_truth: the task's id.
        extra_info: not used.
        preset: name of the reward preset, or ``python:module:attribute``.
        backend: ``cpu``, ``cuda`` or ``auto``.
        **options: further options of the grader (``reward_kwargs`` of verl's settings): ``url``, ``token``, ``workers``, ...;
            verl's own ``reward_router_address`` and ``reward_model_tokenizer`` are ignored.

    Returns:
        ``score``, and for the log numbers of the same names for every answer: ``masked``, ``compiled``, ``correct``,
        ``solved``, ``speedup`` and ``term_NAME``, which are NaN where they are not known.
    """
    for name in ("reward_router_address", "reward_model_tokenizer"):
        options.pop(name, None)
    grader = shared(preset, backend, **options)
    for _ in range(TRIES):
        (graded,) = await grader.agrade([(str(ground_truth), solution_str)])
        if graded.reward is not None:
            break
    return {"score": 0.0 if graded.reward is None else graded.reward, **numbers(graded)}


def numbers(graded: Any) -> dict[str, float]:
    """Return numbers for verl's log, with the same names for every answer; NaN where a number is not known.

    Args:
        graded: a ``GradedAnswer``.

    Returns:
        The numbers by name.
    """
    known = {"masked": graded.reward is None, "compiled": graded.compiled, "correct": graded.outcome.correct,
             "solved": graded.solved, "speedup": graded.outcome.speedup}  # fmt: skip
    terms = {f"term_{name}": value for name, value in graded.terms.items()}
    return {name: float("nan") if value is None else float(value) for name, value in (known | terms).items()}


def table(
    split: str = "train", category: str | None = None, backend: str = "auto", agent: bool = False, **more: Any
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield rows of verl: ``data_source``, ``prompt``, ``ability``, ``reward_model``, ``extra_info``.

    Args:
        split: ``train``, or ``eval`` to evaluate.
        category: category of the tasks; ``None`` for all.
        backend: ``cpu``, ``cuda`` or ``auto``: the text says whether kernels are timed.
        agent: rows for the agent loop: they name it in ``agent_name``.
        **more: ``system`` and ``template``, as ``kbx_env.trl.prompts`` takes them.

    Yields:
        One row for each task.
    """
    for index, row in enumerate(rows.plain(split, category, backend, **more)):
        extra = {"split": split, "index": index, "task": row["task"], "difficulty": row["difficulty"]}
        yield {
            "data_source": row["data_source"], "prompt": row["prompt"], "ability": row["category"],
            "reward_model": {"style": "rule", "ground_truth": row["task"]}, "extra_info": extra,
            **({"agent_name": AGENT} if agent else {}),
        }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Write prompts as a file for verl; exit status 2 on bad usage."""
    parser = argparse.ArgumentParser(prog="python -m kbx_env.integrations.verl", description="Write prompts for verl.")
    parser.add_argument("file", help="a .parquet or .jsonl file")
    parser.add_argument("--split", default="train", help="train (default), or eval to evaluate")
    parser.add_argument("--category", help="only tasks of this category")
    parser.add_argument("--backend", default="auto", help="cpu, cuda or auto (default): whether kernels are timed")
    parser.add_argument("--agent", action="store_true", help="rows for the agent loop of several turns")
    a = parser.parse_args(argv)
    try:
        made = list(table(a.split, a.category, a.backend, a.agent))
        file = rows.write(Path(a.file), made)
    except UsageError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(f"{file}: {len(made)} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
