"""Tests of independence: sums of products of numbers over every shift, reflection and XOR translation of their
positions.

Each test rejects independent numbers with a chance of at most ``ALPHA``, over all of its sums together. The limits come
from Bernstein's inequality, which also holds for few terms and rare drops, where sums of products are far from normal.
A grading makes about 10,000 such tests at most, so an honest kernel fails once in 100,000 gradings.

Sums of products are computed in fp32, in half of the time of fp64: their errors are below a thousandth of a standard deviation of
such a sum. How many terms a sum has is counted in fp64, where it is exact.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kbx_env.grading import gpu_turns

ALPHA = 1e-9
"""Largest chance that a test rejects independent numbers."""
WHOLE = 1 << 18
"""Lines up to this length are tested as a whole; of longer ones random pieces, which are also compared with the whole
line."""
PIECE = 1 << 15
"""Length of the pieces that are compared with a whole line, or with lines of other cases."""
FEW = 256
"""Shorter lines are not compared with those of other cases."""
GROUPS = 1 << 14
"""Length of the random piece in which products of three and four numbers are tested."""
SHORT = (*range(1, 9), 12, 16, 24, 32, 64, 128, 256, 512, 1024)
"""Distances between the first two factors of products of three and four numbers."""
PERIODS = (*range(2, 65), 72, 80, 96, 120, 128, 160, 192, 255, 256)
"""Every so many bits are tested for some that are an XOR of others."""
SPARE = 50
"""Rows beyond the columns: a random matrix of bits has a dependent column with a chance of 2^-50."""


def _fast_length(n: int) -> int:
    """Return the least length from ``n`` on whose real Fourier transform is fast."""
    from scipy.fft import next_fast_len  # takes 0.2 s to import, and most tasks have no random numbers

    return int(next_fast_len(n, True))


_SECRET: ContextVar[int] = ContextVar("secret", default=0)


@contextlib.contextmanager
def seeded_by(secret: bytes) -> Iterator[None]:
    """Let a secret decide where judges look within the block: otherwise a submission could choose its answer by these places.

    Args:
        secret: of the grading.
    """
    token = _SECRET.set(int.from_bytes(hashlib.sha256(b"places" + secret).digest()[:8]))
    try:
        yield
    finally:
        _SECRET.reset(token)


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for what a judge draws.

    Args:
        seed: the same one gives the same draws within a grading.
        device: of the generator.
    """
    return torch.Generator(device=device).manual_seed((seed + _SECRET.get()) % _PRIME)


def seed_of(values: torch.Tensor) -> int:
    """Return a seed that depends on numbers: a grading judges the same answer always alike, and others mostly at other places.

    Args:
        values: fp64.

    Returns:
        32 bits: torch's generator of the CPU takes no more, and the low bits of numbers that were fp32 or fp16 are zero. The sum of
        their halves modulo a prime is another one for nearly every answer.
    """
    return int(values.contiguous().view(torch.int32).sum()) % _PRIME


_PRIME = 2**32 - 5


@dataclass(frozen=True)
class Line:
    """Numbers that should be independent with mean 0."""

    values: torch.Tensor
    """fp64, one axis; 0 where nothing is known."""
    var: float
    """Variance that they should have."""
    most: float
    """Largest absolute value."""
    known: torch.Tensor | None = None
    """Boolean, same shape; ``None`` for everywhere."""
    _spectra: dict[int, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    """The last Fourier transform of the values, by its size: most tests need the same one."""

    def spectrum(self, size: int) -> torch.Tensor:
        """Return the Fourier transform of the values, padded with zeros to ``size``."""
        if size not in self._spectra:
            self._spectra.clear()
            self._spectra[size] = _spectrum(self.single, size)
        return self._spectra[size]

    @property
    def single(self) -> torch.Tensor:
        """The values in fp32."""
        return self.values.to(torch.float32)

    @property
    def n(self) -> int:
        """Number of elements."""
        return self.values.numel()

    @property
    def fourth(self) -> float:
        """A bound on the fourth moment over the squared variance."""
        return self.most**2 / self.var

    def there(self) -> torch.Tensor:
        """Return 1 where something is known, else 0, in fp64."""
        return torch.ones_like(self.values) if self.known is None else self.known.to(torch.float64)

    def part(self, start: int, count: int) -> Line:
        """Return ``count`` consecutive numbers from position ``start`` on."""
        if not start and count >= self.n:
            return self
        known = None if self.known is None else self.known[start : start + count]
        return Line(self.values[start : start + count], self.var, self.most, known)

    def pieces(self, length: int) -> list[tuple[int, Line]]:
        """Return a short line as a whole, or two random parts of a long one, chosen by ``seed_of`` the numbers.

        Args:
            length: of a part.

        Returns:
            Start and part.
        """
        if self.n <= length:
            return [(0, self)]
        draw = generator(seed_of(self.values))
        starts = torch.randint(0, self.n - length + 1, (2,), generator=draw).tolist()
        return [(s, self.part(s, length)) for s in starts]


def limit(terms: torch.Tensor, var: float, most: float, looks: int) -> torch.Tensor:
    """Return the limit that one of several sums exceeds with a chance of at most ``ALPHA``, by Bernstein's inequality.

    Args:
        terms: number of independent terms of each sum.
        var: variance of a term.
        most: largest absolute value of a term.
        looks: number of sums.

    Returns:
        The limit of each sum's absolute value.
    """
    depth = math.log(2 * looks / ALPHA)
    half = most * depth / 3
    return half + (half * half + 2 * depth * var * terms.clamp_min(0)).sqrt()


def _worst(sums: torch.Tensor, terms: torch.Tensor, var: float, most: float, looks: int) -> tuple[bool, int]:
    """Return whether a sum exceeds its limit, and the index of the largest one; arguments as for ``limit``."""
    ratio = sums.abs() / limit(terms, var, most, looks)
    at = int(ratio.argmax())
    return float(ratio[at]) > 1.0, at


def _highest(sums: torch.Tensor, terms: torch.Tensor, var: float, most: float, looks: int) -> torch.Tensor:
    """Return the largest ratio of a sum to its limit; arguments as for ``limit``.

    The result stays a tensor on the device: reading it back would make the host wait.
    """
    return (sums.abs() / limit(terms, var, most, looks)).max()


def _spectrum(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return the Fourier transform of real numbers, padded with zeros to ``size``."""
    return torch.fft.rfft(x, size)


def walsh(x: torch.Tensor) -> torch.Tensor:
    """Return the Walsh-Hadamard transform of numbers; their count must be a power of two."""
    n, h = x.numel(), 1
    while h < n:
        y = x.view(-1, 2, h)
        x = torch.stack((y[:, 0] + y[:, 1], y[:, 0] - y[:, 1]), 1).view(-1)
        h *= 2
    return x


def shifted(a: Line, b: Line, *, own: bool) -> str | None:
    """Test the products of elements at every distance.

    Args:
        a: the first factors.
        b: the second factors, a line of the same length.
        own: ``a`` is ``b``: distance 0 is left out.

    Returns:
        The distance at which the lines are correlated; ``None`` if they are not.
    """
    n, size = a.n, _fast_length(2 * a.n)

    def at(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sums = torch.fft.irfft(x.conj() * y, size)
        return sums[1:n] if own else torch.cat((sums[:n], sums[size - n + 1 :].flip(0)))

    if a.known is None and b.known is None:
        down = torch.arange(n, 0, -1, dtype=torch.float64, device=a.values.device)
        terms = down[1:] if own else torch.cat((down, down[1:]))
    else:
        terms = at(_spectrum(a.there(), size), _spectrum(b.there(), size)).round()
    if not terms.numel():
        return None
    sums = at(a.spectrum(size), b.spectrum(size))
    bad, k = _worst(sums, terms, a.var * b.var, a.most * b.most, 2 * n)
    return f"{k + 1 if own else k if k < n else n - 1 - k} apart" if bad else None


def mirrored(a: Line, b: Line, *, own: bool) -> str | None:
    """Test the products of elements whose positions have the same sum, for every sum; arguments as for ``shifted``."""
    n, size = a.n, _fast_length(2 * a.n)

    def at(x: torch.Tensor, y: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        sums = torch.fft.irfft(x * y, size)[: 2 * n - 1]
        if own:  # every pair is counted twice, and the middle element once with itself
            sums[::2] -= first.square().to(sums.dtype)
            sums = sums / 2
        return sums

    if a.known is None and b.known is None:
        up = torch.arange(1, n + 1, dtype=torch.float64, device=a.values.device)
        terms = torch.cat((up, up[:-1].flip(0)))
        terms = (terms / 2).floor() if own else terms
    else:
        terms = at(_spectrum(a.there(), size), _spectrum(b.there(), size), a.there()).round()
    bad, _ = _worst(at(a.spectrum(size), b.spectrum(size), a.values), terms, a.var * b.var, a.most * b.most, 2 * n)
    return "read backwards" if bad else None


@functools.lru_cache(maxsize=16)
def _met(n: int, size: int, device: torch.device) -> torch.Tensor:
    """Return for every XOR below ``size`` how many positions below ``n`` it maps to positions below ``n``."""
    there = walsh((torch.arange(size, device=device) < n).to(torch.float64))
    return (walsh(there * there) / size).round()


def xored(a: Line, b: Line, *, own: bool) -> str | None:
    """Test the products of elements whose positions differ by the same XOR, for every XOR.

    Args:
        a: the first factors.
        b: the second factors.
        own: ``a`` is ``b``: XOR 0 is left out.

    Returns:
        The XOR at which the lines are correlated; ``None`` if they are not.
    """
    size = 1 << max(1, (a.n - 1).bit_length())

    def at(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        u = walsh(torch.nn.functional.pad(x, (0, size - x.numel())))
        v = u if y is x else walsh(torch.nn.functional.pad(y, (0, size - y.numel())))
        sums = walsh(u * v) / size
        return sums[1:] / 2 if own else sums

    x = a.single
    all_known = a.known is None and b.known is None
    terms = _met(a.n, size, a.values.device) if all_known else at(a.there(), b.there()).round()
    terms = terms[1:] / 2 if all_known and own else terms
    bad, k = _worst(at(x, x if own else b.single), terms, a.var * b.var, a.most * b.most, size)
    return f"at places that differ by XOR with {k + own}" if bad else None


def echoed(piece: Line, start: int | None, whole: Line) -> str | None:
    """Test whether a piece is repeated anywhere in a long line, forwards or backwards.

    Args:
        piece: the piece.
        start: its position, if it belongs to that line; else ``None``.
        whole: the line.

    Returns:
        How it is repeated; ``None`` if it is not.
    """
    m = piece.n
    # On a GPU a long transform takes as long as a short one, and each step costs several launches.
    step = max(1 << (22 if whole.values.is_cuda else 18), 2 * m)
    size = _fast_length(step + m)
    there = piece.there() if piece.known is not None or whole.known is not None else None
    for backwards in (False, True):
        gpu_turns.yield_gpu()
        p = piece.single.flip(0) if backwards else piece.single
        spectrum = _spectrum(p, size).conj()
        seen = None if there is None else _spectrum(there.flip(0) if backwards else there, size).conj()
        found = []
        for first in range(0, whole.n, step):
            part = whole.part(first, step + m - 1)
            sums = torch.fft.irfft(spectrum * _spectrum(part.single, size), size)[: min(step, whole.n - first)]
            if seen is None:
                terms = (part.n - torch.arange(sums.numel(), device=sums.device)).clamp(max=m).to(torch.float64)
            else:
                terms = torch.fft.irfft(seen * _spectrum(part.there(), size), size)[: sums.numel()].round()
            if start is not None:  # not where the piece overlaps itself: ``shifted`` and ``mirrored`` test that
                at = torch.arange(first, first + sums.numel(), device=sums.device)
                sums = torch.where((at - start).abs() < m, 0.0, sums)
            found.append(_highest(sums, terms, piece.var * whole.var, piece.most * whole.most, 2 * whole.n))
        if float(torch.stack(found).max()) > 1.0:
            return "far away, " + ("read backwards" if backwards else "read again")
    return None


def transposed(a: torch.Tensor, b: torch.Tensor, line: Line, *, own: bool) -> str | None:
    """Test the products of elements with those of the transposed matrices, for every two axes of one size.

    Args:
        a: the first factors, shaped.
        b: the second factors, in the same shape.
        line: has the variance and bound of both.
        own: ``a`` is ``b``: pairs count once.

    Returns:
        A text if they are correlated, else ``None``.
    """
    for i in range(a.dim()):
        for j in range(i):
            if a.shape[i] == a.shape[j] > 1:
                x, y = a.movedim((j, i), (-2, -1)), b.movedim((j, i), (-1, -2))
                products = (x * y).triu(1) if own else x * y
                terms = torch.tensor(float(a.numel()), dtype=torch.float64)
                if abs(float(products.sum())) > float(limit(terms, line.var**2, line.most**2, 10)):
                    return "across the diagonal"
    return None


def products(line: Line) -> str | None:
    """Test products of three and of four numbers, which may depend on each other although all pairs are independent.

    Args:
        line: the numbers.

    Returns:
        A text if they are correlated, else ``None``.
    """
    _, part = line.pieces(GROUPS)[0]
    n, x = part.n, part.single
    size = _fast_length(2 * n)
    lags = [a for a in SHORT if 2 * a < n]
    looks = 3 * n * max(1, len(lags))
    spectrum = _spectrum(x, size)
    # The variance of the products varies itself: 10 % are added. Unknown elements only make the sums smaller.
    full = [1.1 * n * part.var**power for power in (3, 4)]
    bounds = [float(limit(torch.tensor(v), 1.0, part.most**k, looks)) for v, k in zip(full, (3, 4), strict=True)]
    if not lags:
        return None
    # All at once: to plan a transform takes longer than to make it.
    pairs = torch.stack([torch.nn.functional.pad(x[:-a] * x[a:], (0, a)) for a in lags])
    pair_spectra = _spectrum(pairs, size).conj()
    # Not the distances at which a number would be multiplied with itself.
    rows, at = torch.arange(len(lags), device=x.device), torch.tensor(lags, device=x.device)
    for power, other, bound in zip((3, 4), (spectrum, pair_spectra.conj()), bounds, strict=True):
        sums = torch.fft.irfft(pair_spectra * other, size)
        sums[:, 0] = sums[rows, at] = sums[rows, -at] = 0.0
        if float(sums.abs().max()) > bound:
            return f"in groups of {power}"
    return None


def _full_rank(rows: Iterable[int], columns: int) -> bool:
    """Return whether a matrix of bits has independent columns over GF(2).

    Args:
        rows: the bits of each row as an integer below ``2**columns``. No more of them are read than it takes to reach the rank.
        columns: number of columns.
    """
    basis, missing = [0] * (columns + 1), columns  # by the place of their highest bit
    for row in rows:
        while row:
            found = basis[row.bit_length()]
            if not found:
                basis[row.bit_length()] = row
                missing -= 1
                break
            row ^= found
        if not missing:
            return True
    return False


def draw_matrices(values: torch.Tensor, seed: int) -> tuple[torch.Tensor, list[int]]:
    """Draw the values for ``dependent``: for each period p a matrix of p columns and p + ``SPARE`` rows, from a random place on.

    They are one tensor, because each reading makes the host wait for a GPU.

    Args:
        values: the line, one axis.
        seed: decides where the matrices begin.

    Returns:
        The values of all matrices, row by row; and the periods, as many of ``PERIODS`` as the line has room for.
    """
    periods = [period for period in PERIODS if (period + SPARE) * period <= values.numel()]
    draw = generator(seed)
    parts = [values[:0]]
    for period in periods:
        size = (period + SPARE) * period
        start = int(torch.randint(0, values.numel() - size + 1, (1,), generator=draw))
        parts.append(values[start : start + size])
    return torch.cat(parts), periods


def dependent(bits: npt.NDArray[Any], periods: Iterable[int]) -> str | None:
    """Test whether in every so many bits some are an XOR of others, by the rank of matrices over GF(2).

    Args:
        bits: zeros and ones, those of the values of ``draw_matrices``.
        periods: from there.

    Returns:
        The period of such bits as a text; ``None`` if there is none.
    """
    at = 0
    for period in periods:
        matrix = bits[at : at + (period + SPARE) * period].reshape(-1, period)
        packed = np.packbits(matrix, axis=1, bitorder="little")
        if not _full_rank((int.from_bytes(row.tobytes(), "little") for row in packed), period):
            return f"some elements of every {period} are determined by others"
        at += matrix.size
    return None


def uneven(sums: torch.Tensor, counts: torch.Tensor | float, line: Line) -> str | None:
    """Test whether sums of blocks are farther from zero, or closer to it, than those of independent numbers.

    Args:
        sums: of each block.
        counts: known numbers in each block; one number if all have as many.
        line: has the variance and bound of the numbers.

    Returns:
        ``together`` or ``too evenly``; ``None`` if neither.
    """
    if isinstance(counts, torch.Tensor):
        use = counts * line.var > 5
        sums, counts = sums[use], counts[use]
    elif counts * line.var <= 5:
        return None
    blocks = sums.numel()
    if blocks < 2:
        return None
    # The squared sum of m numbers has mean 1 and mean square 3 + (kurtosis - 3) / m.
    if isinstance(counts, torch.Tensor):
        chi = float((sums.square() / (counts * line.var)).sum())
        square = float((3 + (line.fourth - 3) / counts).sum())
    else:
        chi = float(sums.square().sum()) / (counts * line.var)
        square = blocks * (3 + (line.fourth - 3) / counts)
    if chi > blocks + 8 * math.sqrt(square - blocks) + 40:
        return "together"
    # Maurer (2003): a sum of nonnegative numbers is below its mean by t with a chance of at most exp(-t^2 / 2 E Z^2).
    if chi < blocks - math.sqrt(2 * math.log(1 / ALPHA) * square):
        return "too evenly"
    return None


def uneven_runs(line: Line) -> Iterator[tuple[int, str]]:
    """Yield the length of runs of 2, 4, 8, ... numbers whose sums are uneven, and the finding of ``uneven``."""
    sums, known = line.values, None if line.known is None else line.there()
    for shift in range(1, max(1, line.n.bit_length() - 5)):
        m = 1 << shift
        sums, known = _of_pairs(sums), None if known is None else _of_pairs(known)
        found = uneven(sums, float(m) if known is None else known, line)
        if found:
            yield m, found


def _of_pairs(x: torch.Tensor) -> torch.Tensor:
    """Return the sums of each two neighbours, without a last single number."""
    even = x.numel() // 2 * 2
    return x[:even:2] + x[1:even:2]


def patterned(line: Line) -> str | None:
    """Run all tests of a single line.

    Args:
        line: the numbers.

    Returns:
        The structure that was found; ``None`` if the line looks random.
    """
    if line.n < 2:
        return None
    for m, unevenness in uneven_runs(line):
        return f"runs of {m} go {unevenness}"
    for start, part in line.pieces(WHOLE):
        gpu_turns.yield_gpu()
        for test in (shifted, mirrored, xored):
            found = test(part, part, own=True)
            if found:
                return f"elements go together {found}"
        if part.n < line.n:
            found = echoed(line.part(start, PIECE), start, line)
            if found:
                return f"elements go together {found}"
    found = products(line)
    return f"elements go together {found}" if found else None


def came_before(lines: list[Line], earlier: list[Line] | None) -> bool:
    """Test whether the beginning of a line is correlated with that of an earlier case's line, at any distance.

    Tensors of other shapes and probabilities can be drawn from the same numbers. Calls of one case are compared by
    ``related``.

    Args:
        lines: of this case.
        earlier: beginnings of the lines of earlier cases; those of ``lines`` are added. ``None`` for no test.

    Returns:
        Whether a correlation was found.
    """
    if earlier is None:
        return False
    beginnings = [Line(p.values.clone(), p.var, p.most, None if p.known is None else p.known.clone())
            for p in (line.part(0, PIECE) for line in lines)]  # fmt: skip
    found = False
    for a in beginnings:
        for b in earlier:
            n = min(a.n, b.n)
            found = found or (n >= FEW and shifted(a.part(0, n), b.part(0, n), own=False) is not None)
    earlier.extend(beginnings)
    return found


def related(a: Line, b: Line) -> str | None:
    """Test two lines of one length for dependence.

    Args:
        a: a line.
        b: the other one.

    Returns:
        What they have in common; ``None`` if nothing.
    """
    if not a.n:
        return None
    if a.n <= WHOLE:
        return next((f for t in (shifted, mirrored, xored) if (f := t(a, b, own=False))), None)
    for start, part in a.pieces(WHOLE):
        found = next((f for t in (shifted, mirrored, xored) if (f := t(part, b.part(start, WHOLE), own=False))), None)
        found = found or echoed(a.part(start, PIECE), None, b)
        if found:
            return found
    return None
