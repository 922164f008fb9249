"""Loops, branches, pointers and booleans that mix, against plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from ttir_helper import execute, to_ttir

B = 16
X = np.resize(np.arange(64, dtype=np.int32) * 7 % 23 - 5, 256)


@triton.jit
def specialized(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.zeros((B,), tl.int32)
    for k in tl.range(0, 8, warp_specialize=True, num_stages=2):
        a += tl.load(x + k * B + i)
    tl.store(o + i, a)


@triton.jit
def inner(a, b):
    if a > b:
        r = a * 2
    else:
        r = b - 1
    return r


@triton.jit
def nested(x, o, B: tl.constexpr):
    p = tl.program_id(0)
    s = 0
    for a in range(p, p + 4):
        b = 0
        while b < a:
            if (a + b) % 3 == 0:
                s += inner(a, b)
            elif b % 2 == 0:
                s -= 1
            b += 1
    tl.store(o + p, s)


@triton.jit
def block_pointer(x, o, B: tl.constexpr):
    p = tl.make_block_ptr(x, (5,), (1,), (0,), (B,), (0,))
    v = tl.load(p, boundary_check=(0,), padding_option="zero")
    q = tl.make_block_ptr(o, (9,), (1,), (2,), (B,), (0,))
    tl.store(q, v + 1, boundary_check=(0,))


@triton.jit
def pointers(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    p = tl.where(i % 2 == 0, x + i, x + B + i)
    moved = (x.to(tl.int64) + 4).to(tl.pointer_type(tl.int32))
    tl.store(o + i, tl.load(p) * 1000 + tl.load(moved + i))


@triton.jit
def booleans(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    m = v > 0
    every = tl.min(m, 0)
    tl.store(o + i, tl.cumsum(m.to(tl.int32), 0) + 100 * tl.sum(m.to(tl.int32)) + every)
    tl.store(o + B + i, (v.to(tl.int8).to(tl.uint8).to(tl.int32)) + v.to(tl.int1).to(tl.int32))


@triton.jit
def scans(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.reshape(tl.load(x + i), (4, B // 4))
    tl.store(o + i, tl.ravel(tl.cumsum(v, 1, reverse=True) * tl.cumsum(v, 0)))
    tl.store(o + B + tl.arange(0, 8), tl.ravel(tl.topk(v, 2, dim=1)))


@triton.jit
def last_one(x, o, B: tl.constexpr):
    c = tl.atomic_add(o, 1, sem="acq_rel", scope="gpu")
    if c == tl.num_programs(0) - 1:
        tl.store(o + 1, c)


@triton.jit
def scalars(x, o, B: tl.constexpr):
    a = tl.program_id(0)
    s = 0
    if (a >= 0 and tl.num_programs(0) < 5) or a == 3:
        s = 1
    v = s if a == 0 else 7
    tl.store(o + a, v + min(a, 3) + max(a, 2))


def want_nested() -> list[int]:
    out = []
    for p in range(3):
        s = 0
        for a in range(p, p + 4):
            for b in range(a):
                if (a + b) % 3 == 0:
                    s += a * 2 if a > b else b - 1
                elif b % 2 == 0:
                    s -= 1
        out.append(s)
    return out


def want_pointers() -> list[int]:
    return [int(X[i if i % 2 == 0 else B + i]) * 1000 + int(X[i + 1]) for i in range(B)]


def want_booleans() -> list[int]:
    v = X[:B]
    first = np.cumsum(v > 0) + 100 * (v > 0).sum()
    return [*first.tolist(), *(v.astype(np.uint8) + (v != 0).astype(int)).tolist()]


def want_scans() -> list[int]:
    v = X[:B].reshape(4, 4)
    product = v[:, ::-1].cumsum(1)[:, ::-1] * v.cumsum(0)
    return [*product.reshape(-1).tolist(), *np.sort(v, 1)[:, ::-1][:, :2].reshape(-1).tolist()]


CASES = [
    (specialized, X[: 8 * B].reshape(8, B).sum(0).tolist()),
    (nested, want_nested()),
    (block_pointer, [0, 0, *(X[:5] + 1).tolist(), 1, 1, 0]),
    (pointers, want_pointers()),
    (booleans, want_booleans()),
    (scans, want_scans()),
    (last_one, [3, 2]),
    (scalars, [3, 10, 11]),
]


@pytest.mark.parametrize("fn, want", CASES, ids=[f.__name__ for f, _ in CASES])
def test_flow(fn: Any, want: list[int]) -> None:
    o = np.zeros(64, np.int32)
    grid = (3,) if fn in (nested, last_one, scalars) else (1,)
    execute(to_ttir(fn, {"x": "*i32", "o": "*i32"}, {"B": B}), grid, [X.copy(), o])
    assert o[: len(want)].tolist() == want


def test_large_constants_are_bytes() -> None:
    from kbx_env.backends.ttir.frontend.graph import Type
    from kbx_env.backends.ttir.frontend.text import constant

    v = np.arange(128, dtype=np.float32)
    got = constant(f'dense<"0x{v.tobytes().hex().upper()}">', Type("f32", (128,)))
    assert (got == v[None]).all()
