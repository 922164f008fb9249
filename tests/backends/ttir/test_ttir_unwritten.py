"""Memory that nothing has written must not decide what a program does; to load and to replace it is allowed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from ttir_helper import to_ttir

from kbx_env.backends.engine.serve import _classify
from kbx_env.backends.ttir import DecidesOnUnwritten, Meter, Region, Sanitizer, launch, parse
from kbx_env.backends.ttir.frontend.graph import Op
from kbx_env.backends.ttir.interp.control import OPS, may_read
from kbx_env.backends.ttir.interp.slices import ATOMICS, LOADS, STORES
from kbx_env.backends.ttir.sanitizer import unwritten

F, I = "*fp32", "*i32"
B = 16


def run(
    kernel: Any, sig: dict[str, str], args: list[Any], const: dict[str, Any], grid: int = 2, known: Any = None
) -> Any:
    """Run with nothing of the first argument written but the bytes ``known``; return its flags."""
    regions, flat = [], []
    flags = []
    for k, a in enumerate(args):
        if isinstance(a, np.ndarray):
            flags.append(np.ones(a.nbytes, bool))
            if k == 0:
                flags[0][:] = False
                flags[0][: known or 0] = True
            regions.append(Region((k + 1) << 32, a.view("u1"), f"arg{k}", flags[-1]))
            flat.append((k + 1) << 32)
        else:
            flat.append(a)
    found = Sanitizer()
    try:
        launch(parse(to_ttir(kernel, sig, const)), (grid, 1, 1), flat, regions, Meter(), sanitizer=found)
    except DecidesOnUnwritten as e:
        assert found.findings[-1] == e.finding and e.finding.kind == "decides_on_unwritten"
        raise
    assert all(f.kind == "uninitialised_read" for f in found.findings)
    return flags


@triton.jit
def k_decides(raw, x, o, n, MODE: tl.constexpr, B: tl.constexpr):
    p = tl.program_id(0)
    i = p * B + tl.arange(0, B)
    v = tl.load(raw + i)
    w = tl.load(x + i)
    if MODE == 0:
        if tl.sum((v != w).to(tl.int32), 0) > 0:
            tl.store(o + i, w)
    elif MODE == 1:
        tl.store(o + i, w, mask=v != w)
    elif MODE == 2:
        tl.store(o + p * B + tl.abs(v.to(tl.int32)) % B, w)
    elif MODE == 3:
        s = tl.sum(v, 0)
        while s < 10:
            s += 1
        tl.store(o + i, w + s)
    elif MODE == 4:
        for k in range(tl.max(v, 0).to(tl.int32)):
            tl.store(o + i, w + k)
    elif MODE == 5:
        # Programs go different ways before the value is used.
        t = tl.sum(v, 0)
        if p == 1:
            t += 1.0
        if t == 3.0:
            tl.store(o + i, w)
    elif MODE == 6:
        # Through a loop, a dot product and a shape.
        m = tl.zeros((B, B), tl.float32)
        for _ in range(2):
            m = tl.dot(m + v[:, None], m + w[None, :], m)
        tl.store(o + i, w, mask=tl.reshape(tl.max(m, 1), (B,)) > 3)
    elif MODE == 7:
        if tl.atomic_add(raw, 1.0) == 3.0:
            tl.store(o + i, w)
    elif MODE == 8:
        while tl.atomic_add(o, 0.0) > tl.sum(v, 0):
            pass
    elif MODE == 9:
        tl.store(o + i, w, mask=tl.load(raw + i, mask=i < n, other=0.0) == w)


SIG = {"raw": F, "x": F, "o": F, "n": "i32"}


def data() -> list[Any]:
    return [np.zeros(2 * B, np.float32), np.arange(2 * B, dtype=np.float32), np.zeros(2 * B, np.float32), 20]


@pytest.mark.parametrize("mode", range(10))
def test_branches_masks_addresses_and_trips(mode: int) -> None:
    with pytest.raises(DecidesOnUnwritten) as e:
        run(k_decides, SIG, data(), {"MODE": mode, "B": B})
    assert e.value.line > k_decides.fn.__code__.co_firstlineno
    assert _classify(e.value)["kind"] == "memory"
    what = {1: "a mask", 2: "an address", 4: "a number of trips", 6: "a mask", 9: "a mask"}.get(mode, "a branch")
    assert str(e.value).endswith(f"lets memory that nothing has written decide {what}")
    # The same kernel, once all of it is written; distinct addresses, because two elements of one store must not share one.
    args = data()
    args[0][:] = np.arange(2 * B) if mode == 2 else 0
    run(k_decides, SIG, args, {"MODE": mode, "B": B}, known=8 * B)


@triton.jit
def k_replaces(raw, x, o, n, MODE: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(raw + i)
    if MODE == 0:
        if tl.max(tl.where(i < n, v, 0.0), 0) > 3:
            tl.store(o + i, v)
    elif MODE == 1:
        tl.store(o + i, v, mask=(i < n) & (v >= 0))
    elif MODE == 2:
        at = v.to(tl.int32)
        tl.store(o + i, tl.load(x + at, mask=i < n, other=0.0))
    elif MODE == 3:
        if tl.max(tl.load(raw + i, mask=i < n, other=0.0), 0) > 3:
            tl.store(o + i, v * 2 + tl.sum(v, 0))
    elif MODE == 4:
        tl.store(raw + i, i.to(tl.float32))
        if tl.max(tl.load(raw + i), 0) > 3:
            tl.store(o + i, v)
    elif MODE == 5:
        keep = (i < n).to(tl.int32)
        if tl.sum(keep * v.to(tl.int32), 0) > 3:
            tl.store(o + i, v)


@pytest.mark.parametrize("mode", range(6))
def test_what_is_masked_replaced_or_only_computed_with_decides_nothing(mode: int) -> None:
    run(k_replaces, SIG, data(), {"MODE": mode, "B": B}, known=4 * 20)


@triton.jit
def k_copy(raw, o, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(raw + i) + 1)


def test_a_copy_does_not_make_memory_written() -> None:
    raw, o = np.zeros(2 * B, np.float32), np.zeros(2 * B, np.float32)
    flags = run(k_copy, {"raw": F, "o": F}, [raw, o], {"B": B}, known=4 * 20)
    assert flags[1][: 4 * 20].all() and not flags[1][4 * 20 :].any()


@triton.jit
def k_pieces(raw, x, o, n, B: tl.constexpr):
    a = tl.make_block_ptr(raw, (n,), (1,), (tl.program_id(0) * B,), (B,), (0,))
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(a, boundary_check=(0,), padding_option="zero")
    tl.store(o + i, tl.load(x + i), mask=v < 3)


def test_a_block_pointer_masks_what_lies_outside() -> None:
    run(k_pieces, SIG, data(), {"B": B}, known=4 * 20)
    with pytest.raises(DecidesOnUnwritten):
        run(k_pieces, SIG, data(), {"B": B}, known=4 * 19)


def test_every_operation_that_may_read_memory_or_run_others_is_watched_before_there_is_taint() -> None:
    inside = {"scf.if", "scf.for", "scf.while", "tt.call", "tt.reduce", "tt.scan", "tt.map_elementwise"}
    assert all(may_read(Op(name, [], [], [], [])) for name in {*LOADS, *ATOMICS, *STORES, *inside})
    pure = {name for name in OPS if not may_read(Op(name, [], [], [], []))}
    assert {"arith.addf", "math.exp", "tt.addptr", "tt.splat"} <= pure
    assert all(name.startswith(("arith.", "math.")) or name in unwritten._SHAPES + unwritten._LANEWISE for name in pure)
