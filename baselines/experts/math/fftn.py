import math

import torch
import triton
import triton.language as tl


@triton.constexpr_function
def _cosine(k, n):
    return math.cos(2 * math.pi * k / n)


@triton.constexpr_function
def _sine(k, n):
    return math.sin(2 * math.pi * k / n)


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.jit
def _twiddled(re, im, H: tl.constexpr):
    """Multiply entry p of axis 1, of H, by exp(-pi i p / H). The roots are constants wherever p is a register's number."""
    if H == 1:
        return re, im
    else:
        p = tl.arange(0, H)[None, :, None]
        c, s = tl.full((1, H, 1), 1.0, tl.float32), tl.full((1, H, 1), 0.0, tl.float32)
        for q in tl.static_range(1, H):
            if 2 * q != H:
                c, s = tl.where(p == q, _cosine(q, 2 * H), c), tl.where(p == q, _sine(q, 2 * H), s)
        re2 = tl.where(p == 0, re, tl.where(2 * p == H, im, re * c + im * s))
        im2 = tl.where(p == 0, im, tl.where(2 * p == H, -re, im * c - re * s))
        return re2, im2


@triton.jit
def _halves(x, E: tl.constexpr, L: tl.constexpr, D: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (E, 2, L // 2, D)), (0, 2, 3, 1)))


@triton.jit
def _stacked(x, y, E: tl.constexpr, H: tl.constexpr, D: tl.constexpr):
    return tl.reshape(tl.permute(tl.join(x, y), (0, 1, 3, 2)), (E, H, 2 * D))


@triton.jit
def _butterflies(re, im, E: tl.constexpr, R: tl.constexpr):
    """DFT along the second axis of (E, R) tensors, R a power of two: everything stays in registers, whole tensors at a
    time, as an operation for each number would be much for the compiler."""
    re, im = tl.reshape(re, (E, R, 1)), tl.reshape(im, (E, R, 1))
    for level in tl.static_range(_log2(R)):
        # (E, points left, results): each level halves the points and doubles the results.
        a, b = _halves(re, E, R >> level, 1 << level)
        c, d = _halves(im, E, R >> level, 1 << level)
        u, v = _twiddled(a - b, c - d, R >> (level + 1))
        re = _stacked(a + b, u, E, R >> (level + 1), 1 << level)
        im = _stacked(c + d, v, E, R >> (level + 1), 1 << level)
    return tl.reshape(re, (E, R)), tl.reshape(im, (E, R))


@triton.jit
def _pairs(x, at, inside, width, REAL: tl.constexpr):
    """The complex numbers at the places at, as pairs; width is 1 for real ones."""
    pair = tl.arange(0, 2)[None, None, :]
    if REAL is None:
        return tl.load(x + width * at[:, :, None] + pair, mask=inside[:, :, None] & (pair < width), other=0.0)
    else:
        return tl.load(x + 2 * at[:, :, None] + pair, mask=inside[:, :, None], other=0.0)


@triton.jit
def _anchor(phase, M, angle):
    turn = tl.where(2 * phase > M, phase - M, phase).to(tl.float32) * angle
    return tl.cos(turn), -tl.sin(turn)


@triton.jit
def _turn(re, im, first, step, M, angle, E: tl.constexpr, R: tl.constexpr):
    """Multiply entry k by exp(-2 pi i (first + k step) / M); angle = 2 pi / M.

    Sine and cosine only of first and of the powers of two, whose integer phases are exact, and products of them.
    """
    c, s = _anchor(first, M, angle)
    wr, wi = c[:, None], s[:, None]
    for level in tl.static_range(_log2(R)):
        c, s = _anchor(step * (R >> (level + 1)), M, angle)
        c, s = c[:, None], s[:, None]
        wr, wi = (
            tl.reshape(tl.join(wr, c * wr - s * wi), (E, 2 << level)),
            tl.reshape(tl.join(wi, c * wi + s * wr), (E, 2 << level)),
        )
    return re * wr - im * wi, re * wi + im * wr


@triton.jit
def _exchange(x, A: tl.constexpr, B: tl.constexpr, R: tl.constexpr, R2: tl.constexpr, FLIP: tl.constexpr):
    """(A * R2 * B, R) to (A * R * B, R2), with FLIP (B * A * R, R2): entries and lanes swap.

    The one step that moves data between threads.
    """
    z = tl.reshape(x, (A, R2, B, R))
    if FLIP:
        z = tl.permute(z, (2, 0, 3, 1))
    else:
        z = tl.permute(z, (0, 3, 2, 1))
    return tl.reshape(z, (A * R * B, R2))


@triton.jit(do_not_specialize=["columns", "S", "KI", "LI", "M", "width"])
def _fast(x, y, columns, S, KI, LI, M, angle, scale, width, R1: tl.constexpr, R2: tl.constexpr, C: tl.constexpr,
          REAL: tl.constexpr, TURN: tl.constexpr, COLS_IN: tl.constexpr, COLS_OUT: tl.constexpr):  # fmt: skip
    """C transforms of n = R1 R2 points by one program, each thread with R1 or R2 of them; see _passes."""
    if not COLS_IN:
        S = 1
    if not COLS_OUT:
        KI = 1
    n: tl.constexpr = R1 * R2
    A: tl.constexpr = 1 if COLS_IN else C
    B: tl.constexpr = C // A
    # Neighbouring lanes are neighbours in memory: columns, or the points of a row.
    e = tl.arange(0, R2 * C)
    t = e // B % R2
    g = tl.program_id(0) * C + (e % C if COLS_IN else e // R2)
    m = g % S
    j = (t[None, :] + tl.arange(0, R1)[:, None] * R2) * S
    inside = (g < columns)[None, :] & (m[None, :] + j < LI)
    source = ((g // S).to(tl.int64) * LI + m)[None, :] + j
    pair = tl.arange(0, 2)[None, None, :]
    if REAL:
        re = tl.trans(tl.load(x + source, mask=inside, other=0.0))
        im = tl.zeros_like(re)
    else:
        re, im = tl.split(tl.permute(_pairs(x, source, inside, width, REAL), (1, 0, 2)))
    re, im = _butterflies(re, im, R2 * C, R1)
    re, im = _turn(re, im, t * 0, t, n, 6.283185307179586 / n, R2 * C, R1)
    FLIP: tl.constexpr = COLS_IN and not COLS_OUT
    re, im = _butterflies(_exchange(re, A, B, R1, R2, FLIP), _exchange(im, A, B, R1, R2, FLIP), R1 * C, R2)
    e = tl.arange(0, R1 * C)
    q = e // C if COLS_OUT else e % R1
    g = tl.program_id(0) * C + (e % C if COLS_OUT else e // R1)
    m = g % S
    block = m // KI
    if TURN:
        re, im = _turn(re, im, block * q, block * R1, M, angle, R1 * C, R2)
    target = (g // S).to(tl.int64) * S * n + block * KI * n + m % KI + q * KI
    target = target[None, :] + tl.arange(0, R2)[:, None] * (R1 * KI)
    z = tl.permute(tl.join(re, im), (1, 0, 2))
    tl.store(y + 2 * target[:, :, None] + pair, z * scale, mask=(g < columns)[None, :, None])


@triton.jit(do_not_specialize=["columns", "S", "KI", "LI", "M", "width", "n"])
def _direct(x, y, columns, S, KI, LI, M, angle, scale, width, n, BLOCK: tl.constexpr, C: tl.constexpr, REAL: tl.constexpr,
            TURN: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """The same for any n: BLOCK results of C transforms by one program, as a product with the matrix of roots."""
    g = tl.program_id(0) * C + tl.arange(0, C)
    m = g % S
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = (g // S).to(tl.int64) * LI + m
    pair = tl.arange(0, 2)[None, None, :]
    re, im = tl.zeros((BLOCK, C), tl.float32), tl.zeros((BLOCK, C), tl.float32)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside = (g < columns)[None, :] & (j < n)[:, None] & (m[None, :] + j[:, None] * S < LI)
        z = source[None, :] + j[:, None] * S
        if REAL:
            u = tl.load(x + z, mask=inside, other=0.0)
            v = tl.zeros_like(u)
        else:
            u, v = tl.split(_pairs(x, z, inside, width, REAL))
        # The phase is reduced as an integer, so that cosine and sine see small arguments without error.
        phase = k[:, None].to(tl.int64 if WIDE else tl.int32) * j[None, :] % n
        phase = tl.where(2 * phase > n, phase - n, phase).to(tl.float32) * (6.283185307179586 / n)
        c, s = tl.cos(phase), -tl.sin(phase)
        # Each block has sums of its own: one chain over all n would round a thousand times.
        re += tl.dot(-s, v, tl.dot(c, u, input_precision="ieee"), input_precision="ieee")
        im += tl.dot(s, u, tl.dot(c, v, input_precision="ieee"), input_precision="ieee")
    block = m // KI
    if TURN:
        phase = block[None, :] * k[:, None]
        phase = tl.where(2 * phase > M, phase - M, phase).to(tl.float32) * angle
        c, s = tl.cos(phase), -tl.sin(phase)
        re, im = re * c - im * s, re * s + im * c
    target = ((g // S).to(tl.int64) * S * n + block * KI * n + m % KI)[None, :] + k[:, None] * KI
    inside = (g < columns)[None, :] & (k < n)[:, None]
    tl.store(y + 2 * target[:, :, None] + pair, tl.join(re * scale, im * scale), mask=inside[:, :, None])


def _factors(n, small):
    """n as a product: powers of two from 32 to 1024 for _fast, anything else for _direct, small where that goes.

    A small transform waits for the compiler rather than for memory: its powers of two are all 32, and whether its input is
    real is no constant of its kernels.
    """
    bits = (n & -n).bit_length() - 1
    found, rest = [], n
    if small:
        found = [32] * (bits // 5)
        rest >>= bits // 5 * 5
    elif bits >= 5:
        rest >>= bits
        count = triton.cdiv(bits, 10)
        found = [1 << (bits + i) // count for i in range(count)]
    if rest > 1 or not found:
        odd, p = [1], 2
        while rest > 1:
            p = next((q for q in range(p, math.isqrt(rest) + 1) if rest % q == 0), rest)
            if odd[-1] * p <= 64:
                odd[-1] *= p
            else:
                odd.append(p)
            rest //= p
        found += [f for f in odd if f > 1] or [1]
    return found


def _passes(x, outer, length, n, inner, scale, last):
    """The transform of the middle axis of (outer, length, inner), cut or padded with zeros to n points.

    Stockham: one pass for each factor f of n. With K the product of the factors done, the axis is seen as (n / K, K); a
    pass transforms f numbers at distance S = inner n / f, turns result k of block t by exp(-2 pi i t k / (n / K)) and
    stores it f times closer together, so that the last pass leaves everything in order. inner only multiplies K.
    """
    done, small = 1, outer * n * inner < 1 << 17
    for f in _factors(n, small):
        final = done * f == n
        y = last if final else None
        if y is None:
            y = torch.empty(outer * n * inner, dtype=torch.complex64, device=x.device)
        real, turn = not x.is_complex(), small or not final  # the last pass turns by 1
        S, KI, M = n // f * inner, done * inner, n // done
        columns = outer * S
        parts = (x if real else torch.view_as_real(x), torch.view_as_real(y))
        numbers = (columns, S, KI, length * inner, M, 2 * math.pi / M, scale if final else 1.0, 1 if real else 2)
        kind = None if small else real
        if f >= 32 and f & (f - 1) == 0:
            bits = f.bit_length() - 1
            R1, R2 = 1 << (bits + 1) // 2, 1 << bits // 2
            C = 128 // R2
            _fast[(triton.cdiv(columns, C),)](
                *parts, *numbers, R1=R1, R2=R2, C=C, REAL=kind, TURN=turn, COLS_IN=small or S > 1,
                COLS_OUT=small or KI > 1, num_warps=4,
            )  # fmt: skip
        else:
            BLOCK = 16 if f <= 16 or small else 32
            _direct[(triton.cdiv(columns, 32), triton.cdiv(f, BLOCK))](
                *parts, *numbers, f, BLOCK=BLOCK, C=32, REAL=kind, TURN=turn, WIDE=f > 46340
            )
        x, length, done = y, n, done * f
    return x


def fftn(input, s=None, dim=None, norm=None, *, out=None):
    rank = input.dim()
    if dim is None:
        dim = range(rank) if s is None else range(rank - len(s), rank)
    dim = [d % rank for d in ((dim,) if isinstance(dim, int) else dim)]
    s = [-1] * len(dim) if s is None else [s] if isinstance(s, int) else s
    now = list(input.shape)
    size = {d: now[d] if k == -1 else k for d, k in zip(dim, s)}
    count = math.prod(size.values())
    scale = {"forward": 1 / count, "ortho": 1 / math.sqrt(count)}.get(norm, 1.0)
    x = input.contiguous()
    result = [size.get(d, k) for d, k in enumerate(now)]
    y = torch.empty(result, dtype=torch.complex64, device=x.device) if out is None or not out.is_contiguous() else out
    if y.numel():
        # The last axis first: its rows are the cheapest to cut or to leave real.
        for i, d in enumerate(reversed(dim)):
            outer, inner = math.prod(now[:d]), math.prod(now[d + 1 :])
            final = i == len(dim) - 1
            x = _passes(x, outer, now[d], size[d], inner, scale if final else 1.0, y if final else None)
            now[d] = size[d]
    return y if out is None or y is out else out.copy_(y)
