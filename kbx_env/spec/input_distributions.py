"""Declares how the values of inputs are distributed; ``grading.inputs`` draws them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Distribution:
    """Base class: the distribution of an input tensor's values, drawn in fp64 and rounded to the tensor's dtype."""


@dataclass(frozen=True)
class Normal(Distribution):
    """mean + scale * N(0, 1), clamped to [-clamp, clamp] when given."""

    mean: float = 0.0
    scale: float = 1.0
    clamp: float | None = None


@dataclass(frozen=True)
class Outlier(Distribution):
    """``base`` * N(0, 1) in which a share ``p`` of the elements is multiplied by ``scale``."""

    p: float = 0.001
    scale: float = 10.0
    clamp: float | None = None
    base: float = 1.0


@dataclass(frozen=True)
class Uniform(Distribution):
    """Uniform on [low, high)."""

    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class HalfNormal(Distribution):
    """offset + scale * |N(0, 1)|: strictly positive for offset > 0 (variances)."""

    offset: float = 1e-5
    scale: float = 1.0


@dataclass(frozen=True)
class Literal(Distribution):
    """The given values, repeated in row-major order. Policies know them, so no task has this distribution alone."""

    values: tuple[float, ...]

    def __init__(self, *values: float) -> None:
        object.__setattr__(self, "values", tuple(values))


@dataclass(frozen=True)
class Linspace(Distribution):
    """Evenly spaced from low to high, ends included, in row-major order."""

    low: float
    high: float


@dataclass(frozen=True)
class Ints(Distribution):
    """Integers uniform on [low, high). ``high`` may name an axis. A share ``p`` is replaced by ``special``."""

    low: int
    high: int | str
    special: int | None = None
    p: float = 0.0


@dataclass(frozen=True)
class Distinct(Distribution):
    """A random permutation of 0 .. numel-1: no ties."""


@dataclass(frozen=True)
class Shuffled(Distribution):
    """The given values, repeated as by ``Literal``, in a secret order: their sum is public, their positions are not."""

    values: tuple[float, ...]

    def __init__(self, *values: float) -> None:
        object.__setattr__(self, "values", tuple(values))


@dataclass(frozen=True)
class Signed(Distribution):
    """The given values, repeated as by ``Literal``, each with a random sign."""

    values: tuple[float, ...]

    def __init__(self, *values: float) -> None:
        object.__setattr__(self, "values", tuple(values))


@dataclass(frozen=True)
class Places(Distribution):
    """Distinct positions in [0, size) along the axis ``dim``, in a secret order of its own for every line along it."""

    size: int
    dim: int


@dataclass(frozen=True)
class Bernoulli(Distribution):
    """1 (True) with probability p."""

    p: float = 0.5


@dataclass(frozen=True)
class Constant(Distribution):
    """One value everywhere."""

    value: float


@dataclass(frozen=True)
class Eye(Distribution):
    """Identity matrices in the last two axes."""


@dataclass(frozen=True)
class SPD(Distribution):
    """Symmetric (Hermitian) positive definite matrices X X^H / n + shift * I in the last two axes."""

    shift: float = 0.5


@dataclass(frozen=True)
class Symmetric(Distribution):
    """Symmetric matrices (X + X^T) / sqrt(2 n), plus shift * I; ``hermitian=False`` keeps complex ones symmetric."""

    shift: float = 0.0
    hermitian: bool = True


@dataclass(frozen=True)
class Dominant(Distribution):
    """N(0, 1) / sqrt(n) + shift * I: for shift > 2 well-conditioned, also for elimination without pivoting."""

    shift: float = 3.0


@dataclass(frozen=True)
class Triangular(Distribution):
    """Well-conditioned triangular matrices: N(0, 1) / n off the diagonal, 1 + |N(0, 1)| on it, zeros elsewhere."""

    upper: bool = True


@dataclass(frozen=True)
class Orthogonal(Distribution):
    """Random orthogonal (unitary) matrices; with more rows than columns, the columns are orthonormal."""


@dataclass(frozen=True)
class Spectrum(Distribution):
    """U diag(s) V^T with random orthonormal U and V and the given singular values.

    The values come largest first and are followed by zeros; a single value stands for all of them.
    """

    values: tuple[float, ...]
    symmetric: bool = False
    """V = U: the values are eigenvalues, with sign."""

    def __init__(self, *values: float, symmetric: bool = False) -> None:
        object.__setattr__(self, "values", tuple(values))
        object.__setattr__(self, "symmetric", symmetric)


@dataclass(frozen=True)
class Scaled(Distribution):
    """Matrices of another distribution, all elements times a number: conditions stay, and a power of two rounds nothing."""

    matrices: Distribution
    factor: complex


@dataclass(frozen=True)
class Choice(Distribution):
    """Each element drawn uniformly from the given values, which may include inf and nan."""

    values: tuple[float, ...]

    def __init__(self, *values: float) -> None:
        object.__setattr__(self, "values", tuple(values))


@dataclass(frozen=True)
class Expression(Distribution):
    """Values of a published case, as a formula that ``grading.expressions`` evaluates, such as ``clamp(standard, -10, 10)``."""

    text: str
