"""Programs that wait for others take turns; those that wait for nothing that comes are told so at once."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from test_ttir_sanitizer import ORDER, Row, check, ones, zeros
from ttir_helper import execute, to_ttir

from kbx_env.backends.engine.serve import _classify
from kbx_env.backends.ttir import Deadlock, parse
from kbx_env.backends.ttir.interp.serial import RESIDENT, run_in_turns

F, I = "*fp32", "*i32"


def soon() -> dict[str, Any]:
    return {"deadline": time.process_time() + 60}


@triton.jit
def k_barrier(x, ws, o, bar, MODE: tl.constexpr, B: tl.constexpr):
    p, n = tl.program_id(0), tl.num_programs(0)
    tl.store(ws + p, tl.sum(tl.load(x + p * B + tl.arange(0, B)), 0))
    tl.debug_barrier()
    tl.atomic_add(bar, 1)
    if MODE == 0:
        while tl.atomic_add(bar, 0) < n:
            pass
    elif MODE == 1:
        while tl.load(bar, volatile=True) < n:
            pass
    elif MODE == 2:
        # Counts how often it looked.
        looks = 0
        while tl.atomic_cas(bar, n, n) != n:
            looks += 1
    tl.store(o + p, tl.load(ws + (p + 1) % n) * 10 + tl.load(ws + (p + n - 1) % n))


@triton.jit
def k_chain(o, flags, last, STEP: tl.constexpr):
    p = tl.program_id(0)
    v = 0
    if p != last:
        while tl.atomic_cas(flags + p + STEP, 1, 1) != 1:
            pass
        v = tl.load(o + p + STEP)
    tl.store(o + p, v + 1)
    tl.debug_barrier()
    tl.atomic_xchg(flags + p, 1)


BARRIER, CHAIN = {"x": F, "ws": F, "o": F, "bar": I}, {"o": I, "flags": I, "last": "i32"}


def barrier_data(n: int) -> list[Any]:
    return [ones(4 * n), zeros(n), zeros(n), zeros(1, np.int32)]


KERNELS: list[Row] = [
    *((k_barrier, BARRIER, {"MODE": mode, "B": 4}, (7,), lambda: barrier_data(7), (1, 2), set()) for mode in (0, 1, 2)),
    (k_barrier, BARRIER, {"MODE": 3, "B": 4}, (7,), lambda: barrier_data(7), (1, 2), {ORDER}),
    (k_chain, CHAIN, {"STEP": 1}, (9,), lambda: [zeros(9, np.int32), zeros(9, np.int32), 8], (0,), set()),
    (k_chain, CHAIN, {"STEP": -1}, (9,), lambda: [zeros(9, np.int32), zeros(9, np.int32), 0], (0,), set()),
]  # fmt: skip


@pytest.mark.parametrize("k", range(len(KERNELS)))
def test_waiting_orders_accesses_and_no_waiting_does_not(k: int) -> None:
    check(KERNELS[k], 64 << 20)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_barrier_of_the_whole_grid(mode: int) -> None:
    x, ws, o, bar = barrier_data(7)
    execute(to_ttir(k_barrier, BARRIER, {"MODE": mode, "B": 4}), (7,), [x, ws, o, bar], **soon())
    sums = x.reshape(7, 4).sum(1)
    assert (o == np.roll(sums, -1) * 10 + np.roll(sums, 1)).all() and bar[0] == 7


@pytest.mark.parametrize("step", [1, -1])
def test_a_long_chain_is_resolved_in_few_passes(step: int) -> None:
    n = 2000
    o, flags = np.zeros(n, np.int32), np.zeros(n, np.int32)
    text = to_ttir(k_chain, CHAIN, {"STEP": step})
    meter = execute(text, (n,), [o, flags, n - 1 if step > 0 else 0], **soon())
    assert (o == np.arange(n, 0, -1)[::step]).all()
    assert meter.atomics < 4 * n


@triton.jit(noinline=True)
def raised(flag):
    while tl.load(flag, volatile=True) == 0:
        pass
    return tl.load(flag)


@triton.jit(noinline=True)
def peek(flag):
    return tl.atomic_add(flag, 0)


@triton.jit
def k_nested(o, flags, n):
    p, np = tl.program_id(0), tl.num_programs(0)
    if p >= n:
        return
    s = 0
    for step in range(3):
        if (p + step) % 2 == 0:
            tl.atomic_xchg(flags + step * np + p, p + 1)
        else:
            # The neighbour raises its flag in this step, and waits for this program in the next one.
            k = p ^ 1
            s += raised(flags + step * np + k)
            while peek(flags + step * np + k) == 0:
                pass
    tl.store(o + p, s)


def test_waiting_inside_loops_branches_and_functions() -> None:
    o, flags = np.zeros(8, np.int32), np.zeros(24, np.int32)
    text = to_ttir(k_nested, {"o": I, "flags": I, "n": "i32"})
    assert "tt.call" in text and "cf.cond_br" in text
    execute(text, (8,), [o, flags, 6], **soon())
    # Odd programs wait in steps 0 and 2, even ones in step 1; the flag holds the neighbour's number and 1.
    assert o.tolist() == [2, 2, 4, 6, 6, 10, 0, 0]


@triton.jit
def k_writes_while_it_waits(flag, beats, o):
    if tl.program_id(0) == 0:
        n = 0
        while tl.atomic_add(flag, 0) == 0:
            n += 1
            tl.store(beats, n)
        tl.store(o, 1)
    else:
        tl.atomic_xchg(flag, 1)


def test_a_program_that_writes_while_it_waits_lets_others_run() -> None:
    flag, beats, o = np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32)
    execute(to_ttir(k_writes_while_it_waits, {"flag": I, "beats": I, "o": I}), (2,), [flag, beats, o], **soon())
    assert o[0] == 1 and beats[0] > 0


def test_a_deadlock_ends_at_once_and_says_where() -> None:
    text = to_ttir(k_chain, CHAIN, {"STEP": 1})
    start = time.monotonic()
    with pytest.raises(Deadlock, match=r"^deadlock: k_chain: program \(0, 0, 0\) waits at line \d+ .* 6 program") as e:
        # The flag after the last program's is never raised.
        execute(text, (6,), [np.zeros(7, np.int32), np.zeros(7, np.int32), 99], **soon())
    assert time.monotonic() - start < 5
    assert e.value.line == k_chain.fn.__code__.co_firstlineno + 5
    told = _classify(e.value)
    assert told["kind"] == "runtime" and told["line"] == e.value.line


def test_values_that_change_while_all_wait_are_no_deadlock() -> None:
    @triton.jit
    def gives_up(flag, o):
        tries = 0
        while (tl.atomic_add(flag, 0) == 0) & (tries < 1000):
            tries += 1
        tl.store(o + tl.program_id(0), tries)

    o = np.zeros(3, np.int32)
    execute(to_ttir(gives_up, {"flag": I, "o": I}), (3,), [np.zeros(1, np.int32), o], **soon())
    assert (o == 1000).all()


@pytest.mark.parametrize("room", [7, pytest.param(RESIDENT, marks=pytest.mark.full)])
def test_no_more_programs_run_together_than_a_gpu_has_room_for(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RESIDENT in run_in_turns.__defaults__
    defaults = tuple(room if value == RESIDENT else value for value in run_in_turns.__defaults__)
    monkeypatch.setattr(run_in_turns, "__defaults__", defaults)
    text = to_ttir(k_barrier, BARRIER, {"MODE": 0, "B": 1})
    execute(text, (room,), [ones(room), *barrier_data(room)[1:]], **soon())
    with pytest.raises(Deadlock, match="1 more cannot start"):
        execute(text, (room + 1,), [ones(room + 1), *barrier_data(room + 1)[1:]], **soon())


def test_only_loops_that_look_at_memory_make_programs_take_turns() -> None:
    @triton.jit
    def halves(x, o, c):
        v = tl.load(x + tl.program_id(0))
        while v > 1:
            v = v / 2
        tl.atomic_add(c, 1)
        tl.store(o + tl.program_id(0), v)

    assert not parse(to_ttir(halves, {"x": F, "o": F, "c": I})).serial
    assert parse(to_ttir(k_nested, {"o": I, "flags": I, "n": "i32"})).serial
