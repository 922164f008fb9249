"""Declares tasks: frozen declarations without torch, without I/O and without seeds.

A task file under ``tasks/<category>/<name>.py`` holds one decorated function. The function is the reference: its signature
is the published signature, its docstring the published contract. The decorator declares its inputs, the criterion of a
correct result, and the compulsory work.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kbx_env.errors import DeclarationError
from kbx_env.spec.criteria import Criterion
from kbx_env.spec.input_distributions import (
    SPD,
    Bernoulli,
    Choice,
    Constant,
    Distinct,
    Distribution,
    Dominant,
    Eye,
    HalfNormal,
    Ints,
    Linspace,
    Literal,
    Normal,
    Orthogonal,
    Outlier,
    Places,
    Scaled,
    Shuffled,
    Signed,
    Spectrum,
    Symmetric,
    Triangular,
    Uniform,
)

__all__ = [
    "CATEGORIES", "Case", "Cost", "DTYPES", "Declaration", "DeviceArg", "DtypeArg", "GeneratorArg", "Paper", "T", "Task",
    "pow2", "shape_in", "shape_of", "task", "SPD", "Bernoulli", "Choice", "Constant", "Distinct", "Dominant", "Eye", "HalfNormal",
    "Ints", "Distribution", "Linspace", "Literal", "Normal", "Orthogonal", "Outlier", "Places", "Scaled", "Shuffled", "Signed",
    "Spectrum", "Symmetric", "Triangular", "Uniform",
]  # fmt: skip

DTYPES = ("f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "bool", "c64", "c128")
CATEGORIES = (
    "activation", "convolution", "fusion", "index", "linearalgebra", "loss", "math", "matrixmultiply",
    "normalization", "optimizer", "pooling", "quantization", "random", "reduce", "spatialops",
)  # fmt: skip


# --- arguments that only exist in the runner ----------------------------------------------------------


@dataclass(frozen=True)
class DtypeArg:
    """Stands for a torch dtype in ``Case.args``."""

    name: str


@dataclass(frozen=True)
class GeneratorArg:
    """Stands for a ``torch.Generator`` on the graded device, seeded secretly by the grader."""


@dataclass(frozen=True)
class DeviceArg:
    """Stands for the graded device."""


# --- shapes, cases, costs -----------------------------------------------------------------------------


@dataclass(frozen=True)
class T:
    """A tensor parameter or result.

    ``axes`` names the axes, separated by blanks; an axis name that starts with ``*`` stands for any
    number of axes and is bound by a case to a tuple.
    """

    axes: str
    dtype: str = "f32"
    draw: Distribution | None = None
    """The tensor's own distribution; ``None`` for that of the case."""
    optional: bool = False
    """Passed only by cases that name it in ``given``."""


def _frozen(mapping: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return MappingProxyType(dict(mapping or {}))


@dataclass(frozen=True, eq=False)
class Case:
    """One call: axis sizes, non-tensor arguments, distributions, dtypes, memory layouts."""

    axes: Mapping[str, Any]
    """Axis name -> int, or -> tuple for an axis that starts with ``*``."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Non-tensor arguments, by parameter name; a tensor parameter named here gets this value (a number) instead."""
    draw: Distribution = Normal()
    """Distribution of every tensor that has none of its own."""
    draws: Mapping[str, Distribution] = field(default_factory=dict)
    """Distribution by tensor; takes precedence over all others."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Dtype by tensor, where it differs from the declaration."""
    layouts: Mapping[str, str] = field(default_factory=dict)
    """Memory layout by tensor: ``transposed`` (last two axes), ``strided`` (every second element of a
    larger buffer), ``offset`` (starts one element into a larger buffer), ``channels_last``, or any order of axes with
    gaps in the notation of ``varied.layout``. ``out`` is the tensor that ``out=True`` passes."""
    given: tuple[str, ...] = ()
    """Optional tensors that this case passes."""
    out: bool = False
    """Pass a poisoned ``out=`` tensor, which must be filled and returned."""
    held: bool = False
    """Used in evaluation only: no training episode has this shape."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape by tensor, instead of that of its axes: the paper's cases, whose ranks the declaration need not have."""
    raises: str = ""
    """Name of the exception that the call must raise, with the reference's text (the paper's cases only)."""
    name: str = ""
    """Name of the published case; empty for cases of the contract."""
    spread: str = ""
    """Parameter whose items are separate positional arguments, ``f(*size)`` (the paper's cases only)."""
    attribute: str = ""
    """Attribute of the result that the published test reads; a result without it is an error."""
    unpassable: str = ""
    """Why no result on the GPU passes the published comparison; empty where one may (the paper's cases only)."""

    def __post_init__(self) -> None:
        for name in ("axes", "args", "draws", "dtypes", "layouts", "shapes"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))

    def elements(self) -> int:
        """Return the product of all axis sizes, a measure of the work of a call; sizes of 0 count as 1."""
        total = 1
        for size in self.axes.values():
            for n in size if isinstance(size, tuple) else (size,):
                total *= max(1, n)
        return total

    def label(self) -> str:
        """Return a short name for feedback: sizes and arguments, never values of tensors."""
        parts = [self.name] if self.name else []
        parts += [f"{k}={v}" for k, v in self.axes.items()]
        parts += [f"{k}{list(v)}" for k, v in self.shapes.items()]
        parts += [f"{k}={v.name if isinstance(v, DtypeArg) else v}" for k, v in self.args.items()
                  if not isinstance(v, GeneratorArg | DeviceArg)]  # fmt: skip
        parts += [f"{k}:{v}" for k, v in self.dtypes.items()]
        parts += [f"{k} {v}" for k, v in self.layouts.items()]
        if self.given:
            parts.append("with " + ",".join(self.given))
        if self.out:
            parts.append("out=")
        return " ".join(parts)


@dataclass(frozen=True)
class Cost:
    """Compulsory work of one call, as expressions over axis names, arguments and functions (``grading/work_counts.py``)."""

    flops: str = "0"
    """Operations of the plain algorithm."""
    bytes: str | None = None
    """Memory traffic in bytes that every correct kernel needs. ``None``: every input is read once, every result is written
    once, and of a tensor written in place the elements that change."""
    reads: Mapping[str, str] | None = None
    """By tensor: elements that every correct kernel reads, where that may be fewer than all."""
    least: str | None = None
    """Operations that every known algorithm needs; ``None``: ``flops``."""


@dataclass(frozen=True)
class Paper:
    """The paper's tolerances: allclose by dtype, or the three quantization thresholds."""

    rtol: float | None = None
    atol: float | None = None
    cosine: float | None = None
    l1: float | None = None
    rmse: float | None = None


@dataclass(frozen=True, eq=False)
class Task:
    """One of the benchmark's tasks, as declared. ``id`` is the file's path, ``entry`` the function to write."""

    id: str
    category: str
    entry: str
    spec: str
    signature: inspect.Signature
    reference: Callable[..., Any]
    takes: Mapping[str, T]
    """Tensors by parameter; the tensors of a list parameter are ``name.0``, ``name.1``, ..."""
    truth: Criterion
    cost: Cost
    cases: tuple[Case, ...]
    timed: tuple[Case, ...]
    difficulty: int
    writes: Mapping[str, str]
    """Parameter that is written in place -> ``always`` or the boolean argument that switches it on."""
    paper: Paper
    differs: str
    """Differences from the published task, with reasons; empty if there are none."""
    moves: bool = False
    """The task only moves values: torch may copy whole tensors in their own order, and nothing else."""
    picks: bool = False
    """The task only selects or replaces slices: torch may move whole tensors in any order, but no part of one."""
    eager: Callable[..., Any] | None = None
    """The call of a torch user, timed as baseline, where the reference is written for exactness instead."""
    held_timed: tuple[Case, ...] = ()
    """Cases that are timed in evaluation only, one for each of ``timed``; empty where ``grading/sizes.py`` derives them."""
    varied: tuple[Callable[..., Case], ...] = ()
    """Families of derived cases (``spec/varied.py``): every grading draws one case of each."""
    fingerprint: str = ""
    """SHA-256 over the task's file, the shared maths and the paper's cases."""

    def written(self, args: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the parameters that a call with these arguments must (and may) change in place."""
        bound = {n: p.default for n, p in self.signature.parameters.items()} | dict(args)
        return tuple(n for n, flag in self.writes.items() if flag == "always" or bound.get(flag) is True)


@dataclass(frozen=True, eq=False)
class Declaration:
    """The result of ``@task``; the catalog adds id and category from the path."""

    reference: Callable[..., Any]
    fields: Mapping[str, Any]


def task(
    *,
    difficulty: int,
    takes: Mapping[str, T],
    truth: Criterion,
    cost: Cost,
    cases: tuple[Case, ...],
    timed: tuple[Case, ...],
    held_timed: tuple[Case, ...] = (),
    writes: Mapping[str, str] | None = None,
    paper: Paper | None = None,
    differs: str = "",
    moves: bool = False,
    picks: bool = False,
    eager: Callable[..., Any] | None = None,
    varied: tuple[Callable[..., Case] | tuple[Callable[..., Case], ...], ...] = (),
) -> Callable[[Callable[..., Any]], Declaration]:
    """Declare the decorated reference as a task.

    Args:
        difficulty: 1 (easy) to 5; a curriculum sorts by it.
        takes: tensors by parameter.
        truth: the criterion of a correct result.
        cost: compulsory work of one call.
        cases: calls for correctness; some ``held`` for evaluation, some not.
        timed: calls for timing.
        held_timed: calls for timing in evaluation.
        writes: parameters written in place.
        paper: the paper's tolerances.
        differs: differences from the published task.
        moves: the task only moves values.
        picks: the task only selects or replaces slices.
        eager: the baseline, if it is not the reference.
        varied: families of derived cases; a tuple among them stands for its members.

    Returns:
        A decorator, which checks the declaration.

    Raises:
        DeclarationError: a case names a tensor, axis, argument or dtype that the task does not have.
    """

    def declare(reference: Callable[..., Any]) -> Declaration:
        params = inspect.signature(reference).parameters
        name = reference.__name__
        if not (reference.__doc__ or "").strip():
            raise DeclarationError(f"{name}: the reference has no docstring; it is the task's published contract")
        if not any(not c.held for c in cases) or not any(c.held for c in cases):
            raise DeclarationError(f"{name}: needs cases for training and at least one held=True for evaluation")
        for tensor in set(cost.reads or ()) - set(takes):
            raise DeclarationError(f"{name}: cost reads {tensor!r}; tensors: {', '.join(takes)}")
        for tensor, t in takes.items():
            if tensor.partition(".")[0] not in params:
                raise DeclarationError(f"{name}: takes {tensor!r}, which is not a parameter of the reference")
            if t.dtype not in DTYPES:
                raise DeclarationError(f"{name}: {tensor} has dtype {t.dtype!r}; accepted: {', '.join(DTYPES)}")
        for case in (*cases, *timed, *held_timed):
            made = {"out"} if case.out else set()
            for key in {*case.draws, *case.dtypes, *case.layouts, *case.given} - set(takes) - made:
                raise DeclarationError(f"{name}: case {case.label()!r} names {key!r}; tensors: {', '.join(takes)}")
            for key in set(case.args) - set(params) - {"out"}:
                raise DeclarationError(f"{name}: case {case.label()!r} passes {key!r}; parameters: {', '.join(params)}")
            if case.out and "out" not in params:
                raise DeclarationError(f"{name}: case {case.label()!r} passes out=, which the signature lacks")
        return Declaration(reference, _frozen({
            "difficulty": difficulty, "takes": _frozen(takes), "truth": truth, "cost": cost, "cases": cases,
            "timed": timed, "writes": _frozen(writes), "paper": paper or Paper(), "differs": differs, "moves": moves,
            "picks": picks,
            "eager": eager, "held_timed": held_timed, 
            "varied": tuple(f for each in varied for f in (each if isinstance(each, tuple) else (each,))),
        }))  # fmt: skip

    return declare


def shape_in(t: T, name: str, case: Case) -> tuple[int, ...]:
    """Return the shape of the tensor ``name`` in a case: that of ``Case.shapes`` where it is there, else by its axes."""
    return case.shapes[name] if name in case.shapes else shape_of(t, case.axes)


def shape_of(t: T, axes: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a tensor in a case.

    Args:
        t: the declaration of the tensor.
        axes: axis name to size, or to a tuple for an axis that starts with ``*``.

    Returns:
        The sizes.

    Raises:
        DeclarationError: the case gives no size for an axis.
    """
    shape: list[int] = []
    for axis in t.axes.split():
        if axis.isdigit():
            shape.append(int(axis))
            continue
        if axis not in axes:
            raise DeclarationError(f"no size for axis {axis!r} of {t.axes!r}; the case gives {dict(axes)}")
        size = axes[axis]
        shape.extend(size if isinstance(size, tuple) else (size,))
    return tuple(shape)


def pow2(axis: str, low: int, high: int, step: int = 1, **case: Any) -> tuple[Case, ...]:
    """Return cases in which one axis has the sizes 2**low ... 2**high.

    Args:
        axis: its name; an axis that starts with ``*`` gets a 1-tuple.
        low: the first exponent.
        high: the last exponent.
        step: between two exponents.
        **case: further fields of every case.

    Returns:
        One case for each exponent.
    """
    fixed = case.pop("axes", {})
    return tuple(
        Case({**fixed, axis: (2**k,) if axis.startswith("*") else 2**k}, **case) for k in range(low, high + 1, step)
    )
