"""Programs that communicate by atomic operations are not called racy; those that forget one are."""

from __future__ import annotations

import numpy as np
import pytest
import triton
import triton.language as tl
from test_ttir_sanitizer import CLASH, ORDER, RAW, F, I, Row, check, ones, two, zeros


@triton.jit
def k_last_block(x, part, count, o, MODE: tl.constexpr, B: tl.constexpr):
    p, n = tl.program_id(0), tl.num_programs(0)
    i = p * B + tl.arange(0, B)
    tl.store(part + p, tl.sum(tl.load(x + i), 0))
    if MODE == 0:
        done = tl.atomic_add(count, 1)
        if done == n - 1:
            total = 0.0
            for k in range(n):
                total += tl.load(part + k)
            tl.store(o, total)
            tl.store(count, 0)  # for the next launch
    elif p == n - 1:
        total = 0.0
        for k in range(n):
            total += tl.load(part + k)
        tl.store(o, total)


@triton.jit
def k_lock(x, o, lock, MODE: tl.constexpr, B: tl.constexpr):
    p = tl.program_id(0)
    v = tl.sum(tl.load(x + p * B + tl.arange(0, B)), 0)
    if MODE == 0:
        while tl.atomic_cas(lock, 0, 1) == 1:
            pass
    tl.store(o, tl.load(o) + v)
    if MODE == 0:
        tl.atomic_xchg(lock, 0)


@triton.jit
def k_semaphore(x, o, turn, MODE: tl.constexpr, B: tl.constexpr):
    p = tl.program_id(0)
    i = tl.arange(0, B)
    v = tl.load(x + p * B + i)
    while tl.atomic_cas(turn, p, p) != p:
        pass
    if p > 0:
        v += tl.load(o + i)
    tl.store(o + i, v)
    if MODE == 0:
        tl.atomic_xchg(turn, p + 1)
    else:
        tl.store(turn, p + 1)


@triton.jit
def k_look_back(x, sums, flags, o, B: tl.constexpr):
    p = tl.program_id(0)
    v = tl.sum(tl.load(x + p * B + tl.arange(0, B)), 0)
    if p > 0:
        while tl.load(flags + p - 1, volatile=True) == 0:
            pass
        v += tl.load(sums + p - 1)
    tl.store(sums + p, v)
    tl.debug_barrier()
    tl.atomic_xchg(flags + p, 1)
    tl.store(o + p, v)


@triton.jit
def k_tickets(x, o, ticket, n, B: tl.constexpr):
    t = tl.atomic_add(ticket, 1)
    while t < n:
        i = t * B + tl.arange(0, B)
        tl.store(o + i, tl.load(x + i) + tl.load(o + i))
        t = tl.atomic_add(ticket, 1)


@triton.jit
def k_normalise(x, total, o, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i)
    tl.atomic_add(total, tl.sum(v, 0))
    tl.store(o + i, v / tl.load(total))


@triton.jit
def k_max(x, o, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_max(o, tl.max(tl.load(x + i), 0).to(tl.int32))


@triton.jit
def k_split(x, o, ATOMIC: tl.constexpr, B: tl.constexpr):
    v = tl.sum(tl.load(x + tl.program_id(0) * B + tl.arange(0, B)), 0)
    if ATOMIC:
        tl.atomic_add(o + tl.program_id(0) // 2, v)
    else:
        tl.store(o + tl.program_id(0) // 2, v)


@triton.jit
def k_histogram(x, o, MODE: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    bin = tl.load(x + i).to(tl.int32) % 4
    for k in tl.static_range(4):
        n = tl.sum((bin == k).to(tl.float32), 0)
        if MODE == 0:
            tl.atomic_add(o + k, n)
        elif MODE == 1:
            tl.store(o + k, tl.load(o + k) + n)
        elif MODE == 2 or tl.program_id(0) == 0:
            tl.store(o + k, n)
        else:
            tl.atomic_add(o + k, n)


@triton.jit
def k_looks(x, flag, o, ATOMIC: tl.constexpr):
    """The first program stores and then only looks at the flag (or changes it); the second changes the flag and loads."""
    if tl.program_id(0) == 0:
        tl.store(x, 1.0)
        if ATOMIC:
            tl.atomic_add(flag, 1)
        else:
            tl.store(o, tl.load(flag, volatile=True).to(tl.float32))
    else:
        tl.atomic_add(flag, 1)
        tl.store(o + 1, tl.load(x))


@triton.jit
def k_last_loader(x, count, WRITER: tl.constexpr, SHARED: tl.constexpr):
    """Every program loads an element, and one of them stores to it; atomic operations on one counter order them, or not."""
    p = tl.program_id(0)
    v = tl.load(x)
    done = tl.atomic_add(count if SHARED else count + p, 1)
    if (done == 3) if SHARED else (p == WRITER):
        tl.store(x, v + 1)


@triton.jit
def k_last_updater(x, count, READER: tl.constexpr):
    """Every program adds to an element, and one of them loads it; nothing orders them."""
    p = tl.program_id(0)
    tl.atomic_add(x, 1.0)
    if p == READER:
        tl.store(count, tl.load(x).to(tl.int32))


#: As in test_ttir_sanitizer: an empty set stands for a correct kernel.
KERNELS: list[Row] = [
    (k_histogram, two(F, F), {"MODE": 0, "B": 16}, (8,), lambda: [ones(128), zeros(4)], (), set()),
    (k_histogram, two(F, F), {"MODE": 0, "B": 16}, (8,), lambda: [ones(128), zeros(4)], (1,), {RAW}),
    (k_histogram, two(F, F), {"MODE": 1, "B": 16}, (8,), lambda: [ones(128), zeros(4)], (), {ORDER, CLASH}),
    (k_histogram, two(F, F), {"MODE": 2, "B": 16}, (8,), lambda: [ones(128)**2 // 9, zeros(4)], (), {CLASH}),
    (k_histogram, two(F, F), {"MODE": 3, "B": 16}, (8,), lambda: [ones(128), zeros(4)], (), {CLASH}),
    (k_last_block, {"x": F, "part": F, "count": I, "o": F}, {"MODE": 0, "B": 16}, (8,),
     lambda: [ones(128), zeros(8), zeros(1, np.int32), zeros(1)], (1, 3), set()),
    (k_last_block, {"x": F, "part": F, "count": I, "o": F}, {"MODE": 1, "B": 16}, (8,),
     lambda: [ones(128), zeros(8), zeros(1, np.int32), zeros(1)], (1, 3), {ORDER}),
    (k_lock, {"x": F, "o": F, "lock": I}, {"MODE": 0, "B": 16}, (8,),
     lambda: [ones(128), zeros(1), zeros(1, np.int32)], (), set()),
    (k_lock, {"x": F, "o": F, "lock": I}, {"MODE": 1, "B": 16}, (8,),
     lambda: [ones(128), zeros(1), zeros(1, np.int32)], (), {ORDER, CLASH}),
    (k_split, two(F, F), {"ATOMIC": True, "B": 16}, (8,), lambda: [ones(128), zeros(4)], (), set()),
    (k_split, two(F, F), {"ATOMIC": False, "B": 16}, (8,), lambda: [ones(128), zeros(4)], (), {CLASH}),
    (k_max, two(F, I), {"B": 16}, (8,), lambda: [ones(128), zeros(1, np.int32)], (), set()),
    (k_semaphore, {"x": F, "o": F, "turn": I}, {"MODE": 0, "B": 16}, (6,),
     lambda: [ones(96), zeros(16), zeros(1, np.int32)], (1,), set()),
    (k_semaphore, {"x": F, "o": F, "turn": I}, {"MODE": 1, "B": 16}, (6,),
     lambda: [ones(96), zeros(16), zeros(1, np.int32)], (1,), {CLASH, ORDER}),
    (k_look_back, {"x": F, "sums": F, "flags": I, "o": F}, {"B": 16}, (6,),
     lambda: [ones(96), zeros(6), zeros(6, np.int32), zeros(6)], (1, 3), set()),
    (k_tickets, {"x": F, "o": F, "ticket": I, "n": "i32"}, {"B": 16}, (3,),
     lambda: [ones(128), zeros(128), zeros(1, np.int32), 8], (), set()),
    (k_normalise, {"x": F, "total": F, "o": F}, {"B": 16}, (4,),
     lambda: [ones(64), zeros(1), zeros(64)], (2,), {ORDER}),
    *((k_looks, {"x": F, "flag": I, "o": F}, {"ATOMIC": atomic}, (2,), lambda: [zeros(1), zeros(1, np.int32), zeros(2)], (2,),
       set() if atomic else {ORDER}) for atomic in (False, True)),
    *((k_last_loader, {"x": F, "count": I}, {"WRITER": w, "SHARED": False}, (4,), lambda: [ones(1), zeros(4, np.int32)], (),
       {ORDER}) for w in (0, 1, 3)),
    (k_last_loader, {"x": F, "count": I}, {"WRITER": 0, "SHARED": True}, (4,), lambda: [ones(1), zeros(4, np.int32)], (), set()),
    *((k_last_updater, {"x": F, "count": I}, {"READER": r}, (4,), lambda: [zeros(1), zeros(1, np.int32)], (), {ORDER})
      for r in (0, 1)),
]  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 64 << 20])
@pytest.mark.parametrize("k", range(len(KERNELS)))
def test_kernels_with_atomic_operations(k: int, chunk: int) -> None:
    check(KERNELS[k], chunk)
