"""Declares when a result of a task is correct. The judges that apply these declarations are in ``grading/judge``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Criterion:
    """Base class of the criteria; ``grading/judge`` selects a judge by the type."""

    judge: ClassVar[str]
    """Name of the judge, as lists of tasks show it."""


@dataclass(frozen=True)
class Close(Criterion):
    """Floating point: |y - y64| <= max(floor, k * error of torch's own result in this dtype).

    ``floor`` is in units of the result dtype's epsilon times the local scale (max of |y64| and the
    root-mean-square of the result, unless ``scale`` says ``element``).
    """

    judge = "close"

    k: float = 4.0
    ulps: float = 4.0
    """Floor in units of eps(dtype) * scale, per output dtype; for 16-bit results 2 at most (``judge/close.py``)."""
    of: tuple[float, ...] = ()
    """``ulps`` of each result, where they differ; tensors written in place come in the same order. It has an effect only
    where ``Close`` is the task's criterion itself, not where another criterion contains it."""
    scale: str = "tensor"
    """``tensor``: scale = max(|y64|, rms(y64)); ``element``: |y64| only (plus the smallest normal number),
    for both parts of a complex element its modulus."""
    path: str = ""
    """Operations on the way to one result, an expression as in ``Cost``. Empty: those of the call divided by its results. Declared
    where results share operations: every column of X in A X = B has all roundings of the factorisation of A.
    Complex operations count as one."""
    arithmetic: str = ""
    """``f32`` where the contract asks for fp32 accuracy of fp64 results too: their tolerance is that of the fp32 results."""
    rival: Callable[..., Any] | None = None
    """Another right algorithm for the same call, with the reference's parameters, in torch on the CPU. Its error counts as torch's
    own, where it is larger and torch's alone would refuse an answer: elements grow in LDL^T where they do not in LU."""


@dataclass(frozen=True)
class Exact(Criterion):
    """Integers, booleans, moved values: bit-equal (any NaN equals any NaN)."""

    judge = "exact"


@dataclass(frozen=True)
class Invariant(Criterion):
    """The defining properties of a factorisation; ``kind`` names the checker in ``grading/judge/invariant.py``."""

    judge = "invariant"

    kind: str


@dataclass(frozen=True)
class Dropout(Criterion):
    """Dropout with an elementwise mask before the output: each element equals the kept or the dropped value.

    The reference reads its mask through ``kbx_env.tasks._seams.dropout``, so the judge can compute the all-kept and the
    all-dropped result with it. ``rate`` and ``active`` name the parameters with the drop probability and the training switch.

    ``behind`` names a parameter that multiplies the dropped values: a square invertible matrix in every call where dropout is
    active. The judge divides by it, recovers the mask, and computes the reference's result for that mask. With ``by_row``
    the parameter ``added`` is then added and every row of the sum is normalised; the judge recovers the row's mean and
    deviation together with the mask.
    """

    judge = "dropout"

    rate: str
    active: str | None
    """``None``: always active."""
    close: Close = Close()
    behind: str | None = None
    added: str | None = None
    by_row: bool = False


@dataclass(frozen=True)
class Windows(Criterion):
    """Fractional max pooling (Graham, 2014): every plane has its own pseudo-random windows, and any valid ones are accepted.

    ``tensor`` names the image, ``kernel`` the parameter with the window's size. Output 0 holds the maxima of max(x, 0);
    output 1, if there is one, their flat positions.
    """

    judge = "windows"

    tensor: str
    kernel: str


@dataclass(frozen=True)
class Sample(Criterion):
    """Independent draws of a distribution; ``generator`` names the parameter that holds the seed.

    ``law`` is the distribution: ``uniform01``, or ``binomial`` for elements (input & other) * Binomial(total_count, probs or
    sigmoid(logits)).
    """

    judge = "sample"

    law: str
    generator: str | None = None


@dataclass(frozen=True)
class QuantizationScheme(Criterion):
    """Quantization: the ideal result of the stated scheme, and evidence that the scheme was used.

    Where two valid formulas round differently, ``kbx_env.tasks._schemes`` enumerates the results: an element is correct if
    it is within ``ulps`` fp32 epsilons (times the absolute sum of the products) of one of them.
    """

    judge = "contract"

    operands: str
    accumulate: str
    ulps: float = 8.0
    dots: tuple[str, ...] = ("i8*i8->i32",)
    """Operations of which the output must depend on one: a kind of matrix product; ``i4 in f16*f16->f32``, a product with an
    operand unpacked from halves of bytes; ``f32->i8``, a rounding to int8."""
    disturb: str = "products"
    """Which integers are changed when a call is executed again: ``products``, ``roundings`` or ``bytes``, see
    ``backends/ttir/interp/perturb.py``. The result must then change as ``_schemes.operand``, ``rounding`` or ``packed`` says."""
    least: str = "0"
    """Least amount of work on these integers: operations of the products, elements rounded, or bytes loaded. An expression
    as in ``Cost``, which may use ``numel(result)``."""


@dataclass(frozen=True)
class Published(Criterion):
    """The paper's comparison with torch's own answer: ``allclose`` by dtype, or the three quantization thresholds.

    Tasks get it from ``spec.published`` for ``grading="paper"``; no task declares it.
    """

    judge = "published"
