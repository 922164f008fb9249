"""The options of a grading, declared and checked in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from kbx_env.deadlines import WALL, deadline_of
from kbx_env.errors import UnknownName, UsageError

BACKENDS = ("auto", "cpu", "cuda")
GRADINGS = ("contract", "paper")
PRECISIONS = ("report", "training")
SPLITS = ("train", "eval")
TORCH_OPS = ("strict", "allow")
SIZES = ("published", "held-out")
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
"""Targets of ahead-of-time compilation."""
NEEDS_TIMES = "{} compares times with torch.compile's: it needs a GPU that times kernels (backend 'cuda', with timing)"


def resolve_backend(name: str) -> str:
    """Replace ``auto`` by the backend of this machine.

    Args:
        name: ``auto``, ``cpu`` or ``cuda``.

    Returns:
        ``cuda`` or ``cpu``.

    Raises:
        UnknownName: not a backend.
        UsageError: ``cuda`` without a GPU.
    """
    if name not in BACKENDS:
        raise UnknownName("backend", name, BACKENDS)
    if name == "cpu":
        return name
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise UsageError("backend 'cuda': torch finds no CUDA device on this machine; use --backend cpu (no timing)")
    return "cpu"


@dataclass(frozen=True)
class GradeOptions:
    """How a source is graded.

    Raises:
        UsageError: an unknown name, a number out of range, or ``compiled`` where nothing is timed.
    """

    backend: str = "auto"
    """``auto`` (``cuda`` if there is a GPU), ``cpu`` or ``cuda``."""
    targets: tuple[str, ...] | None = None
    """Targets of ahead-of-time compilation, from ``TARGETS``; ``None`` for all, empty for none."""
    grading: str = "contract"
    """``contract`` (ours) or ``paper`` (the paper's own cases, references and comparison; torch may compute; nothing is timed)."""
    seed: int | None = None
    """Fixes the inputs; ``None``: they are secret and fresh for every grading."""
    timing: bool = True
    """Time correct kernels (CUDA only)."""
    split: str = "eval"
    """``eval`` adds the held-out shapes, ``train`` leaves them out."""
    wall: float = WALL
    """Seconds of wall time for the submission, over all stages but timing. On CUDA it has 60 more for compiling what its calls
    launch, and 20 for the first use of the GPU."""
    estimate: str | None = None
    """Name of a GPU (``h200``, ...) whose device time a cost model estimates for correct kernels, on the CPU backend only;
    never mixed with measured time."""
    torch_ops: str = "strict"
    """``strict`` lets torch allocate, view, copy, fill and convert floats, nothing else. ``allow`` lets the wrapper compute in
    torch, but some launch must matter. Never compare or mix the two."""
    compiled: bool = False
    """Also measure the speedup over torch.compile of the baseline (``timing.compiled_speedup``); it changes neither ``speedup``
    nor a reward but that of the preset ``milestone``. The first grading of a task compiles for seconds to minutes."""
    sizes: str = "published"
    """The sizes that are timed or estimated: ``published``, or ``held-out`` for evaluation (``grading.sizes``). Verdicts are
    the same, times never compare."""
    precision: str = "report"
    """How precisely kernels are timed (CUDA only): ``report`` within 1 %, or ``training`` within 3 %, which takes about half the
    time (``grading.timing.precision``). Never mix the two in one batch of rewards."""

    def __post_init__(self) -> None:
        for kind, name, accepted in (
            ("backend", self.backend, BACKENDS),
            ("grading", self.grading, GRADINGS),
            ("torch policy", self.torch_ops, TORCH_OPS),
            ("sizes", self.sizes, SIZES),
            ("precision", self.precision, PRECISIONS),
            ("split", self.split, SPLITS),
        ):
            if name not in accepted:
                raise UnknownName(kind, name, accepted)
        object.__setattr__(self, "targets", tuple(TARGETS if self.targets is None else self.targets))
        for target in self.ahead_of_time:
            if target not in TARGETS:
                raise UnknownName("target", target, TARGETS)
        if not isinstance(self.wall, int | float) or not self.wall > 0:
            raise UsageError(f"wall is {self.wall!r}; seconds, more than 0")
        if self.seed is not None and type(self.seed) is not int:
            raise UsageError(f"seed is {self.seed!r}; a whole number, or None for secret inputs")
        if self.estimate is not None:
            from kbx_env.backends import cost

            cost.load(self.estimate)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> GradeOptions:
        """Make options from keyword arguments.

        Args:
            options: values by name; the others are the defaults.

        Returns:
            The options.

        Raises:
            UsageError: an option that does not exist, or a value that is refused.
        """
        accepted = [f.name for f in fields(cls)]
        for name in options:
            if name not in accepted:
                raise UnknownName("option", name, accepted)
        return cls(**options)

    def resolved(self) -> GradeOptions:
        """Choose the backend of this machine instead of ``auto``, and check what depends on it.

        Returns:
            The options that a grader uses.

        Raises:
            UsageError: ``cuda`` without a GPU, or ``compiled`` where nothing is timed.
        """
        options = replace(self, backend=resolve_backend(self.backend))
        if options.compiled and not options.timed:
            raise UsageError(NEEDS_TIMES.format("compiled=True"))
        return options

    @property
    def ahead_of_time(self) -> tuple[str, ...]:
        """The targets of ahead-of-time compilation."""
        return self.targets or ()

    @property
    def timed(self) -> bool:
        """Whether correct kernels are timed. Under ``paper`` they are not: nothing shows that Triton did the work."""
        return self.backend == "cuda" and self.timing and self.grading == "contract"

    @property
    def deadline(self) -> float:
        """Seconds after which an attempt counts as lost by the machine (``kbx_env.deadlines``)."""
        return deadline_of(self.timed, float(self.wall), self.compiled)
