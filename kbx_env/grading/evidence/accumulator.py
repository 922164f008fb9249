"""Accumulates evidence over the executed calls of one grading: traffic, operations, and provenance of the results."""

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
"""The work of passing cases before the first one."""


def _constant(calls: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Return whether every element of every output of every call is the same number."""
    parts = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for call in calls for t in call if t.numel())
    values = [t.reshape(-1).to(torch.float64) for t in parts]
    return all(bool((v == values[0][0]).all()) for v in values)


def _added(sums: KernelTraffic | None, row: Mapping[str, Any]) -> KernelTraffic:
    """Return one kernel's traffic with one more call.

    Args:
        sums: of the calls before; ``None`` for the first.
        row: the kernel's counters in one call, from the engine.

    Returns:
        The sums.
    """
    tensors = dict(sums.tensors) if sums else {}
    for name, bytes_ in row["tensors"].items():
        tensors[name] = tuple(a + b for a, b in zip(tensors.get(name, (0, 0, 0)), bytes_, strict=True))
    flops = Counter(sums.flops if sums else {})
    flops.update(row["flops"])
    return KernelTraffic(
        kernel=row["kernel"], launches=(sums.launches if sums else 0) + row["launches"],
        programs=(sums.programs if sums else 0) + row["programs"], moved_bytes=sum(map(sum, tensors.values())),
        sector_bytes=(sums.sector_bytes if sums else 0) + row["sectors"],
        reread_bytes=(sums.reread_bytes if sums else 0) + row["reread"], tensors=tensors, flops=dict(flops),
    )  # fmt: skip


@dataclass
class EvidenceAccumulator:
    """Sums over the cases of one grading; bytes and operations count one call of each case.

    A telling case is one in which no constant and no copy of an input would be right.
    """

    ideal: int = 0
    """Bytes of compulsory traffic."""
    moved: int = 0
    """Bytes that loads and stores request."""
    sectors: int = 0
    """The same in 32-byte sectors."""
    reread: int = 0
    """Bytes loaded again by the same launch."""
    flops: Counter[str] = field(default_factory=Counter)
    """Operations by unit."""
    kernels: dict[str, KernelTraffic] = field(default_factory=dict)
    """Traffic by name of the kernel."""
    elements: int = 0
    """Elements of the results."""
    stored: int = 0
    """Elements of the results that a Triton kernel stored."""
    launches: int = 0
    """Kernel launches."""
    telling: int = 0
    """Telling cases."""
    inputs: set[str] = field(default_factory=set)
    """Inputs on which some result may depend."""
    dots: set[str] = field(default_factory=set)
    """Kinds of matrix products on the way to some result."""
    unstored: list[str] = field(default_factory=list)
    """Telling cases in which no element of some result was stored by a Triton kernel."""
    by_host: list[str] = field(default_factory=list)
    """Telling cases in which torch or the host wrote elements of a result, with their number."""
    assembled: list[str] = field(default_factory=list)
    """Telling cases in which torch's copies had made a whole result before a kernel copied it."""
    detached: list[str] = field(default_factory=list)
    """Telling cases with a call whose results depend on no input of that call."""
    launchless: list[str] = field(default_factory=list)
    """Telling cases with a call that launched nothing."""
    takes_inputs: bool = True
    """Whether the task has inputs on which results must depend."""
    schemeless: str = ""
    """Why the first such result was not computed by the quantization scheme."""
    passing: Passing = NO_WORK
    """Work of telling cases that passed."""
    shortcut: bool = False
    """Whether a case failed by something else than values: a mask that is not random, results that share memory,
    changed inputs. The kernel may then have saved work by this fault."""
    stages: list[Mapping[str, float]] = field(default_factory=list)
    """Stages of the quantization scheme that wrong telling cases hold; only cases in which they can be determined."""
    frozen: bool = True
    """Whether all elements of all calls with different seeds were one and the same number."""
    flat: bool = True
    """Whether in every telling case all elements of all results were one and the same number."""

    def add(self, case: Case, answers: Sequence[CallResult], ideal: int, telling: bool, ruling: Ruling) -> bool:
        """Add the calls of one case.

        Args:
            case: the case.
            answers: its calls.
            ideal: bytes of compulsory traffic of one call.
            telling: whether the case is telling.
            ruling: of the judge.

        Returns:
            As ``prove``.
        """
        self.ideal += ideal
        self.telling += telling
        facts = answers[0].facts
        if facts is None:
            return True
        self.moved, self.sectors, self.reread = (
            self.moved + facts.moved,
            self.sectors + facts.sectors,
            self.reread + facts.reread,
        )
        self.flops.update(facts.flops)
        self.shortcut = self.shortcut or not (ruling.passed or ruling.missed)
        if telling and ruling.passed:
            p = self.passing
            self.passing = Passing(
                p.cases + 1, p.launches + facts.launches, p.moved_bytes + facts.moved, p.ideal_bytes + ideal,
                p.between_bytes + facts.between, p.buffers + facts.buffers,
            )  # fmt: skip
        for row in facts.kernels:
            self.kernels[row["kernel"]] = _added(self.kernels.get(row["kernel"]), row)
        for o in answers[0].origins:
            self.elements, self.stored = self.elements + o.elements, self.stored + o.stored
            self.dots |= o.dots
        if telling:
            self.flat = self.flat and _constant([answers[0].answer.outputs])
        if len({a.generator_seed for a in answers}) > 1:
            self.frozen = self.frozen and _constant([a.answer.outputs for a in answers])
        self.launches += facts.launches
        return self.prove(case, answers, telling)

    def prove(self, case: Case, answers: Sequence[CallResult], telling: bool) -> bool:
        """Look at every call of a case for work that no kernel did in that call.

        Args:
            case: the case.
            answers: its calls.
            telling: whether the case is telling.

        Returns:
            Whether kernels did the work of each call, or nothing is known.
        """
        before = self._idle
        for a in answers:
            inputs = frozenset[str]().union(*(o.inputs for o in a.origins))
            self.inputs |= inputs
            if not telling or a.facts is None:
                continue
            total, moved = sum(o.elements for o in a.origins), sum(o.moved for o in a.origins)
            if moved:
                self.by_host.append(f"{case.label()}: {moved} of {total} elements")
            if any(o.assembled for o in a.origins):
                self.assembled.append(case.label())
            if total and not inputs:
                self.detached.append(case.label())
            if total and not a.facts.launches:
                self.launchless.append(case.label())
            # Each result counts by itself: a copied argument beside a computed result is no work. A result without
            # elements (of a mask without a true element) has nothing to store.
            if any(o.elements and not o.stored for o in a.origins):
                self.unstored.append(case.label())
        return self._idle == before

    @property
    def _idle(self) -> int:
        """Number of faults found where no kernel did the work."""
        return sum(map(len, (self.by_host, self.assembled, self.launchless, self.unstored))) + (
            len(self.detached) if self.takes_inputs else 0
        )

    def facts(self) -> dict[str, Any]:
        """Return the fields of ``Evidence`` that this class counts."""
        return {
            "moved_bytes": self.moved, "sector_bytes": self.sectors, "reread_bytes": self.reread,
            "flops": dict(sorted(self.flops.items())), "depends_on": tuple(sorted(self.inputs)),
            "kernels": tuple(self.kernels.values()), "stages": stage_credit.mean(self.stages),
            "passing": NO_WORK if self.shortcut else self.passing,
            "stored_share": self.stored / self.elements if self.elements else None,
        }  # fmt: skip
