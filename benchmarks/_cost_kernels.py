"""Short kernels with their knobs as arguments, for the points that the cost model is fitted to."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _add(x, y, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    tl.store(o + i, tl.load(x + i, mask=m) + tl.load(y + i, mask=m), mask=m)


@triton.jit
def _chain(x, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n)
    for _ in tl.static_range(8):
        v = tl.exp(-v * v) + tl.sin(v) * 0.5
    tl.store(o + i, v, mask=i < n)


@triton.jit
def _gelu(x, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n).to(tl.float32)
    tl.store(o + i, (0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))).to(tl.float16), mask=i < n)


@triton.jit
def _adamw(p, g, m, v, o, n, lr, decay, eps, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    k = i < n
    a = tl.load(p + i, mask=k)
    d = tl.load(g + i, mask=k)
    first = tl.load(m + i, mask=k) * 0.9 + d * 0.1
    second = tl.load(v + i, mask=k) * 0.999 + d * d * 0.001
    tl.store(m + i, first, mask=k)
    tl.store(v + i, second, mask=k)
    tl.store(o + i, a * (1.0 - lr * decay) - lr * first / (tl.sqrt(second) + eps), mask=k)


@triton.jit
def _rand(y, n, seed, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.rand(seed, i), mask=i < n)


@triton.jit
def _softmax(x, o, n, B: tl.constexpr):
    r = tl.program_id(0)
    i = tl.arange(0, B)
    v = tl.load(x + r * n + i, mask=i < n, other=float("-inf"))
    e = tl.exp(v - tl.max(v, 0))
    tl.store(o + r * n + i, e / tl.sum(e, 0), mask=i < n)


@triton.jit
def _layer_norm(x, w, b, o, n, B: tl.constexpr):
    r = tl.program_id(0)
    total = tl.zeros((B,), tl.float32)
    square = tl.zeros((B,), tl.float32)
    for s in range(0, n, B):
        i = s + tl.arange(0, B)
        v = tl.load(x + r * n + i, mask=i < n, other=0.0)
        total += v
        square += v * v
    mean = tl.sum(total, 0) / n
    scale = tl.rsqrt(tl.sum(square, 0) / n - mean * mean + 1e-5)
    for s in range(0, n, B):
        i = s + tl.arange(0, B)
        v = tl.load(x + r * n + i, mask=i < n, other=0.0)
        tl.store(
            o + r * n + i, (v - mean) * scale * tl.load(w + i, mask=i < n) + tl.load(b + i, mask=i < n), mask=i < n
        )


@triton.jit
def _bn_stats(x, mean, scale, images, C, S, B: tl.constexpr):
    c = tl.program_id(0)
    total = tl.zeros((B,), tl.float32)
    square = tl.zeros((B,), tl.float32)
    for e0 in range(0, images * S, B):
        e = e0 + tl.arange(0, B)
        v = tl.load(x + (e // S) * (C * S) + c * S + e % S, mask=e < images * S, other=0.0)
        total += v
        square += v * v
    count = images * S
    mu = tl.sum(total, 0) / count
    tl.store(mean + c, mu)
    tl.store(scale + c, tl.rsqrt(tl.sum(square, 0) / count - mu * mu + 1e-5))


@triton.jit
def _bn_apply(x, mean, scale, o, n, C, S, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    c = i // S % C
    m = i < n
    v = tl.load(x + i, mask=m)
    tl.store(o + i, (v - tl.load(mean + c, mask=m)) * tl.load(scale + c, mask=m), mask=m)


@triton.jit
def _loss_rows(x, target, loss, rows, C, BS: tl.constexpr, BC: tl.constexpr):
    e = tl.program_id(0) * BS + tl.arange(0, BS)
    top = tl.full((BS,), -1e30, tl.float32)
    total = tl.zeros((BS,), tl.float32)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        inside = (e < rows)[:, None] & (c < C)[None, :]
        v = tl.load(x + e[:, None] * C + c[None, :], mask=inside, other=-1e30)
        new = tl.maximum(top, tl.max(v, 1))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(v - new[:, None]), 1)
        top = new
    t = tl.load(target + e, mask=e < rows, other=0)
    tl.store(loss + e, top + tl.log(total) - tl.load(x + e * C + t, mask=e < rows, other=0.0), mask=e < rows)


@triton.jit
def _sum_one(x, out, n, B: tl.constexpr):
    total = tl.zeros((B,), tl.float32)
    for e0 in range(0, n, B):
        e = e0 + tl.arange(0, B)
        total += tl.load(x + e, mask=e < n, other=0.0)
    tl.store(out, tl.sum(total, 0))


@triton.jit
def _sum_atomic(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(out, tl.sum(tl.load(x + i, mask=i < n, other=0.0), 0))


@triton.jit
def _sum_blocks(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + i, mask=i < n, other=0.0), 0))


@triton.jit
def _sum_columns(x, out, rows, cols, BR: tl.constexpr, BC: tl.constexpr):
    j = tl.program_id(0) * BC + tl.arange(0, BC)
    total = tl.zeros((BR, BC), tl.float32)
    for r0 in range(0, rows, BR):
        r = r0 + tl.arange(0, BR)
        total += tl.load(x + r[:, None] * cols + j[None, :], mask=(r < rows)[:, None] & (j < cols)[None, :], other=0.0)
    tl.store(out + j, tl.sum(total, 0), mask=j < cols)


@triton.jit
def _argmax(x, out, n, B: tl.constexpr):
    r = tl.program_id(0)
    best = tl.full((B,), -1e30, tl.float32)
    where = tl.zeros((B,), tl.int32)
    for s in range(0, n, B):
        i = s + tl.arange(0, B)
        v = tl.load(x + r * n + i, mask=i < n, other=-1e30)
        where = tl.where(v > best, i, where)
        best = tl.maximum(v, best)
    top = tl.max(best, 0)
    tl.store(out + r, tl.min(tl.where(best == top, where, n), 0))


@triton.jit
def _pool(x, o, n, WO, H, W, K, B: tl.constexpr):
    """Average K by K windows of square images."""
    e = tl.program_id(0) * B + tl.arange(0, B)
    j, i, image = e % WO, e // WO % WO, e // (WO * WO)
    total = tl.zeros((B,), tl.float32)
    for r in range(K):
        for s in range(K):
            total += tl.load(x + (image * H + i * K + r) * W + j * K + s, mask=e < n, other=0.0)
    tl.store(o + e, total / (K * K), mask=e < n)


@triton.jit
def _grid_sample(x, grid, o, pixels, C, H, W, B: tl.constexpr):
    e = tl.program_id(0) * B + tl.arange(0, B)
    ok = e < pixels
    px = (tl.load(grid + e * 2, mask=ok, other=0.0) + 1.0) * 0.5 * (W - 1)
    py = (tl.load(grid + e * 2 + 1, mask=ok, other=0.0) + 1.0) * 0.5 * (H - 1)
    fx, fy = tl.floor(px), tl.floor(py)
    ix, iy = fx.to(tl.int32), fy.to(tl.int32)
    for c in range(C):
        total = tl.zeros((B,), tl.float32)
        for k in tl.static_range(4):
            cx, cy = ix + k % 2, iy + k // 2
            inside = ok & (cx >= 0) & (cx < W) & (cy >= 0) & (cy < H)
            v = tl.load(x + (c * H + cy) * W + cx, mask=inside, other=0.0)
            total += v * (px - fx if k % 2 else 1.0 - px + fx) * (py - fy if k // 2 else 1.0 - py + fy)
        tl.store(o + c * pixels + e, total, mask=ok)


@triton.jit
def _gather(x, index, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    at = tl.load(index + i, mask=i < n, other=0)
    tl.store(o + i, tl.load(x + at, mask=i < n), mask=i < n)


@triton.jit
def _embed(x, index, o, n, D, BR: tl.constexpr, BD: tl.constexpr):
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    at = tl.load(index + r, mask=r < n, other=0)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        m = (r < n)[:, None] & (d < D)[None, :]
        tl.store(o + r[:, None] * D + d[None, :], tl.load(x + at[:, None] * D + d[None, :], mask=m), mask=m)


@triton.jit
def _histogram(index, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(o + tl.load(index + i, mask=i < n, other=0), 1, mask=i < n)


@triton.jit
def _count(flags, counts, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(counts + tl.program_id(0), tl.sum(tl.load(flags + i, mask=i < n, other=0).to(tl.int32), 0))


@triton.jit
def _scan(counts, starts, blocks, B: tl.constexpr):
    before = tl.zeros((), tl.int32)
    for b0 in range(0, blocks, B):
        b = b0 + tl.arange(0, B)
        c = tl.load(counts + b, mask=b < blocks, other=0)
        tl.store(starts + b, before + tl.cumsum(c, 0) - c, mask=b < blocks)
        before += tl.sum(c, 0)


@triton.jit
def _compact(x, flags, starts, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    on = tl.load(flags + i, mask=i < n, other=0).to(tl.int32)
    place = tl.load(starts + tl.program_id(0)) + tl.cumsum(on, 0) - 1
    tl.store(o + place, tl.load(x + i, mask=on != 0), mask=on != 0)


@triton.jit
def _transpose_rows(x, o, rows, cols, B: tl.constexpr):
    """Copy pieces of a row to a column: every stored element lies in its own sector."""
    r = tl.program_id(0)
    j = tl.program_id(1) * B + tl.arange(0, B)
    tl.store(o + j * rows + r, tl.load(x + r * cols + j, mask=j < cols), mask=j < cols)


@triton.jit
def _transpose_tiles(x, o, rows, cols, BR: tl.constexpr, BC: tl.constexpr):
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    j = tl.program_id(1) * BC + tl.arange(0, BC)
    m = (r < rows)[:, None] & (j < cols)[None, :]
    v = tl.load(x + r[:, None] * cols + j[None, :], mask=m)
    tl.store(o + j[:, None] * rows + r[None, :], tl.trans(v), mask=tl.trans(m))


@triton.jit
def _matmul(a, b, c, M, N, K, KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Multiply batches of matrices; KIND is "i8", an input precision, or "" for 16-bit inputs."""
    z = tl.program_id(2)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.int32 if KIND == "i8" else tl.float32)
    for s in range(0, K, BK):
        x = tl.load(a + z * M * K + i[:, None] * K + (s + k)[None, :], mask=(i < M)[:, None] & (s + k < K)[None, :])
        y = tl.load(b + z * K * N + (s + k)[:, None] * N + j[None, :], mask=(s + k < K)[:, None] & (j < N)[None, :])
        if KIND == "i8":
            acc = tl.dot(x, y, acc, out_dtype=tl.int32)
        elif KIND == "":
            acc = tl.dot(x, y, acc)
        else:
            acc = tl.dot(x, y, acc, input_precision=KIND)
    m = (i < M)[:, None] & (j < N)[None, :]
    tl.store(c + z * M * N + i[:, None] * N + j[None, :], acc.to(c.dtype.element_ty), mask=m)


@triton.jit
def _conv(x, w, y, pixels, C, H, W, O, R, K, KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Convolve by an implicit matrix product: odd R, stride 1, same size."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    j, i, image = m % W, m // W % H, m // (W * H)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        row = i[:, None] + (k // R % R)[None, :] - R // 2
        col = j[:, None] + (k % R)[None, :] - R // 2
        inside = (row >= 0) & (row < H) & (col >= 0) & (col < W) & (m < pixels)[:, None] & (k < K)[None, :]
        c = k // (R * R)
        a = tl.load(x + ((image[:, None] * C + c[None, :]) * H + row) * W + col, mask=inside, other=0.0)
        f = tl.load(w + o[None, :] * K + k[:, None], mask=(o < O)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(a, f, acc, input_precision=KIND)
    to = (image[:, None] * O + o[None, :]) * (H * W) + (m % (H * W))[:, None]
    tl.store(y + to, acc, mask=(m < pixels)[:, None] & (o < O)[None, :])


@triton.jit
def _attention(q, k, v, o, n, scale, B: tl.constexpr, BK: tl.constexpr, D: tl.constexpr):
    base = tl.program_id(1) * n * D
    i = tl.program_id(0) * B + tl.arange(0, B)
    d = tl.arange(0, D)
    x = tl.load(q + base + i[:, None] * D + d[None, :])
    top = tl.full((B,), -1e30, tl.float32)
    norm = tl.zeros((B,), tl.float32)
    acc = tl.zeros((B, D), tl.float32)
    for s in range(0, n, BK):
        j = s + tl.arange(0, BK)
        w = tl.dot(x, tl.load(k + base + j[None, :] * D + d[:, None])) * scale
        new = tl.maximum(top, tl.max(w, 1))
        p = tl.exp(w - new[:, None])
        keep = tl.exp(top - new)
        norm = norm * keep + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.float16), tl.load(v + base + j[:, None] * D + d[None, :]), acc * keep[:, None])
        top = new
    tl.store(o + base + i[:, None] * D + d[None, :], (acc / norm[:, None]).to(tl.float16))


@triton.jit
def _power(a, o, steps, D: tl.constexpr):
    """Iterate v = A v / |v| for one small matrix per program: a long chain of dependent steps."""
    i = tl.arange(0, D)
    base = tl.program_id(0) * D
    x = tl.load(a + (base + i[:, None]) * D + i[None, :])
    v = tl.full((D,), 1.0, tl.float32)
    for _ in range(steps):
        v = tl.sum(x * v[None, :], 1)
        v = v * tl.rsqrt(tl.sum(v * v, 0) + 1e-9)
    tl.store(o + base + i, v)
