"""A mixed workload of kernels to grade: recorded answers, our experts, honest kernels of the zoo."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kbx_env.baselines import replay
from kbx_env.eval.zoo import specimens

from kbx_env import jsonl
from kbx_env.errors import UsageError
from kbx_env.spec.catalog import expert_source, task_ids

SAMPLES = Path(replay.__file__).resolve().parent / "samples" / "replay.jsonl"


@dataclass(frozen=True)
class Piece:
    """One kernel of a workload.

    Attributes:
        task: the task.
        source: its bytes.
        kind: where it comes from.
    """

    task: str
    source: bytes
    kind: str


def rows_of(file: Path) -> tuple[list[Piece], int]:
    """Read the kernels of a file of JSON lines.

    Args:
        file: the file.

    Returns:
        The kernels, and the number of rows that were left out: no JSON, no text, or an unknown task.

    Raises:
        UsageError: no such file.
    """
    if not file.is_file():
        raise UsageError(
            f"no workload file {str(file)!r}; expected JSON lines with task and predict, or task and source"
        )
    found, left_out = [], 0
    for number, line in jsonl.numbered(file):
        try:
            row = jsonl.parse(file, number, line)
        except jsonl.NotJson:
            row = None
        text = row.get("source", row.get("predict")) if isinstance(row, dict) else None
        task = replay.task_of(row) if isinstance(text, str) else None
        if task is None:
            left_out += 1
            continue
        source = row["source"] if "source" in row else replay.source_of(row)
        found.append(Piece(task, source.encode("utf-8", "surrogatepass"), "replay"))
    return found, left_out


def workload(
    files: Sequence[Path], experts: float | None, count: int | None, seed: int, backend: str
) -> tuple[list[Piece], int]:
    """Return the kernels to grade.

    Args:
        files: recorded kernels; without any: experts, honest kernels of the zoo and the recorded samples.
        experts: share of experts; ``None``: none if there are files, otherwise all of them.
        count: number of kernels; they are repeated as often as needed. Default: each once.
        seed: of the choice and the order.
        backend: kernels of the zoo that need a GPU are left out on ``cpu``.

    Returns:
        The kernels in a random order, and the number of rows that were left out.

    Raises:
        UsageError: a share outside 0 to 1, a count below 1, or nothing to grade.
    """
    if experts is not None and not 0 <= experts <= 1:
        raise UsageError(f"--experts is {experts:g}; a share from 0 to 1")
    if count is not None and count < 1:
        raise UsageError(f"--count is {count}; at least 1")
    own = [Piece(t, text.encode(), "expert") for t in task_ids() if (text := expert_source(t))]
    others: list[Piece] = []
    left_out = 0
    for file in files or [SAMPLES]:
        more, missed = rows_of(file)
        others, left_out = others + more, left_out + missed
    if not files:
        honest = [s for s in specimens(honest=True) if backend == "cuda" or s.backend != "cuda"]
        others += [Piece(s.task, s.path.read_bytes(), "zoo") for s in honest]
    if not others and (experts is None or experts < 1):
        raise UsageError(f"no usable row in {', '.join(str(f) for f in files)}: none names a task of the catalogue")
    rng = random.Random(seed)

    def draw(pool: Sequence[Piece], n: int) -> list[Piece]:
        got: list[Piece] = []
        while len(got) < n:
            got += rng.sample(pool, len(pool))
        return got[:n]

    if experts is None:
        pool = others if files else others + own
        return draw(pool, count or len(pool)), left_out
    total = count or (len(own) if experts == 1 else max(1, round(len(others) / (1 - experts))))
    from_experts = round(total * experts)
    mixed = draw(own, from_experts) + draw(others, total - from_experts)
    rng.shuffle(mixed)
    return mixed, left_out
