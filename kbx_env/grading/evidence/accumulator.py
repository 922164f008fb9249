"""What the executed calls of one grading add up to: traffic, operations, and where the results came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kbx_env.grading.evidence import stage_credit
from kbx_env.grading.judge import Ruling
from kbx_env.grading.runtime.session import CallResult
from kbx_env.outcome import KernelTraffic, Passing
from kbx_env.spec.task import Case

NO_WORK = Passing(0, 0, 0, 0, 0, 0)


def _constant(calls: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether every element of every output of every call is the same number."""
    parts = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for call in calls for t in call if t.numel())
    values = [t.reshape(-1).to(torch.float64) for t in parts]
    return all(bool((v == values[0][0]).all()) for v in values)


def _joined(held: KernelTraffic | None, row: Mapping[str, Any]) -> KernelTraffic:
    """One kernel's sums with one more call."""
    tensors = dict(held.tensors) if held else {}
    for name, bytes_ in row["tensors"].items():
        tensors[name] = tuple(a + b for a, b in zip(tensors.get(name, (0, 0, 0)), bytes_, strict=True))
    flops = Counter(held.flops if held else {})
    flops.update(row["flops"])
    return KernelTraffic(
        kernel=row["kernel"], launches=(held.launches if held else 0) + row["launches"],
        programs=(held.programs if held else 0) + row["programs"], moved_bytes=sum(map(sum, tensors.values())),
        sector_bytes=(held.sector_bytes if held else 0) + row["sectors"],
        reread_bytes=(held.reread_bytes if held else 0) + row["reread"], tensors=tensors, flops=dict(flops),
    )  # fmt: skip


@dataclass
class EvidenceAccumulator:
    """What the executed calls add up to; bytes and operations of one call per case."""

    ideal: int = 0
    moved: int = 0
    sectors: int = 0
    reread: int = 0
    flops: Counter[str] = field(default_factory=Counter)
    kernels: dict[str, KernelTraffic] = field(default_factory=dict)
    elements: int = 0
    stored: int = 0
    launches: int = 0
    telling: int = 0
    inputs: set[str] = field(default_factory=set)
    dots: set[str] = field(default_factory=set)
    unstored: list[str] = field(default_factory=list)
    """Telling cases in which no element of some result came out of a Triton store."""
    by_host: list[str] = field(default_factory=list)
    """Telling cases in which torch put values into a result, and how many."""
    schemeless: str = ""
    """How the first result showed that it was not made as the quantization scheme demands."""
    passing: Passing = NO_WORK
    shortcut: bool = False
    """Whether a case failed by something else than values: a mask that is not drawn, results that share memory, inputs changed. The
    work that a kernel saves may then be its very fault."""
    stages: list[Mapping[str, float]] = field(default_factory=list)
    """What wrong telling cases show of the quantization scheme; only cases in which it can be seen."""
    frozen: bool = True
    """Whether calls with different seeds always gave one and the same number everywhere."""
    flat: bool = True
    """Whether every result of every telling case was one number everywhere."""

    def add(self, case: Case, answers: Sequence[CallResult], ideal: int, telling: bool, ruling: Ruling) -> None:
        """Count the calls of one case."""
        self.ideal += ideal
        self.telling += telling
        told = answers[0].facts
        if told is None:
            return
        self.moved, self.sectors, self.reread = (
            self.moved + told.moved,
            self.sectors + told.sectors,
            self.reread + told.reread,
        )
        self.flops.update(told.flops)
        self.shortcut = self.shortcut or not (ruling.passed or ruling.missed)
        if telling and ruling.passed:
            p = self.passing
            self.passing = Passing(
                p.cases + 1, p.launches + told.launches, p.moved_bytes + told.moved, p.ideal_bytes + ideal,
                p.between_bytes + told.between, p.buffers + told.buffers,
            )  # fmt: skip
        self.launches += told.launches
        for row in told.kernels:
            self.kernels[row["kernel"]] = _joined(self.kernels.get(row["kernel"]), row)
        for a in answers:
            for o in a.origins:
                self.inputs |= o.inputs
        for o in answers[0].origins:
            self.elements, self.stored = self.elements + o.elements, self.stored + o.stored
            self.dots |= o.dots
        if telling:
            self.flat = self.flat and _constant([answers[0].answer.outputs])
        if len({a.generator_seed for a in answers}) > 1:
            self.frozen = self.frozen and _constant([a.answer.outputs for a in answers])
        moved = sum(o.moved for o in answers[0].origins)
        if telling and moved:
            total = sum(o.elements for o in answers[0].origins)
            self.by_host.append(f"{case.label()}: {moved} of {total} elements")
        # Every result by itself: a copy of an argument beside a result that a kernel made is nobody's work. A draw may leave
        # nothing to store: a mask without a true element.
        if telling and any(o.elements and not o.stored for o in answers[0].origins):
            self.unstored.append(case.label())

    def facts(self) -> dict[str, Any]:
        """Fields of the evidence."""
        return {
            "moved_bytes": self.moved, "sector_bytes": self.sectors, "reread_bytes": self.reread,
            "flops": dict(sorted(self.flops.items())), "depends_on": tuple(sorted(self.inputs)),
            "kernels": tuple(self.kernels.values()), "stages": stage_credit.mean(self.stages),
            "passing": NO_WORK if self.shortcut else self.passing,
            "stored_share": self.stored / self.elements if self.elements else None,
        }  # fmt: skip
