"""The programs of one launch: how they are numbered, and the machines that run them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kbx_env.backends.ttir.frontend.graph import Module, Op
from kbx_env.backends.ttir.interp.control import MeteredMachine
from kbx_env.backends.ttir.interp.memory import Array, Memory, Meter
from kbx_env.backends.ttir.interp.perturb import Perturbation
from kbx_env.backends.ttir.interp.serial import ResumableProgram
from kbx_env.backends.ttir.sanitizer.unwritten import TaintMachine, TaintProgram

_CACHE_BYTES = 4 << 20
"""Largest size of one intermediate array of a chunk: larger ones leave the processor's caches and run slower."""
ELEMENT_BYTES = 8
"""Largest size of one element of an intermediate array."""


class PerturbedMachine(MeteredMachine):
    """A machine that replaces integers as a ``Perturbation`` says."""

    perturbation: Perturbation
    sees_all = True

    def step(self, op: Op, env: list[Any]) -> None:
        """Run one operation with its operands or results replaced."""
        operands = self.perturbation.before(self, op, env)
        super().step(op, env)
        self.perturbation.after(self, op, env, operands)


class PerturbedProgram(PerturbedMachine, ResumableProgram):
    """The same for a program that may wait for others."""


def coordinates(grid: tuple[int, int, int], ids: Array) -> tuple[Array, Array, Array]:
    """Return the coordinates of programs.

    Args:
        grid: Number of programs along x, y and z.
        ids: Numbers of the programs, x fastest: int64, (n,).

    Returns:
        The coordinates along x, y and z: int32, (n,) each.
    """
    return (
        (ids % grid[0]).astype(np.int32),
        (ids // grid[0] % grid[1]).astype(np.int32),
        (ids // (grid[0] * grid[1])).astype(np.int32),
    )


@dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
        module: The module of the kernel.
        grid: Number of programs along x, y and z.
        values: Values of the kernel's arguments.
        memory: The memory.
        meter: Counters, which the programs increase.
        deadline: Value of ``time.process_time`` at which to stop; ``None`` for no limit.
        perturbation: Integers to replace on the way.
        max_bytes: Bound on the size of one intermediate array (one program may exceed it).
        taint: Whether to track values that nothing has written.
    """

    module: Module
    grid: tuple[int, int, int]
    values: list[Any]
    memory: Memory
    meter: Meter
    deadline: float | None
    perturbation: Perturbation | None
    max_bytes: int
    taint: bool

    @property
    def total(self) -> int:
        """Number of programs."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    def chunks(self) -> Iterator[Array]:
        """Yield the numbers of the programs of each chunk."""
        chunk = max(1, min(self.max_bytes, _CACHE_BYTES) // (ELEMENT_BYTES * self.module.max_elements))
        for start in range(0, self.total, chunk):
            yield np.arange(start, min(start + chunk, self.total), dtype=np.int64)

    def machine(self, ids: Array) -> MeteredMachine:
        """Return the machine that runs the programs of some numbers together."""
        return self._make(TaintMachine if self.taint else MeteredMachine, PerturbedMachine, ids)

    def program(self, k: int) -> ResumableProgram:
        """Return one program, which can yield to others."""
        ids = np.arange(k, k + 1, dtype=np.int64)
        program = self._make(TaintProgram if self.taint else ResumableProgram, PerturbedProgram, ids)
        assert isinstance(program, ResumableProgram)
        return program

    def _make(self, plain: type[MeteredMachine], perturbed: type[PerturbedMachine], ids: Array) -> MeteredMachine:
        machine_class = plain if self.perturbation is None else perturbed
        pids = coordinates(self.grid, ids)
        machine = machine_class(
            self.module, self.module.entry.name, self.grid, pids, self.memory, self.meter, self.deadline
        )
        if isinstance(machine, PerturbedMachine) and self.perturbation is not None:
            machine.perturbation = self.perturbation
        return machine
