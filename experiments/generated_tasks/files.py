"""Files of the study, and how they are read; needs neither a trainer nor the libraries of data sets."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TRAIN, PACK = "train", "pack"
"""The two sources of demonstrations: kernels of the benchmark's train split, and of a generated pack."""
ARMS = ("train", "both")
"""What is compared: the first source alone, and both."""
CHECKPOINT, LOG = "state.pt", "log.jsonl"
"""Files of one run: its weights, and its losses."""
Documents = dict[str, list[list[tuple[np.ndarray, int]]]]
"""By source: for each task its demonstrations. Each is the tokens of prompt and answer, and the number of the prompt's."""


class Prepared(NamedTuple):
    """What ``demonstrations.prepare`` wrote.

    Attributes:
        documents: the demonstrations.
        prompts: evaluated tasks: set (``eval`` or ``held``), id, entry function, tokens of the prompt, beginning of the answer.
        about: counts, for the report.
    """

    documents: Documents
    prompts: list[dict[str, Any]]
    about: dict[str, Any]


def run_folder(out: Path, arm: str, seed: int) -> Path:
    """Return the folder of one run."""
    return out / "runs" / f"{arm}-{seed}"


def read(folder: Path) -> Prepared:
    """Read demonstrations and prompts.

    Args:
        folder: where ``demonstrations.prepare`` wrote them.

    Returns:
        All of it.
    """
    documents: Documents = {}
    for name in (TRAIN, PACK):
        with np.load(folder / f"documents-{name}.npz") as file:
            parts = np.split(file["tokens"], np.cumsum(file["sizes"])[:-1])
            of = defaultdict[int, list[tuple[np.ndarray, int]]](list)
            for tokens, head, owner in zip(parts, file["heads"], file["owners"], strict=True):
                of[int(owner)].append((tokens, int(head)))
        documents[name] = list(of.values())
    return Prepared(documents, json.loads((folder / "prompts.json").read_text()), json.loads((folder / "about.json").read_text()))
