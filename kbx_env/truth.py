"""What "right" means for a task. Declarations only: the judges that act on them are in ``grading/judge``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Truth:
    """Base: the kinds of truth below are matched by type."""


@dataclass(frozen=True)
class Close(Truth):
    """Floating point: |y - y64| <= max(floor, k * error that torch itself makes in this dtype).

    ``floor`` is in units of the result dtype's epsilon times the local scale (max of |y64| and the
    root-mean-square of the result, unless ``scale`` says ``element``).
    """

    k: float = 4.0
    ulps: float = 4.0
    """Floor in units of eps(dtype) * scale, per output dtype."""
    scale: str = "tensor"
    """``tensor``: scale = max(|y64|, rms(y64)); ``element``: |y64| only (plus the smallest normal number)."""


@dataclass(frozen=True)
class Exact(Truth):
    """Integers, booleans, moved values: bit-equal (any NaN equals any NaN)."""


@dataclass(frozen=True)
class Invariant(Truth):
    """What a factorisation promises; ``kind`` names the checker in ``grading/judge/invariant.py``."""

    kind: str


@dataclass(frozen=True)
class Dropout(Truth):
    """An elementwise mask somewhere before the output: each element equals the kept or the dropped value.

    The reference reads its mask through ``kbx_env.tasks._seams.dropout``, so the judge can ask it for the
    all-kept and the all-dropped result. ``rate`` and ``active`` name the parameters that hold the drop
    probability and the training switch.
    """

    rate: str
    active: str
    close: Close = Close()


@dataclass(frozen=True)
class Sample(Truth):
    """Independent draws of a named distribution; ``generator`` names the parameter that holds the seed."""

    law: str
    generator: str | None = None


@dataclass(frozen=True)
class Contract(Truth):
    """Quantization: the ideal result of the stated scheme, and evidence that it was used.

    Roundings on which two honest formulas differ are enumerated by ``kbx_env.tasks._schemes``: an element is
    right if it is within ``ulps`` fp32 epsilons (times the absolute sum of the products) of one of them.
    """

    operands: str
    accumulate: str
    ulps: float = 8.0
    dots: tuple[str, ...] = ("i8*i8->i32",)
    """Matrix-product kinds, one of which must feed the output."""
