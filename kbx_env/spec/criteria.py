"""What "right" means for a task. Declarations only: the judges that act on them are in ``grading/judge``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Criterion:
    """Base: the kinds of truth below are matched by type."""

    judge: ClassVar[str]
    """Name of the judge that decides it, as lists of tasks show it."""


@dataclass(frozen=True)
class Close(Criterion):
    """Floating point: |y - y64| <= max(floor, k * error that torch itself makes in this dtype).

    ``floor`` is in units of the result dtype's epsilon times the local scale (max of |y64| and the
    root-mean-square of the result, unless ``scale`` says ``element``).
    """

    judge = "close"

    k: float = 4.0
    ulps: float = 4.0
    """Floor in units of eps(dtype) * scale, per output dtype; for 16-bit results 2 at most (``judge/close.py``)."""
    of: tuple[float, ...] = ()
    """``ulps`` of each result, where they differ; tensors written in place come in the same order. As a task's own truth only: the
    truths that contain a ``Close`` do not look at it."""
    scale: str = "tensor"
    """``tensor``: scale = max(|y64|, rms(y64)); ``element``: |y64| only (plus the smallest normal number)."""


@dataclass(frozen=True)
class Exact(Criterion):
    """Integers, booleans, moved values: bit-equal (any NaN equals any NaN)."""

    judge = "exact"


@dataclass(frozen=True)
class Invariant(Criterion):
    """What a factorisation promises; ``kind`` names the checker in ``grading/judge/invariant.py``."""

    judge = "invariant"

    kind: str


@dataclass(frozen=True)
class Dropout(Criterion):
    """An elementwise mask somewhere before the output: each element equals the kept or the dropped value.

    The reference reads its mask through ``kbx_env.tasks._seams.dropout``, so the judge can ask it for the
    all-kept and the all-dropped result. ``rate`` and ``active`` name the parameters that hold the drop
    probability and the training switch.

    ``behind``: the parameter that multiplies what was dropped, a square invertible matrix wherever chance decides. The judge
    divides by it, reads the mask off, and asks the reference for its result. ``by_row``: then ``added`` is added and every row of
    the sum is normalised; its mean and deviation are found with the mask.
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
    """Fractional max pooling (Graham, 2014): every plane has pseudo-random windows of its own, any fair ones will do.

    ``tensor`` is the image, ``kernel`` the parameter with the window's size; output 0 holds the maxima of max(x, 0), output
    1, where there is one, their flat positions.
    """

    judge = "windows"

    tensor: str
    kernel: str


@dataclass(frozen=True)
class Sample(Criterion):
    """Independent draws of a named distribution; ``generator`` names the parameter that holds the seed.

    Laws: ``uniform01``; ``binomial``, each element (input & other) * Binomial(total_count, probs or sigmoid(logits)).
    """

    judge = "sample"

    law: str
    generator: str | None = None


@dataclass(frozen=True)
class QuantizationScheme(Criterion):
    """Quantization: the ideal result of the stated scheme, and evidence that it was used.

    Roundings on which two honest formulas differ are enumerated by ``kbx_env.tasks._schemes``: an element is
    right if it is within ``ulps`` fp32 epsilons (times the absolute sum of the products) of one of them.
    """

    judge = "contract"

    operands: str
    accumulate: str
    ulps: float = 8.0
    dots: tuple[str, ...] = ("i8*i8->i32",)
    """What must lie on the way to the output, one of: a kind of matrix product; ``i4 in f16*f16->f32``, a product whose
    operand came out of halves of bytes; ``f32->i8``, a rounding to int8."""
    disturb: str = "products"
    """Which integers are exchanged for others when a call is executed once more, and the result must follow as
    ``_schemes.operand``, ``rounding`` or ``packed`` says: ``products``, ``roundings`` or ``bytes``, see
    ``backends/ttir/interp/perturb.py``."""
    least: str = "0"
    """What must be done with these integers at least, in operations of the products, elements rounded, or bytes loaded; an
    expression as in ``Cost``, ``numel(result)`` included."""
