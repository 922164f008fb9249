"""Every shape, scan, sort, reduction and atomic operation of the language against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from ttir_helper import execute, to_ttir

from kbx_env.backends.ttir import DeviceAssert, Unsupported

B = 16
NAMES = {"float32": "fp32", "int32": "i32", "int64": "i64", "float16": "fp16", "int8": "i8", "float64": "fp64",
         "uint32": "u32", "uint64": "u64", "int16": "i16", "uint8": "u8"}  # fmt: skip


def run(fn: Any, arrays: list[np.ndarray], grid: tuple[int, ...] = (1,), **kw: Any) -> None:
    names = [n for n in fn.arg_names if n not in kw]
    sig = {n: "*" + NAMES[a.dtype.name] for n, a in zip(names, arrays, strict=True)}
    execute(to_ttir(fn, sig, kw), grid, list(arrays))


@triton.jit
def k_flip(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + i, tl.flip(tl.load(x + i), 0))


@triton.jit
def k_cumprod(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + i, tl.cumprod(tl.load(x + i), 0))


@triton.jit
def k_xor(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(o + i, v ^ tl.xor_sum(v, 0))


@triton.jit
def k_or(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(o + i, v ^ tl.reduce_or(v, 0))


@triton.jit
def k_argmax(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i) & 3
    tl.store(o + i, tl.argmax(v, 0) + 100 * tl.argmin(v, 0) + i * 0)


@triton.jit
def k_argright(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i) & 3
    m, at = tl.max(v, 0, return_indices=True)
    n, to = tl.min(v, 0, return_indices=True)
    tl.store(o + i, m + 10 * at + 1000 * n + 10000 * to + i * 0)


@triton.jit
def k_sort2d(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.reshape(tl.load(x + i), (2, B // 2))
    tl.store(o + i, tl.ravel(tl.sort(v, dim=1, descending=True)))


@triton.jit
def k_topk(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    t = tl.topk(tl.load(x + i), 4)
    tl.store(o + tl.arange(0, 4), t)


@triton.jit
def k_interleave(x, o, B: tl.constexpr):
    i = tl.arange(0, B // 2)
    tl.store(o + tl.arange(0, B), tl.interleave(tl.load(x + i), tl.load(x + B // 2 + i)))


@triton.jit
def k_cat(x, o, B: tl.constexpr):
    i = tl.arange(0, B // 2)
    v = tl.cat(tl.load(x + i), tl.load(x + B // 2 + i), can_reorder=True)
    tl.store(o + tl.arange(0, B), v)


@triton.jit
def k_permute(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.reshape(tl.load(x + i), (2, 4, B // 8))
    tl.store(o + i, tl.reshape(tl.permute(v, (2, 0, 1)), (B,)))


@triton.jit
def k_view(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.view(tl.load(x + i), (4, B // 4))
    w = tl.expand_dims(v, 1).broadcast_to((4, 2, B // 4))
    a, b = tl.split(tl.permute(w, (0, 2, 1)))
    tl.store(o + i, tl.ravel(a + b).to(o.dtype.element_ty))


@triton.jit
def k_gather2d(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.reshape(tl.load(x + i), (4, B // 4))
    idx = tl.reshape((i * 5 + 3) % 4, (4, B // 4))
    tl.store(o + i, tl.reshape(tl.gather(v, idx, 0), (B,)))


@triton.jit
def k_squeeze(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.squeeze(tl.unsqueeze(tl.load(x + i), 0), 0)
    tl.store(o + i, tl.where(v > 0, v, -v * 2))


@triton.jit
def k_swizzle(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.swizzle2d(i // 4, i % 4, B // 4, 4, 2)
    tl.store(o + i, tl.load(x + a * 4 + b))


@triton.jit
def k_hints(x, o, B: tl.constexpr):
    i = tl.max_contiguous(tl.multiple_of(tl.arange(0, B), 8), B)
    tl.assume(tl.program_id(0) >= 0)
    tl.static_assert(B > 1)
    tl.debug_barrier()
    tl.device_print("value", i)
    tl.store(o + i, tl.load(x + i, eviction_policy="evict_last", cache_modifier=".cg"), cache_modifier=".wb")


@triton.jit
def k_ranges(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    acc = tl.load(x + i)
    for k in tl.range(0, 5, 2, num_stages=3):
        acc += k
    for j in tl.range(4, 0, -1, disallow_acc_multi_buffer=True):
        for k in tl.range(0, j, flatten=True, loop_unroll_factor=2):
            acc += j * k
    for k in tl.static_range(3):
        acc = acc * 2 + k
    while tl.max(acc, 0) > 100:
        acc = acc // 3
    tl.store(o + i, acc)


@triton.jit
def k_histogram(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i) & 15
    tl.store(o + i, tl.histogram(v, B, mask=i < B - 3))


def want_argmax(x: np.ndarray) -> np.ndarray:
    v = x & 3
    return np.full(B, v.argmax() + 100 * v.argmin())


def want_argright(x: np.ndarray) -> np.ndarray:
    v = x & 3
    return np.full(B, v.max() + 10 * v.argmax() + 1000 * v.min() + 10000 * v.argmin())


def want_ranges(x: np.ndarray) -> np.ndarray:
    acc = x + 6 + sum(j * k for j in range(4, 0, -1) for k in range(j))
    for k in range(3):
        acc = acc * 2 + k
    while acc.max() > 100:
        acc = np.fix(acc / 3).astype(acc.dtype)
    return acc


def want_swizzle(x: np.ndarray) -> np.ndarray:
    # Column-major order inside groups of two rows.
    i = np.arange(B)
    inside = i % 8
    return x[(i // 8 * 2 + inside % 2) * 4 + inside // 2]


SHAPES = [
    (k_flip, lambda x: x[::-1]),
    (k_cumprod, lambda x: np.cumprod(x, dtype=x.dtype)),
    (k_xor, lambda x: x ^ np.bitwise_xor.reduce(x)),
    (k_or, lambda x: x ^ np.bitwise_or.reduce(x)),
    (k_argmax, want_argmax),
    (k_argright, want_argright),
    (k_sort2d, lambda x: np.sort(x.reshape(2, -1), 1)[:, ::-1].reshape(-1)),
    (k_topk, lambda x: np.r_[np.sort(x)[::-1][:4], np.zeros(B - 4, x.dtype)]),
    (k_interleave, lambda x: np.stack([x[: B // 2], x[B // 2 :]], 1).reshape(-1)),
    (k_cat, lambda x: x),
    (k_permute, lambda x: x.reshape(2, 4, 2).transpose(2, 0, 1).reshape(-1)),
    (k_view, lambda x: 2 * x),
    (
        k_gather2d,
        lambda x: np.take_along_axis(x.reshape(4, -1), ((np.arange(B) * 5 + 3) % 4).reshape(4, -1), 0).ravel(),
    ),
    (k_squeeze, lambda x: np.where(x > 0, x, -x * 2)),
    (k_swizzle, want_swizzle),
    (k_hints, lambda x: x),
    (k_ranges, want_ranges),
    (k_histogram, lambda x: np.bincount((x & 15)[: B - 3], minlength=B)),
]


@pytest.mark.parametrize("fn, want", SHAPES, ids=[f.__name__ for f, _ in SHAPES])
def test_integer_operations(fn: Any, want: Any) -> None:
    x = np.random.default_rng(3).integers(-40, 40, B).astype(np.int32)
    o = np.zeros(B, np.int32)
    run(fn, [x, o], B=B)
    assert o.tolist() == want(x).tolist()


@triton.jit
def first_max(v1, i1, v2, i2):
    take = (v1 > v2) | ((v1 == v2) & (i1 > i2))
    return tl.where(take, v1, v2), tl.where(take, i1, i2)


@triton.jit
def absolute_sum(a, b):
    return tl.abs(a) + tl.abs(b)


@triton.jit
def k_combine(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    a, b = tl.reduce((v & 3, i), 0, first_max)
    c, d = tl.associative_scan((v & 3, i), 0, first_max, reverse=True)
    s = tl.reduce(tl.reshape(v, (4, B // 4)), 1, absolute_sum, keep_dims=True)
    tl.store(o + i, c * 100 + d)
    tl.store(o + B, a * 100 + b)
    tl.store(o + B + 1 + tl.arange(0, 4)[:, None], s)


def test_custom_combinations() -> None:
    x = np.random.default_rng(4).integers(-40, 40, B).astype(np.int32)
    o = np.zeros(B + 5, np.int32)
    run(k_combine, [x, o], B=B)
    v = x & 3
    for i in range(B):
        last = max(range(i, B), key=lambda j: (v[j], j))
        assert o[i] == v[last] * 100 + last
    assert o[B] == o[0]
    assert o[B + 1 :].tolist() == np.abs(x).reshape(4, -1).sum(1).tolist()


@triton.jit
def two(a, b):
    return a + b, a * b


@triton.jit
def larger(a, b):
    if a > b:
        return a
    return b - a


@triton.jit
def k_map(x, y, o, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    s, p = tl.map_elementwise(two, a, b)
    tl.store(o + i, s)
    tl.store(o + B + i, p)
    tl.store(o + 2 * B + i, tl.map_elementwise(larger, a, b))


def test_map_elementwise() -> None:
    x, y = np.random.default_rng(5).integers(-40, 40, (2, B)).astype(np.int32)
    o = np.zeros((3, B), np.int32)
    run(k_map, [x, y, o], B=B)
    assert (o == np.stack([x + y, x * y, np.where(x > y, x, y - x)])).all()


@triton.jit
def crossed(a0, a1, b0, b1):
    return a0 + b1, a1 - b0


@triton.jit
def k_packed(x, y, o, B: tl.constexpr):
    i = tl.arange(0, B)
    r = tl.map_elementwise(crossed, tl.load(x + i), tl.load(y + i), pack=2)
    tl.store(o + i, r[0])


def test_packed_map_elementwise() -> None:
    x, y = np.random.default_rng(5).integers(-40, 40, (2, B)).astype(np.int32)
    o = np.zeros(B, np.int32)
    run(k_packed, [x, y, o], B=B)
    assert o[0::2].tolist() == (x[0::2] + y[1::2]).tolist()
    assert o[1::2].tolist() == (x[1::2] - y[0::2]).tolist()


@triton.jit
def k_atomics(x, o, old, KIND: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i)
    p = o + i % 3
    if KIND == "add":
        r = tl.atomic_add(p, v, mask=i != 5)
    elif KIND == "max":
        r = tl.atomic_max(p, v, mask=i != 5)
    elif KIND == "min":
        r = tl.atomic_min(p, v, mask=i != 5)
    elif KIND == "and":
        r = tl.atomic_and(p, v, mask=i != 5)
    elif KIND == "or":
        r = tl.atomic_or(p, v, mask=i != 5)
    elif KIND == "xor":
        r = tl.atomic_xor(p, v, mask=i != 5)
    elif KIND == "xchg":
        r = tl.atomic_xchg(p, v, mask=i != 5)
    else:
        r = tl.atomic_cas(p, v * 0, v)
    tl.store(old + i, r, mask=i != 5)


APPLY: dict[str, Any] = {
    "add": lambda a, b: a + b, "max": max, "min": min, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b, "xchg": lambda a, b: b, "cas": lambda a, b: b if a == 0 else a,
}  # fmt: skip
INTEGERS = ["int32", "int64", "uint32", "uint64"]
ATOMICS = [(k, d) for k in APPLY for d in INTEGERS]
ATOMICS += [(k, d) for k in ("add", "max", "min", "xchg") for d in ("float32", "float64")] + [("add", "float16")]


@pytest.mark.parametrize("kind, dtype", ATOMICS)
def test_atomics(kind: str, dtype: str) -> None:
    rng = np.random.default_rng(6)
    n = 2 * B
    x = rng.integers(0 if dtype[0] == "u" else -50, 50, n).astype(dtype)
    if dtype[0] == "u":
        x[3] = np.iinfo(dtype).max - 1
    o, old = np.zeros(3, dtype), np.zeros(n, dtype)
    run(k_atomics, [x, o, old], (2,), KIND=kind, B=B)
    want = np.zeros(3, dtype)
    with np.errstate(over="ignore"):
        for i in range(n):
            if i == 5 and kind != "cas":
                continue
            # Float minima and maxima are two integer operations: lanes of one sign go first.
            free = i == 5 or (dtype[0] == "f" and kind in ("max", "min"))
            assert free or old[i] == want[i % 3]
            want[i % 3] = APPLY[kind](want[i % 3], x[i])
    assert o.tolist() == want.tolist()


@triton.jit
def k_asm(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.load(x + i)], tl.int32, True, 1)
    tl.store(o + i, v)


def test_inline_assembly_is_named() -> None:
    with pytest.raises(Unsupported, match="inline_asm"):
        run(k_asm, [np.zeros(B, np.int32), np.zeros(B, np.int32)], B=B)


@triton.jit
def k_assert(x, B: tl.constexpr):
    v = tl.load(x + tl.arange(0, B))
    tl.device_assert(v < 3, "large", mask=tl.arange(0, B) != 4)


def test_masked_assert() -> None:
    x = np.zeros(B, np.int32)
    x[4] = 9
    text = to_ttir(k_assert, {"x": "*i32"}, {"B": B}, debug=True)
    execute(text, (1,), [x])
    x[6] = 9
    with pytest.raises(DeviceAssert, match="large"):
        execute(text, (1,), [x])


@triton.jit
def k_gather_outside(x, o, MEND: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    at = i + 3
    v = tl.gather(tl.load(x + i), at, 0)
    if MEND:
        v = tl.where(at < B, v, -1)
    tl.store(o + i, v)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int8"])
def test_an_index_outside_finds_no_number_of_the_source(dtype: str) -> None:
    """On a GPU it finds whatever lies there: a kernel that uses it must not look right."""
    x, o = np.arange(1, B + 1).astype(dtype), np.zeros(B, dtype)
    run(k_gather_outside, [x, o], MEND=0, B=B)
    assert o[:-3].tolist() == x[3:].tolist() and not set(o[-3:].tolist()) & set(x.tolist())
    run(k_gather_outside, [x, o], MEND=1, B=B)
    assert o.tolist() == [*x[3:].tolist(), -1, -1, -1], "what is replaced afterwards does no harm"
