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


@triton.constexpr_function
def _reversed(k, n):
    """k < n with its bits in reverse order."""
    bits = n.bit_length() - 1
    return int(f"{k:0{bits}b}"[::-1], 2) if bits else 0


@triton.jit
def _times(c, d, K: tl.constexpr, N: tl.constexpr):
    """(c + i d) exp(-2 pi i K / N)."""
    if K == 0:
        return c, d
    elif 4 * K == N:
        return d, -c
    else:
        return c * _cosine(K, N) + d * _sine(K, N), d * _cosine(K, N) - c * _sine(K, N)


@triton.jit
def _butterflies(re, im, R: tl.constexpr):
    """DFT over the R entries of two tuples of tensors, R a power of two: everything stays in registers."""
    for level in tl.static_range(_log2(R)):
        re2, im2 = (), ()
        for p in tl.static_range(R):
            if p & (R >> (level + 1)) == 0:
                re2 = re2 + (re[p] + re[p + (R >> (level + 1))],)
                im2 = im2 + (im[p] + im[p + (R >> (level + 1))],)
            else:
                c, d = _times(
                    re[p - (R >> (level + 1))] - re[p], im[p - (R >> (level + 1))] - im[p],
                    p % (R >> (level + 1)), R >> level,
                )  # fmt: skip
                re2, im2 = re2 + (c,), im2 + (d,)
        re, im = re2, im2
    re2, im2 = (), ()
    for k in tl.static_range(R):
        re2, im2 = re2 + (re[_reversed(k, R)],), im2 + (im[_reversed(k, R)],)
    return re2, im2


@triton.jit
def _turn(re, im, first, step, M, angle, R: tl.constexpr):
    """Multiply entry k by exp(-2 pi i (first + k step) / M); angle = 2 pi / M.

    Sine and cosine only of first and of the powers of two, whose integer phases are exact, and products of them.
    """
    wr, wi = (), ()
    re2, im2 = (), ()
    for k in tl.static_range(R):
        if k & (k - 1) == 0:
            phase = first if k == 0 else step * k
            turn = tl.where(2 * phase > M, phase - M, phase).to(tl.float32) * angle
            c, s = tl.cos(turn), -tl.sin(turn)
            if k == 0:
                wr, wi = wr + (c,), wi + (s,)
                anchors_r, anchors_i = (c,), (s,)
            else:
                anchors_r, anchors_i = anchors_r + (c,), anchors_i + (s,)
                wr, wi = wr + (c * wr[0] - s * wi[0],), wi + (c * wi[0] + s * wr[0],)
        else:
            c, s = anchors_r[_log2(k & -k) + 1], anchors_i[_log2(k & -k) + 1]
            u, v = wr[k & (k - 1)], wi[k & (k - 1)]
            wr, wi = wr + (c * u - s * v,), wi + (c * v + s * u,)
        re2, im2 = re2 + (re[k] * wr[k] - im[k] * wi[k],), im2 + (re[k] * wi[k] + im[k] * wr[k],)
    return re2, im2


@triton.jit
def _gathered(x, E: tl.constexpr, R: tl.constexpr):
    """R tensors over E as one over (E, R): a renaming of registers."""
    for level in tl.static_range(_log2(R)):
        y = ()
        for i in tl.static_range(R >> (level + 1)):
            y = y + (tl.join(x[i], x[i + (R >> (level + 1))]),)
        x = y
    return tl.reshape(x[0], (E, R))


@triton.jit
def _spread(z, E: tl.constexpr, R: tl.constexpr):
    """The reverse: a tensor over (E, R) as R tensors."""
    x = (z,)
    for level in tl.static_range(_log2(R)):
        y, late = (), ()
        for i in tl.static_range(1 << level):
            a, b = tl.split(tl.reshape(x[i], (E, R >> (level + 1), 2)))
            y, late = y + (a,), late + (b,)
        x = y + late
    y = ()
    for k in tl.static_range(R):
        y = y + (tl.reshape(x[k], (E,)),)
    return y


@triton.jit
def _exchange(x, A: tl.constexpr, B: tl.constexpr, R: tl.constexpr, R2: tl.constexpr, FLIP: tl.constexpr):
    """R tensors over (A, R2, B) to R2 tensors over (A, R, B), with FLIP over (B, A, R): entries and lanes swap.

    The one step that moves data between threads.
    """
    z = tl.reshape(_gathered(x, A * R2 * B, R), (A, R2, B, R))
    if FLIP:
        z = tl.permute(z, (2, 0, 3, 1))
    else:
        z = tl.permute(z, (0, 3, 2, 1))
    return _spread(tl.reshape(z, (A * R * B, R2)), A * R * B, R2)


@triton.jit
def _fast(x, y, columns, S, KI, LI, M, angle, scale, R1: tl.constexpr, R2: tl.constexpr, C: tl.constexpr,
          REAL: tl.constexpr, TURN: tl.constexpr, COLS_IN: tl.constexpr, COLS_OUT: tl.constexpr):  # fmt: skip
    """C transforms of n = R1 R2 points by one program, each thread with R1 or R2 of them; see _passes."""
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
        z = tl.load(x + 2 * source[:, :, None] + pair, mask=inside[:, :, None], other=0.0)
        re, im = tl.split(tl.permute(z, (1, 0, 2)))
    re, im = _butterflies(_spread(re, R2 * C, R1), _spread(im, R2 * C, R1), R1)
    re, im = _turn(re, im, t * 0, t, n, 6.283185307179586 / n, R1)
    FLIP: tl.constexpr = COLS_IN and not COLS_OUT
    re, im = _butterflies(_exchange(re, A, B, R1, R2, FLIP), _exchange(im, A, B, R1, R2, FLIP), R2)
    e = tl.arange(0, R1 * C)
    q = e // C if COLS_OUT else e % R1
    g = tl.program_id(0) * C + (e % C if COLS_OUT else e // R1)
    m = g % S
    block = m // KI
    if TURN:
        re, im = _turn(re, im, block * q, block * R1, M, angle, R2)
    target = (g // S).to(tl.int64) * S * n + block * KI * n + m % KI + q * KI
    target = target[None, :] + tl.arange(0, R2)[:, None] * (R1 * KI)
    z = tl.permute(tl.join(_gathered(re, R1 * C, R2), _gathered(im, R1 * C, R2)), (1, 0, 2))
    tl.store(y + 2 * target[:, :, None] + pair, z * scale, mask=(g < columns)[None, :, None])


@triton.jit
def _direct(x, y, columns, S, KI, LI, M, angle, scale, n, BLOCK: tl.constexpr, C: tl.constexpr, REAL: tl.constexpr,
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
            u, v = tl.split(tl.load(x + 2 * z[:, :, None] + pair, mask=inside[:, :, None], other=0.0))
        # The phase is reduced as an integer, so that cosine and sine see small arguments without error.
        phase = k[:, None].to(tl.int64 if WIDE else tl.int32) * j[None, :] % n
        phase = tl.where(2 * phase > n, phase - n, phase).to(tl.float32) * (6.283185307179586 / n)
        c, s = tl.cos(phase), -tl.sin(phase)
        re = tl.dot(c, u, re, input_precision="ieee")
        re = tl.dot(-s, v, re, input_precision="ieee")
        im = tl.dot(c, v, im, input_precision="ieee")
        im = tl.dot(s, u, im, input_precision="ieee")
    block = m // KI
    if TURN:
        phase = block[None, :] * k[:, None]
        phase = tl.where(2 * phase > M, phase - M, phase).to(tl.float32) * angle
        c, s = tl.cos(phase), -tl.sin(phase)
        re, im = re * c - im * s, re * s + im * c
    target = ((g // S).to(tl.int64) * S * n + block * KI * n + m % KI)[None, :] + k[:, None] * KI
    inside = (g < columns)[None, :] & (k < n)[:, None]
    tl.store(y + 2 * target[:, :, None] + pair, tl.join(re * scale, im * scale), mask=inside[:, :, None])


def _factors(n):
    """n as a product: powers of two from 32 to 1024 for _fast, anything else for _direct, small where that goes."""
    bits = (n & -n).bit_length() - 1
    found, rest = [], n
    if bits >= 5:
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
    done = 1
    for f in _factors(n):
        final = done * f == n
        y = last if final else None
        if y is None:
            y = torch.empty(outer * n * inner, dtype=torch.complex64, device=x.device)
        real, turn = not x.is_complex(), not final
        S, KI, M = n // f * inner, done * inner, n // done
        columns = outer * S
        parts = (x if real else torch.view_as_real(x), torch.view_as_real(y))
        numbers = (columns, S, KI, length * inner, M, 2 * math.pi / M, scale if final else 1.0)
        if f >= 32 and f & (f - 1) == 0:
            bits = f.bit_length() - 1
            R1, R2 = 1 << (bits + 1) // 2, 1 << bits // 2
            C = 128 // R2
            _fast[(triton.cdiv(columns, C),)](
                *parts, *numbers, R1=R1, R2=R2, C=C, REAL=real, TURN=turn, COLS_IN=S > 1, COLS_OUT=KI > 1, num_warps=4
            )
        else:
            BLOCK = 16 if f <= 16 else 32
            _direct[(triton.cdiv(columns, 32), triton.cdiv(f, BLOCK))](
                *parts, *numbers, f, BLOCK=BLOCK, C=32, REAL=real, TURN=turn, WIDE=f > 46340
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
