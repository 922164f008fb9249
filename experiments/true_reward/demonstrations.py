"""Demonstrations that mix honest kernels, each place of which is faulty by chance, with known cheats."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kbx_env.train import data
from kbx_env.train.mutation import with_faults
from kbx_env.train.rows import about, message, write

from experiments.noisy_demonstrations.data import NoisyKernel
from experiments.true_reward.cheats import HONEST, cheats

KNOWN = "known.json"
"""File with the class of each demonstrated source, beside the demonstrations."""


def known_answers(made: Sequence[NoisyKernel]) -> dict[str, dict[str, str]]:
    """Return all answers that demonstrations are drawn from.

    Args:
        made: honest kernels with their faults.

    Returns:
        For each task the class of each source: ``honest`` with any faults, or a family of cheats.
    """
    found = dict[str, dict[str, str]]()
    for one in made:
        sources = {variant(one, bits): HONEST for bits in range(1 << len(one.faults))}
        found[one.task.id] = sources | {source: family for family, source in cheats(one.task.id).items()}
    return found


def variant(one: NoisyKernel, bits: int) -> str:
    """Return a kernel with some of its faults.

    Args:
        one: the kernel.
        bits: bit k says whether fault k is there.

    Returns:
        The source.
    """
    return with_faults(one.source, [fault for k, fault in enumerate(one.faults) if bits >> k & 1])


def rows_of(made: Sequence[NoisyKernel], share: float, odds: float, count: int, seed: int) -> list[dict[str, Any]]:
    """Draw demonstrations.

    Args:
        made: honest kernels with their faults.
        share: share of cheats among the demonstrations; all families of a task are equally frequent.
        odds: probability of each fault of an honest kernel.
        count: demonstrations of each task.
        seed: seed of the draws.

    Returns:
        Rows with the columns of ``train/data.py``; ``variation`` is the class of the answer.
    """
    rows = list[dict[str, Any]]()
    for one in made:
        draw, tricks = random.Random(f"{seed} {one.task.id} mixed"), cheats(one.task.id)
        for _ in range(count):
            if draw.random() < share:
                kind, source = draw.choice(sorted(tricks.items()))
            else:
                bits = sum((draw.random() < odds) << k for k in range(len(one.faults)))
                kind, source = HONEST, variant(one, bits)
            shown = {"prompt": [message(one.task, "cpu")], "completion": [data.answer(source)]}
            rows.append({**shown, "variation": kind, **about(one.task)})
    return rows


def save(out: Path, rows: Sequence[Mapping[str, Any]], known: Mapping[str, Mapping[str, str]]) -> Path:
    """Write demonstrations and the classes of their answers.

    Args:
        out: the folder.
        rows: the demonstrations.
        known: of ``known_answers``.

    Returns:
        The file of the demonstrations.
    """
    from datasets import Dataset

    out.mkdir(parents=True, exist_ok=True)
    (out / KNOWN).write_text(json.dumps(known, indent=1))
    return write(Dataset.from_list(list(rows)), out / "demonstrations", "parquet")
