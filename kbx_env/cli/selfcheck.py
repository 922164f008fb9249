"""The command ``kbx selfcheck``: grades one expert, one wrong kernel and one attack, to check an installation."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kbx_env.outcome import Outcome, Verdict

TASK = "activation/relu"
"""Task of all three; its cases are small."""
TARGETS = ("sm_90",)
"""Ahead-of-time targets: one build shows that the compiler works."""
_KERNEL = '''
import operator

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(y + at, {value}, mask=at < n)


def relu(input, inplace=False):
    source = {source}
    result = torch.empty_like(source)
    if source.numel():
        kernel[(triton.cdiv(source.numel(), 1024),)](source, result, source.numel(), BLOCK=1024)
    return input.copy_(result) if inplace else result
'''
WRONG = _KERNEL.format(value="tl.where(value <= 0.0, 0.0, value * 1.01)", source="input.contiguous()")
"""A kernel whose results are 1 % too large."""
ATTACK = _KERNEL.format(value="value", source='operator.methodcaller("".join(("cl", "amp")), min=0.0)(input)')
"""A source in which torch computes the result, and the kernel only copies it."""


@dataclass(frozen=True)
class Row:
    """One grading of the check.

    Attributes:
        name: of the source.
        expected: the verdict that it must get.
        found: the verdict that it got.
        seconds: wall time of the grading.
        message: of the grading.
    """

    name: str
    expected: str
    found: str
    seconds: float
    message: str

    @property
    def ok(self) -> bool:
        """Whether the verdict is the expected one."""
        return self.found == self.expected


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``selfcheck`` to a parser."""
    p = sub.add_parser("selfcheck", help="grade an expert, a wrong kernel and an attack; exits with 0 if all get their verdict")
    p.add_argument("--backend", default="auto", help="cpu, cuda, or auto: cuda if there is a GPU (default)")
    p.add_argument("--json", action="store_true", help="print one JSON list")


def examine(grade: Callable[..., Outcome], **options: Any) -> Iterator[Row]:
    """Grade the three sources.

    Args:
        grade: such as ``kbx_env.grade``.
        **options: fields of ``GradeOptions``.

    Yields:
        A row for each, as soon as it is graded.
    """
    from kbx_env.spec.catalog import expert_source

    sources = (
        (f"expert of {TASK}", expert_source(TASK) or "", Verdict.CORRECT),
        ("wrong kernel", WRONG, Verdict.INCORRECT),
        ("attack", ATTACK, Verdict.REJECTED),
    )
    for name, source, expected in sources:
        start = time.perf_counter()
        outcome = grade(TASK, source, **options)
        yield Row(name, str(expected), str(outcome.verdict), round(time.perf_counter() - start, 2), outcome.message)


def command(a: argparse.Namespace) -> int:
    """Run ``selfcheck``.

    Args:
        a: the parsed arguments.

    Returns:
        The exit status: 0 if every source got its verdict, else 1.
    """
    from kbx_env.executor.direct import grade
    from kbx_env.options import resolve_backend

    backend, rows = resolve_backend(a.backend), []
    for row in examine(grade, backend=backend, targets=TARGETS, timing=False):
        rows.append(row)
        if not a.json:
            why = "" if row.ok else f": {row.message}"
            state = "ok " if row.ok else "NO "
            print(f"{state} {row.name:26} expected {row.expected}, found {row.found} ({row.seconds:.1f} s){why}", flush=True)
    if a.json:
        print(json.dumps([{**asdict(r), "ok": r.ok} for r in rows]))
    return 0 if all(r.ok for r in rows) else 1
