"""Whether numbers that should be independent are: sums of products over every shift, reflection and XOR translation.

Each test rejects independent numbers with a chance of at most ``ALPHA``, all its looks together: limits come from
Bernstein's inequality, which also holds for few terms and rare drops, where sums of products are far from normal. A
grading asks about 10,000 such questions at most, so that an honest kernel fails once in 100,000 gradings.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from scipy.fft import next_fast_len

ALPHA = 1e-9
WHOLE = 1 << 18
"""Lines up to this length are searched as a whole; of longer ones random pieces, and these against the whole line."""
PIECE = 1 << 15
FEW = 256
"""Shorter lines are not compared with those of other cases."""
GROUPS = 1 << 14
"""Length of the random piece in which products of three and four are looked at."""
SHORT = (*range(1, 9), 12, 16, 24, 32, 64, 128, 256, 512, 1024)
"""Distances of the first two factors of products of three and four."""
PERIODS = (*range(2, 65), 72, 80, 96, 120, 128, 160, 192, 255, 256)
"""Lengths of blocks in which a fixed XOR of bits may vanish."""
SPARE = 50
"""Rows beyond the columns: a random matrix of bits has a dependent column with a chance of 2^-50."""


@dataclass(frozen=True)
class Line:
    """Independent numbers of mean 0, as they should be; 0 where nothing is known."""

    values: torch.Tensor
    var: float
    most: float
    """No number is larger."""
    known: torch.Tensor | None = None
    """``None``: everywhere."""

    @property
    def n(self) -> int:
        """Length."""
        return self.values.numel()

    @property
    def fourth(self) -> float:
        """A bound of the fourth moment over the squared variance."""
        return self.most**2 / self.var

    def there(self) -> torch.Tensor:
        """1 where something is known."""
        return torch.ones_like(self.values) if self.known is None else self.known.to(torch.float64)

    def part(self, start: int, count: int) -> Line:
        """Consecutive numbers."""
        known = None if self.known is None else self.known[start : start + count]
        return Line(self.values[start : start + count], self.var, self.most, known)

    def pieces(self, length: int) -> list[tuple[int, Line]]:
        """(start, part): all of a short line, two random parts of a long one.

        Which ones, the numbers themselves decide: the same answer is always judged alike, and nobody knows beforehand.
        """
        if self.n <= length:
            return [(0, self)]
        draw = torch.Generator().manual_seed(int(self.values.view(torch.int64).sum()) & ((1 << 63) - 1))
        starts = torch.randint(0, self.n - length + 1, (2,), generator=draw).tolist()
        return [(s, self.part(s, length)) for s in starts]


def limit(terms: torch.Tensor, var: float, most: float, looks: int) -> torch.Tensor:
    """What a sum of ``terms`` independent terms exceeds with a chance of at most ALPHA in one of ``looks`` sums."""
    depth = math.log(2 * looks / ALPHA)
    half = most * depth / 3
    return half + (half * half + 2 * depth * var * terms.clamp_min(0)).sqrt()


def _worst(sums: torch.Tensor, terms: torch.Tensor, var: float, most: float, looks: int) -> tuple[bool, int]:
    ratio = sums.abs() / limit(terms, var, most, looks)
    at = int(ratio.argmax())
    return float(ratio[at]) > 1.0, at


def _highest(sums: torch.Tensor, terms: torch.Tensor, var: float, most: float, looks: int) -> torch.Tensor:
    """The largest ratio of a sum to its limit, still on the device: to read it back makes the host wait."""
    return (sums.abs() / limit(terms, var, most, looks)).max()


def _spectrum(x: torch.Tensor, size: int) -> torch.Tensor:
    return torch.fft.rfft(x, size)


def walsh(x: torch.Tensor) -> torch.Tensor:
    """Walsh-Hadamard transform of a power of two of numbers."""
    n, h = x.numel(), 1
    while h < n:
        y = x.view(-1, 2, h)
        x = torch.stack((y[:, 0] + y[:, 1], y[:, 0] - y[:, 1]), 1).view(-1)
        h *= 2
    return x


def shifted(a: Line, b: Line, *, own: bool) -> str | None:
    """Products at every distance; ``own``: ``a`` is ``b``, distance 0 says nothing."""
    n, size = a.n, next_fast_len(2 * a.n, True)

    def at(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sums = torch.fft.irfft(_spectrum(x, size).conj() * _spectrum(y, size), size)
        return sums[1:n] if own else torch.cat((sums[:n], sums[size - n + 1 :].flip(0)))

    if a.known is None and b.known is None:
        down = torch.arange(n, 0, -1, dtype=torch.float64, device=a.values.device)
        terms = down[1:] if own else torch.cat((down, down[1:]))
    else:
        terms = at(a.there(), b.there()).round()
    if not terms.numel():
        return None
    bad, k = _worst(at(a.values, b.values), terms, a.var * b.var, a.most * b.most, 2 * n)
    return f"{k + 1 if own else k if k < n else n - 1 - k} apart" if bad else None


def mirrored(a: Line, b: Line, *, own: bool) -> str | None:
    """Products of elements whose places add up to the same number, for every such number."""
    n, size = a.n, next_fast_len(2 * a.n, True)

    def at(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sums = torch.fft.irfft(_spectrum(x, size) * _spectrum(y, size), size)[: 2 * n - 1]
        if own:  # every pair was met twice, the middle once with itself
            sums[::2] -= x.square()
            sums = sums / 2
        return sums

    if a.known is None and b.known is None:
        up = torch.arange(1, n + 1, dtype=torch.float64, device=a.values.device)
        terms = torch.cat((up, up[:-1].flip(0)))
        terms = (terms / 2).floor() if own else terms
    else:
        terms = at(a.there(), b.there()).round()
    bad, _ = _worst(at(a.values, b.values), terms, a.var * b.var, a.most * b.most, 2 * n)
    return "read backwards" if bad else None


@functools.lru_cache(maxsize=16)
def _met(n: int, size: int, device: torch.device) -> torch.Tensor:
    """For every XOR, how many places below ``n`` it leaves below ``n``."""
    there = walsh((torch.arange(size, device=device) < n).to(torch.float64))
    return (walsh(there * there) / size).round()


def xored(a: Line, b: Line, *, own: bool) -> str | None:
    """Products of elements whose places differ by the same XOR."""
    size = 1 << max(1, (a.n - 1).bit_length())

    def at(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        u = walsh(torch.nn.functional.pad(x, (0, size - x.numel())))
        v = u if y is x else walsh(torch.nn.functional.pad(y, (0, size - y.numel())))
        sums = walsh(u * v) / size
        return sums[1:] / 2 if own else sums

    whole = a.known is None and b.known is None
    terms = _met(a.n, size, a.values.device) if whole else at(a.there(), b.there()).round()
    terms = terms[1:] / 2 if whole and own else terms
    bad, k = _worst(at(a.values, b.values), terms, a.var * b.var, a.most * b.most, size)
    return f"at places that differ by XOR with {k + own}" if bad else None


def echoed(piece: Line, start: int | None, whole: Line) -> str | None:
    """Whether a piece comes again anywhere in a long line, forwards or backwards; ``start``: where it is itself."""
    m = piece.n
    # A GPU does a long transform as fast as a short one, and each step costs it several launches.
    step = max(1 << (22 if whole.values.is_cuda else 18), 2 * m)
    size = next_fast_len(step + m, True)
    there = piece.there() if piece.known is not None or whole.known is not None else None
    for backwards in (False, True):
        p = piece.values.flip(0) if backwards else piece.values
        spectrum = _spectrum(p, size).conj()
        seen = None if there is None else _spectrum(there.flip(0) if backwards else there, size).conj()
        found = []
        for first in range(0, whole.n, step):
            part = whole.part(first, step + m - 1)
            sums = torch.fft.irfft(spectrum * _spectrum(part.values, size), size)[: min(step, whole.n - first)]
            if seen is None:
                terms = (part.n - torch.arange(sums.numel(), device=sums.device)).clamp(max=m).to(torch.float64)
            else:
                terms = torch.fft.irfft(seen * _spectrum(part.there(), size), size)[: sums.numel()].round()
            if start is not None:  # where it overlaps itself it is no echo; ``shifted`` and ``mirrored`` look there
                at = torch.arange(first, first + sums.numel(), device=sums.device)
                sums = torch.where((at - start).abs() < m, 0.0, sums)
            found.append(_highest(sums, terms, piece.var * whole.var, piece.most * whole.most, 2 * whole.n))
        if float(torch.stack(found).max()) > 1.0:
            return "far away, " + ("read backwards" if backwards else "read again")
    return None


def transposed(a: torch.Tensor, b: torch.Tensor, line: Line, *, own: bool) -> str | None:
    """Products with the transposed matrices, for tensors with two axes of one size."""
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
    """Products of three and of four: numbers may be independent in pairs and yet made of each other."""
    _, part = line.pieces(GROUPS)[0]
    n, x = part.n, part.values
    size = next_fast_len(2 * n, True)
    lags = [a for a in SHORT if 2 * a < n]
    looks = 3 * n * max(1, len(lags))
    spectrum = _spectrum(x, size)
    # The variance of the products themselves varies: a tenth more. Unknown elements only make sums smaller.
    full = [1.1 * n * part.var**power for power in (3, 4)]
    bounds = [float(limit(torch.tensor(v), 1.0, part.most**k, looks)) for v, k in zip(full, (3, 4), strict=True)]
    highest: dict[int, list[torch.Tensor]] = {3: [], 4: []}
    for a in lags:
        y = torch.nn.functional.pad(x[:-a] * x[a:], (0, a))
        mine = _spectrum(y, size).conj()
        for power, other in ((3, spectrum), (4, mine.conj())):
            sums = torch.fft.irfft(mine * other, size)
            # Distances at which a factor would meet itself.
            for k in (0, a, -a):
                sums[k] = 0.0
            highest[power].append(sums.abs().max())
    for (power, found), bound in zip(highest.items(), bounds, strict=True):
        if found and float(torch.stack(found).max()) > bound:
            return f"in groups of {power}"
    return None


def _rank(rows: list[int]) -> int:
    basis: dict[int, int] = {}
    for row in rows:
        while row:
            top = row.bit_length()
            if top not in basis:
                basis[top] = row
                break
            row ^= basis[top]
    return len(basis)


def dependent(bits: torch.Tensor) -> str | None:
    """Whether some bits of every block are a XOR of others, whatever their number: the rank of blocks over GF(2)."""
    n = bits.numel()
    draw = torch.Generator().manual_seed(int(bits.sum()) * 65537 + n)
    for period in PERIODS:
        rows = period + SPARE
        if rows * period > n:
            break
        start = int(torch.randint(0, n - rows * period + 1, (1,), generator=draw))
        block = bits[start : start + rows * period].view(rows, period).to("cpu", torch.uint8)
        packed = torch.nn.functional.pad(block, (0, -period % 8)).view(rows, -1, 8)
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
        lines = (packed * weights).sum(-1).to(torch.uint8)
        if _rank([int.from_bytes(bytes(r), "little") for r in lines.tolist()]) < period:
            return f"some elements of every {period} are determined by others"
    return None


def uneven(sums: torch.Tensor, counts: torch.Tensor, line: Line) -> str | None:
    """Sums of blocks of ``counts`` numbers: too far from zero, or too close to it for chance."""
    use = counts * line.var > 5
    sums, counts = sums[use], counts[use]
    if sums.numel() < 2:
        return None
    chi = float((sums.square() / (counts * line.var)).sum())
    # The squared sum of m numbers has mean 1 and mean square 3 + (kurtosis - 3) / m.
    square = float((3 + (line.fourth - 3) / counts).sum())
    blocks = sums.numel()
    if chi > blocks + 8 * math.sqrt(square - blocks) + 40:
        return "together"
    # Maurer (2003): a sum of numbers >= 0 falls below its mean by t with a chance of at most exp(-t^2 / 2 E Z^2).
    if chi < blocks - math.sqrt(2 * math.log(1 / ALPHA) * square):
        return "too evenly"
    return None


def blocks(line: Line) -> Iterator[tuple[int, str]]:
    """(length, what is wrong) of runs of 2, 4, 8, ... numbers."""
    known = line.there()
    for shift in range(1, max(1, line.n.bit_length() - 5)):
        m = 1 << shift
        whole = line.n // m * m
        found = uneven(line.values[:whole].view(-1, m).sum(1), known[:whole].view(-1, m).sum(1), line)
        if found:
            yield m, found


def patterned(line: Line) -> str | None:
    """Everything that one line can be told of; ``None``: it looks like chance."""
    if line.n < 2:
        return None
    for m, found in blocks(line):
        return f"runs of {m} go {found}"
    for start, part in line.pieces(WHOLE):
        for test in (shifted, mirrored, xored):
            found_ = test(part, part, own=True)
            if found_:
                return f"elements go together {found_}"
        if part.n < line.n:
            found_ = echoed(line.part(start, PIECE), start, line)
            if found_:
                return f"elements go together {found_}"
    found_ = products(line)
    return f"elements go together {found_}" if found_ else None


def came_before(lines: list[Line], earlier: list[Line] | None) -> bool:
    """Whether the beginning of a line goes together with that of an earlier one, at any distance; ``earlier`` grows.

    Tensors of other shapes and other chances can share the numbers that decided; calls of one case are compared elsewhere.
    """
    if earlier is None:
        return False
    mine = [Line(p.values.clone(), p.var, p.most, None if p.known is None else p.known.clone())
            for p in (line.part(0, PIECE) for line in lines)]  # fmt: skip
    found = False
    for a in mine:
        for b in earlier:
            n = min(a.n, b.n)
            found = found or (n >= FEW and shifted(a.part(0, n), b.part(0, n), own=False) is not None)
    earlier.extend(mine)
    return found


def related(a: Line, b: Line) -> str | None:
    """What two lines have in common; ``None``: nothing."""
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
