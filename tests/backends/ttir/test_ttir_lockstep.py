"""Programs that wait for others run together where that changes nothing: each launch is compared with turns alone."""

from __future__ import annotations

import importlib.util
import random
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from test_ttir_sanitizer import F, I, ones, zeros
from test_ttir_sanitizer_atomics import k_lock, k_look_back, k_semaphore, k_tickets
from test_ttir_serial import BARRIER, CHAIN, k_barrier, k_chain
from ttir_helper import to_ttir

from kbx_env.backends.ttir import Finding, Meter, Perturbation, Region, TtirError, launch, parse
from kbx_env.backends.ttir.frontend.graph import Module
from kbx_env.backends.ttir.interp import lockstep
from kbx_env.backends.ttir.interp.liveness import annotate
from kbx_env.backends.ttir.interp.serial import RESIDENT
from kbx_env.backends.ttir.sanitizer.sanitizer import Sanitizer

N = 6
"""Number of programs of most launches."""


@dataclass
class Ran:
    """What one launch did."""

    arrays: list[bytes]
    masks: list[bytes]
    error: str
    findings: list[Finding]
    meter: dict[str, Any]
    touched: int
    seen: list[list[int]]
    together: bool = field(compare=False)


def run(
    text: str, grid: int, args: list[Any], raw: tuple[int, ...] = (), *, together: bool, sanitize: bool = True,
    perturbed: bool = False, module: Module | None = None, **kw: Any,
) -> Ran:  # fmt: skip
    """Run a kernel on copies of its arguments, those of ``raw`` uninitialised."""
    module = module or parse(text)
    module.together = together
    base, regions, flat = 1 << 32, [], []
    for k, a in enumerate(args):
        if not isinstance(a, np.ndarray):
            flat.append(a)
            continue
        data = a.copy().view(np.uint8)
        masks = [np.full(data.size, k not in raw), np.zeros(data.size, bool)]
        regions.append(Region(base, data, f"arg{k}", masks[0], stored=masks[1]))
        flat.append(base)
        base += data.size + 4096
    meter, error = Meter(detail=True), ""
    found = Sanitizer() if sanitize else None
    change = Perturbation("roundings", [(b + 1) % 256 for b in range(256)], seen={}) if perturbed else None
    try:
        launch(module, (grid, 1, 1), flat, regions, meter, sanitizer=found, perturbation=change, **kw)
    except TtirError as e:
        error = f"{type(e).__name__}: {e}"
    return Ran(
        [r.data.tobytes() for r in regions],
        [m.tobytes() for r in regions for m in (r.initialised, r.stored) if m is not None],
        error,
        found.findings if found else [],
        {f.name: getattr(meter, f.name) for f in fields(meter) if not f.name.startswith("_")},
        change.touched if change else 0,
        [v.tolist() for v in change.seen.values()] if change and change.seen else [],
        together and module.together and lockstep.plan(module) is not None,
    )


def both(text: str, grid: int, args: list[Any], raw: tuple[int, ...] = (), **kw: Any) -> Ran:
    """Run a kernel both ways, compare, and return what the attempt to run together gave."""
    alone, tried = (run(text, grid, args, raw, together=t, **kw) for t in (False, True))
    assert tried == alone
    return tried


# -- kernels ---------------------------------------------------------------------------------
@triton.jit
def k_meet(a, ws, bar, o, need, p1, q1, p2, q2, p3, q3, p4, q4, what):
    # Accesses chosen by the arguments before and after a barrier that waits for ``need`` programs.
    p, n = tl.program_id(0), tl.num_programs(0)
    v = tl.load(a + (p * p1 + q1) % n, mask=what % 2 == 1, other=1.0) + p
    tl.store(ws + (p * p2 + q2) % n, v, mask=what // 2 % 2 == 1)
    tl.debug_barrier()
    tl.atomic_add(bar, 1)
    while tl.atomic_add(bar, 0) < need:
        pass
    w = tl.load(ws + (p * p3 + q3) % n, mask=what // 4 % 2 == 1, other=2.0)
    tl.store(a + (p * p4 + q4) % n, w + p, mask=what // 8 % 2 == 1)
    tl.store(o + p, w)


MEET = {k: I if k == "bar" else F for k in ("a", "ws", "bar", "o")} | dict.fromkeys(
    ("need", "p1", "q1", "p2", "q2", "p3", "q3", "p4", "q4", "what"), "i32"
)
KNOWN = {"need": N, "p1": 1, "q1": 0, "p2": 1, "q2": 0, "p3": 1, "q3": 1, "p4": 1, "q4": 2, "what": 15}


def meet(**changes: int) -> list[Any]:
    return [ones(N), zeros(N), zeros(1, np.int32), zeros(N), *(KNOWN | changes).values()]


@triton.jit
def k_fix_up(x, part, flags, o, MODE: tl.constexpr, B: tl.constexpr):
    # Even programs add the partial sums of their successors, as in stream-K.
    p = tl.program_id(0)
    i = p * B + tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(part + i, v)
    tl.debug_barrier()
    tl.atomic_xchg(flags + p, 1)
    if p % 2 == 0:
        while tl.atomic_cas(flags + p + (1 if MODE < 2 else 0), 1, 1) != 1:
            pass
    v += tl.load(part + B + i, mask=p % 2 == 0, other=0.0)
    if MODE == 1:
        v += tl.load(part + (p + 3) % 6 * B + tl.arange(0, B))
    tl.store(o + i, v)


@triton.jit
def k_broadcast(x, ws, flag, o, MODE: tl.constexpr, B: tl.constexpr):
    # The first program produces what all others load.
    p = tl.program_id(0)
    i = tl.arange(0, B)
    tl.store(ws + i, tl.load(x + i) * 3, mask=(i < B) & (p == 0))
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, mask=p == MODE)
    while tl.load(flag, volatile=True) == 0:
        pass
    tl.store(o + p * B + i, tl.load(ws + i) + p)


@triton.jit
def k_all_load(x, ws, bar, o, need, MODE: tl.constexpr, B: tl.constexpr):
    # Every program does the same access to all partial results.
    p = tl.program_id(0)
    tl.store(ws + p, tl.load(x + p))
    if MODE == 1:
        tl.store(ws + B, 1.0)
    tl.debug_barrier()
    tl.atomic_add(bar, 1)
    while tl.atomic_add(bar, 0) < need:
        pass
    v = tl.sum(tl.load(ws + tl.arange(0, B)), 0)
    if MODE == 2:
        tl.store(ws + B, v)
    tl.store(o + p, v)


@triton.jit
def k_twice(ws, bar, o):
    # A barrier that is used again before all programs have left it: some wait for ever.
    p, n = tl.program_id(0), tl.num_programs(0)
    tl.atomic_add(bar, 1)
    while tl.atomic_add(bar, 0) != n:
        pass
    tl.store(ws + p, p)
    tl.atomic_add(bar, 1)
    while tl.atomic_add(bar, 0) != 2 * n:
        pass
    tl.store(o + p, tl.load(ws + (p + 1) % n))


@triton.jit
def k_handed_over(x, bar, o, q, B: tl.constexpr):
    # Values of every kind cross the barrier; one is rounded to int8.
    p, n = tl.program_id(0), tl.num_programs(0)
    i = p * B + tl.arange(0, B)
    v = tl.load(x + i)
    block = tl.make_block_ptr(o, (n * B,), (1,), (p * B,), (B,), (0,))
    ticket = tl.atomic_add(bar, 1)
    looks = 0
    while tl.atomic_add(bar, 0) < n:
        looks += 1
    tl.store(block, v + ticket + (looks > 0).to(tl.float32), boundary_check=(0,))
    tl.store(q + i, (v * 2).to(tl.int32).to(tl.int8))


@triton.jit
def k_queue(x, o, queue, n, by_row, by_program, MODE: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    p = tl.program_id(0)
    row = tl.atomic_add(queue, 1)
    while row < n:
        v = tl.load(x + row * B + i)
        at = (row * by_row + p * by_program) % n
        if MODE == 1:
            v += tl.load(o + at * B + i)
        tl.store(o + at * B + i, v * 2)
        if MODE == 2:
            row += 1
            if row % 2 == 0:
                row = tl.atomic_add(queue, 1)
        else:
            row = tl.atomic_add(queue, 1)


@triton.jit
def k_prepared_queue(o, queue, n):
    # A program prepares the element of its own number and adds to those that it draws.
    tl.store(o + tl.program_id(0), 1.0)
    row = tl.atomic_add(queue, 1)
    while row < n:
        tl.store(o + row, tl.load(o + row) + 1.0)
        row = tl.atomic_add(queue, 1)


QUEUE = {"x": F, "o": F, "queue": I, "n": "i32", "by_row": "i32", "by_program": "i32"}


def queue(rows: int, by_row: int = 1, by_program: int = 0) -> list[Any]:
    return [ones(4 * rows), zeros(4 * rows), zeros(1, np.int32), rows, by_row, by_program]


@triton.jit
def k_spins_on_counter(c, flag, o):
    # Adds in every trip, and yet waits for another program.
    if tl.program_id(0) == 0:
        while tl.load(flag, volatile=True) == 0:
            tl.atomic_add(c, 1)
    else:
        tl.atomic_xchg(flag, 1)
    tl.store(o + tl.program_id(0), 1)


@triton.jit
def k_zero_draw(c, o, n):
    while tl.atomic_add(c, 0) < n:
        pass
    tl.store(o + tl.program_id(0), 1)


@triton.jit
def k_weights(x, dw, count, lock, o, slots, MODE: tl.constexpr, B: tl.constexpr):
    # Each program normalises a row and adds its part of a gradient under a lock, as in Triton's layer norm tutorial.
    p = tl.program_id(0)
    i = tl.arange(0, B)
    v = tl.load(x + p * B + i)
    mean = tl.sum(v, 0) / B
    d = v - mean
    r = 1 / tl.sqrt(tl.sum(d * d, 0) / B + 1.0)
    part = d * r
    tl.store(o + p * B + i, tl.exp(tl.minimum(part * 0.5 - tl.abs(d) * r, 1.0)))
    slot = p % slots
    while tl.atomic_cas(lock + slot, 0, 1) == 1:
        pass
    n = tl.load(count + slot)
    total = part
    if n != 0:
        total += tl.load(dw + slot * B + i)
    tl.store(dw + slot * B + i, total)
    tl.store(count + slot, n + 1)
    tl.debug_barrier()
    if MODE == 0:
        tl.atomic_xchg(lock + slot, 0)
    if MODE == 2:
        tl.atomic_xchg(lock + slot, 0)
        tl.store(count + slots, tl.load(count + slot) + part.to(tl.int32).sum(0))


WEIGHTS = {"x": F, "dw": F, "count": I, "lock": I, "o": F, "slots": "i32"}


def weights(slots: int) -> list[Any]:
    return [
        ones(16 * N) % 7,
        zeros(16 * slots),
        zeros(slots + 1, np.int32),
        zeros(slots, np.int32),
        zeros(16 * N),
        slots,
    ]


@triton.jit
def k_scan(x, sums, flags, o, MODE: tl.constexpr, B: tl.constexpr):
    # Adds the total of the predecessor, which hands on its own.
    p = tl.program_id(0)
    i = p * B + tl.arange(0, B)
    v = tl.load(x + i)
    local = tl.cumsum(tl.minimum(tl.maximum(tl.abs(v * 0.5 + 1.0), v), 9.0), 0)
    own = tl.max(local, 0)
    before = 0.0
    if p > 0:
        while tl.load(flags + p - 1, volatile=True) == 0:
            pass
        before = tl.load(sums + p - 1)
    if MODE == 0:
        tl.store(sums + p, before + own)
        tl.debug_barrier()
        tl.atomic_xchg(flags + p, 1)
    else:
        tl.atomic_xchg(flags + p, 1)
        tl.debug_barrier()
        tl.store(sums + p, before + own)
    tl.store(o + i, tl.where(local > 1.0, local, 1.0) + before)


@triton.jit
def k_any(a, lock, bar, o, use, need, what, p1, q1, p2, q2, p3, q3, p4, q4, p5, q5, p6, q6):
    # Accesses chosen by the arguments before, while and after a program has a lock.
    p, n = tl.program_id(0), tl.num_programs(0)
    v = tl.load(a + (p * p1 + q1) % n, mask=what % 2 == 1, other=1.0) + p
    tl.store(a + (p * p2 + q2) % n, v, mask=what // 2 % 2 == 1)
    while tl.atomic_cas(lock, 0, use) == 1:
        pass
    w = tl.load(a + (p * p3 + q3) % n, mask=what // 4 % 2 == 1, other=2.0)
    tl.store(a + (p * p4 + q4) % n, w + 1, mask=what // 8 % 2 == 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)
    tl.atomic_add(bar, 1)
    while tl.load(bar, volatile=True) < need:
        pass
    w += tl.load(a + (p * p5 + q5) % n, mask=what // 16 % 2 == 1, other=2.0)
    tl.store(a + (p * p6 + q6) % n, w + v, mask=what // 32 % 2 == 1)
    tl.store(o + p, w)


ANY = ("use", "need", "what", *(f"{c}{k}" for k in range(1, 7) for c in "pq"))


ALL = {"x": F, "ws": F, "bar": I, "o": F, "need": "i32"}


def everything(need: int) -> list[Any]:
    return [ones(8), zeros(9), zeros(1, np.int32), zeros(8), need]


Case = tuple[str, Any, dict[str, str], dict[str, Any], Any, tuple[int, ...], bool, str]
#: name, kernel, signature, constants, arguments, uninitialised arguments, whether it runs together, error or finding
CASES: list[Case] = [
    *((f"barrier {mode}", k_barrier, BARRIER, {"MODE": mode, "B": 4},
       lambda: [ones(4 * N), zeros(N), zeros(N), zeros(1, np.int32)], (1, 2), True, "") for mode in (0, 1)),
    ("barrier that leaves too early", k_meet, MEET, {}, lambda: meet(need=N - 1), (1, 3), False, "order_dependent"),
    ("right barrier", k_meet, MEET, {}, meet, (1, 3), True, ""),
    ("all load one element", k_meet, MEET, {}, lambda: meet(p3=0), (1, 3), True, ""),
    ("loaded by all before, stored by one after", k_meet, MEET, {}, lambda: meet(p1=0, p4=0, q4=3, what=1), (1, 3), True, ""),
    ("stores clash before", k_meet, MEET, {}, lambda: meet(p2=0), (), False, "write_conflict"),
    ("stores clash after", k_meet, MEET, {}, lambda: meet(p4=0), (1, 3), False, "write_conflict"),
    ("reads before what another writes there", k_meet, MEET, {}, lambda: meet(need=0), (1, 3), False, "order_dependent"),
    ("reads what nothing has written", k_meet, MEET, {}, lambda: meet(what=13), (1, 3), False, "uninitialised_read"),
    ("stream-K", k_fix_up, {"x": F, "part": F, "flags": I, "o": F}, {"MODE": 0, "B": 4},
     lambda: [ones(4 * N), zeros(4 * N + 4), zeros(N, np.int32), zeros(4 * N)], (1, 3), True, ""),
    ("stream-K, another part", k_fix_up, {"x": F, "part": F, "flags": I, "o": F}, {"MODE": 1, "B": 4},
     lambda: [ones(4 * N), zeros(4 * N + 4), zeros(N, np.int32), zeros(4 * N)], (1, 3), False, "order_dependent"),
    ("stream-K, the wrong flag", k_fix_up, {"x": F, "part": F, "flags": I, "o": F}, {"MODE": 2, "B": 4},
     lambda: [ones(4 * N), zeros(4 * N + 4), zeros(N, np.int32), zeros(4 * N)], (3,), False, "order_dependent"),
    ("producer", k_broadcast, {"x": F, "ws": F, "flag": I, "o": F}, {"MODE": 0, "B": 16},
     lambda: [ones(16), zeros(16), zeros(1, np.int32), zeros(16 * N)], (1, 3), True, ""),
    ("all load everything", k_all_load, ALL, {"MODE": 0, "B": 8}, lambda: everything(8), (1, 3), True, ""),
    ("all load everything too early", k_all_load, ALL, {"MODE": 0, "B": 8},
     lambda: everything(7), (3,), False, "order_dependent"),
    ("all store the same before", k_all_load, ALL, {"MODE": 1, "B": 8}, lambda: everything(8), (1, 3), False, ""),
    ("all store the same after", k_all_load, ALL, {"MODE": 2, "B": 8}, lambda: everything(8), (1, 3), False, ""),
    # A race: the producer only looks at the flag, which hands nothing on.
    ("another program raises the flag", k_broadcast, {"x": F, "ws": F, "flag": I, "o": F}, {"MODE": 2, "B": 16},
     lambda: [ones(16), zeros(16), zeros(1, np.int32), zeros(16 * N)], (1, 3), False, "order_dependent"),
    ("nobody raises the flag", k_broadcast, {"x": F, "ws": F, "flag": I, "o": F}, {"MODE": 99, "B": 16},
     lambda: [ones(16), zeros(16), zeros(1, np.int32), zeros(16 * N)], (1, 3), False, "Deadlock"),
    ("barrier used again too early", k_twice, {"ws": I, "bar": I, "o": I}, {},
     lambda: [zeros(N, np.int32), zeros(1, np.int32), zeros(N, np.int32)], (), False, "Deadlock"),
    ("chain", k_chain, CHAIN, {"STEP": -1}, lambda: [zeros(N, np.int32), zeros(N, np.int32), 0], (0,), False, ""),
    ("deadlock", k_chain, CHAIN, {"STEP": 1},
     lambda: [zeros(N + 1, np.int32), zeros(N + 1, np.int32), 99], (0,), False, "Deadlock"),
    ("chained scan", k_look_back, {"x": F, "sums": F, "flags": I, "o": F}, {"B": 16},
     lambda: [ones(16 * N), zeros(N), zeros(N, np.int32), zeros(N)], (1, 3), False, ""),
    ("lock", k_lock, {"x": F, "o": F, "lock": I}, {"MODE": 0, "B": 16},
     lambda: [ones(16 * N), zeros(1), zeros(1, np.int32)], (), True, ""),
    ("ticket lock", k_semaphore, {"x": F, "o": F, "turn": I}, {"MODE": 0, "B": 16},
     lambda: [ones(16 * N), zeros(16), zeros(1, np.int32)], (1,), False, ""),
    ("ticket lock without release", k_semaphore, {"x": F, "o": F, "turn": I}, {"MODE": 1, "B": 16},
     lambda: [ones(16 * N), zeros(16), zeros(1, np.int32)], (1,), False, "order_dependent"),
    *((f"gradients under {slots} locks", k_weights, WEIGHTS, {"MODE": 0, "B": 16},
       lambda slots=slots: weights(slots), (1, 4), True, "") for slots in (1, 4)),
    ("lock that is never released", k_weights, WEIGHTS, {"MODE": 1, "B": 16}, lambda: weights(1), (1, 4), False, "Deadlock"),
    ("accesses without the lock", k_weights, WEIGHTS, {"MODE": 2, "B": 16},
     lambda: weights(1), (1, 4), False, "write_conflict"),
    ("scan", k_scan, {"x": F, "sums": F, "flags": I, "o": F}, {"MODE": 0, "B": 16},
     lambda: [ones(16 * N), zeros(N), zeros(N, np.int32), zeros(16 * N)], (1, 3), True, ""),
    ("scan that raises its flag too early", k_scan, {"x": F, "sums": F, "flags": I, "o": F}, {"MODE": 1, "B": 16},
     lambda: [ones(16 * N), zeros(N), zeros(N, np.int32), zeros(16 * N)], (3,), False, "order_dependent"),
    ("tickets", k_tickets, {"x": F, "o": F, "ticket": I, "n": "i32"}, {"B": 16},
     lambda: [ones(320), zeros(320), zeros(1, np.int32), 20], (), True, ""),
    ("work queue", k_queue, QUEUE, {"MODE": 0, "B": 4}, lambda: queue(20), (1,), True, ""),
    ("work queue that updates", k_queue, QUEUE, {"MODE": 1, "B": 4}, lambda: queue(20), (), True, ""),
    ("work queue with one result", k_queue, QUEUE, {"MODE": 1, "B": 4}, lambda: queue(20, 0), (), False, ""),
    *((f"queue of what {rows} others prepare", k_prepared_queue, {"o": F, "queue": I, "n": "i32"}, {},
       lambda rows=rows: [zeros(N), zeros(1, np.int32), rows], (0,), False, "uninitialised_read") for rows in (2, N)),
    ("trips without a draw", k_queue, QUEUE, {"MODE": 2, "B": 4}, lambda: queue(20), (), False, ""),
    ("queue out of bounds", k_queue, QUEUE, {"MODE": 0, "B": 4},
     lambda: [ones(76), *queue(20)[1:]], (1,), False, "OutOfBounds"),
    ("counter and flag", k_spins_on_counter, {"c": I, "flag": I, "o": I}, {},
     lambda: [zeros(1, np.int32), zeros(1, np.int32), zeros(N, np.int32)], (2,), False, ""),
    ("draws nothing", k_zero_draw, {"c": I, "o": I, "n": "i32"}, {},
     lambda: [zeros(1, np.int32), zeros(N, np.int32), 1], (1,), False, "Deadlock"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0])
def test_both_ways_give_the_same(case: Case) -> None:
    _, kernel, sig, const, args, raw, together, fault = case
    got = both(to_ttir(kernel, sig, const), 8 if kernel is k_all_load else N, args(), raw)
    assert got.together == together
    kinds = {f.kind for f in got.findings}
    assert (fault in kinds or got.error.startswith(fault)) if fault else not (kinds or got.error)


@pytest.mark.parametrize("chunk", [1, 64, 64 << 20])
def test_values_cross_the_turns_in_chunks_of_every_size(chunk: int) -> None:
    text = to_ttir(k_handed_over, {"x": F, "bar": I, "o": F, "q": "*i8"}, {"B": 4})
    args = [ones(4 * N), zeros(1, np.int32), zeros(4 * N), zeros(4 * N, np.int8)]
    for perturbed in (False, True):
        got = both(text, N, args, (2, 3), perturbed=perturbed, max_bytes=max(chunk, 8 * 4 * N), sanitize=not perturbed)
        assert got.together and not got.findings
        assert got.touched == (4 * N if perturbed else 0) and len(got.seen) == perturbed
    # The last program to arrive does not wait.
    expected = ones(4 * N) + np.repeat(np.arange(N), 4) + (np.arange(4 * N) < 4 * (N - 1))
    assert got.arrays[2] == expected.astype(np.float32).tobytes()


def test_a_failed_attempt_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every program has updated its elements when the attempt fails in the last phase.
    module = parse(to_ttir(k_meet, MEET))
    calls = []
    real = lockstep._run_in_phases
    monkeypatch.setattr(lockstep, "_run_in_phases", lambda *a: calls.append(1) or real(*a))  # type: ignore[func-returns-value]
    first = run("", N, meet(need=0), (1, 3), together=True, module=module)
    assert calls and not module.together
    assert first == run("", N, meet(need=0), (1, 3), together=False, module=module)
    # It is not tried again.
    module.together = True
    launch_twice = [run("", N, meet(need=0), (1, 3), together=module.together, module=module) for _ in range(2)]
    assert launch_twice == [first, first] and len(calls) == 2


@pytest.mark.parametrize("seed", range(4))
def test_random_accesses_around_a_barrier(seed: int) -> None:
    rng = random.Random(seed)
    text, together = to_ttir(k_meet, MEET), 0
    for _ in range(25):
        chosen = {k: rng.randrange(N) for k in KNOWN} | {
            "need": rng.choice([N, N, N - 1, 1]),
            "what": rng.randrange(16),
        }
        if rng.random() < 0.7:
            chosen |= dict.fromkeys(rng.sample(["p1", "p2", "p3", "p4"], 3), 1) | {"p2": rng.choice([1, 1, 5])}
        sanitize = rng.random() < 0.8
        alone, tried = (
            run(text, N, meet(**chosen), rng.choice([(), (3,)]), together=t, sanitize=sanitize) for t in (False, True)
        )
        together += tried.together
        if sanitize or tried.together:
            assert tried.findings == alone.findings
        assert tried.arrays == alone.arrays and tried.error == alone.error and tried.meter == alone.meter
    assert 0 < together < 25


@pytest.mark.parametrize("seed", range(4))
def test_random_accesses_under_a_lock(seed: int) -> None:
    rng = random.Random(seed)
    text = to_ttir(k_any, {"a": F, "lock": I, "bar": I, "o": F} | dict.fromkeys(ANY, "i32"))
    assert lockstep.plan(_annotated(text)) is not None
    together = 0
    for _ in range(25):
        chosen = {k: rng.choice([1, 1, 1, 5, 0]) if k[0] == "p" else rng.choice([0, 0, 0, 1]) for k in ANY}
        chosen |= {"use": rng.choice([1, 1, 0]), "need": rng.choice([N, N, N - 1, 0]), "what": 0}
        for bit in range(6):
            chosen["what"] |= (rng.random() < 0.6) << bit
        got = both(text, N, [ones(N), zeros(1, np.int32), zeros(1, np.int32), zeros(N), *chosen.values()], (3,))
        together += got.together
    assert 0 < together < 25


def _annotated(text: str) -> Module:
    module = parse(text)
    annotate(module)
    return module


@pytest.mark.parametrize("seed", range(3))
def test_random_accesses_of_a_queue(seed: int) -> None:
    rng = random.Random(seed)
    text = to_ttir(k_queue, QUEUE, {"MODE": rng.randrange(2), "B": 4})
    for _ in range(20):
        rows, by_row, by_program = rng.randrange(1, 20), rng.randrange(4), rng.choice([0, 0, 1, 3])
        args = queue(rows, by_row, by_program)
        alone, tried = (run(text, N, args, together=t) for t in (False, True))
        assert tried.findings == alone.findings and tried.error == alone.error
        if not by_program:
            # Otherwise the result depends on which program draws a row.
            assert tried.arrays == alone.arrays
            assert tried.meter == alone.meter


def test_more_programs_than_a_gpu_has_room_for_take_turns() -> None:
    text = to_ttir(k_barrier, BARRIER, {"MODE": 0, "B": 1})
    n = RESIDENT + 1
    got = run(text, n, [ones(n), zeros(n), zeros(n), zeros(1, np.int32)], together=True)
    assert "1 more cannot start" in got.error


def test_a_failed_attempt_puts_every_block_back() -> None:
    text = to_ttir(k_fix_up, {"x": F, "part": F, "flags": I, "o": F}, {"MODE": 1, "B": 4096})
    n = 4096 * N
    args = [ones(n), ones(n + 4096), zeros(N, np.int32), ones(n)]
    got = both(text, N, args, (3,))
    assert not got.together and got.findings


def test_stray_accesses_are_tolerated_as_ever() -> None:
    # As in the paper's check: outside of every tensor loads give 0; in another tensor, which lies 4 KiB behind the first
    # one, they find its values, and that is in doubt.
    text = to_ttir(k_queue, QUEUE, {"MODE": 0, "B": 4})
    for rows, together in ((20, True), (300, False)):
        got = both(text, N, [ones(4), *queue(rows)[1:]], sanitize=False, stray=2 << 20)
        assert got.together == together and not got.error


def test_the_time_of_an_attempt_is_a_part_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "_SHARE", 0.0)
    text = to_ttir(k_meet, MEET)
    assert not both(text, N, meet(), (1, 3), deadline=time.process_time() + 60).together


@pytest.mark.parametrize(
    ("name", "kernel", "sig", "const", "turns"),
    [
        ("k_std_grid_barrier", "std_barrier", dict.fromkeys(("x", "ws", "y"), F) | {"bar": I}
         | dict.fromkeys(("rows", "n", "chunks", "correction"), "i32"), {"BLOCK": 1024, "BC": 16}, True),
        ("k_softmax_work_queue", "softmax_queue", {"x": F, "y": F, "queue": I, "rows": "i32", "n": "i32"},
         {"ACC": tl.float32, "BLOCK": 1024}, False),
    ],
)  # fmt: skip
def test_kernels_of_the_zoo_run_together(
    name: str, kernel: str, sig: dict[str, str], const: dict[str, Any], turns: bool
) -> None:
    path = Path(__file__).parents[2] / "zoo" / "honest" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    source = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    plan = lockstep.plan(_annotated(to_ttir(getattr(source, kernel), sig, const)))
    assert plan is not None and (plan.turns is not None) == turns
