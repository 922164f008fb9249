"""Bytes by tensor, sectors, repeated reads and operations by unit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from test_ttir_basic import ADD, add_kernel, matmul_kernel
from ttir_helper import to_ttir

from kbx_env.backends.ttir import Meter, Region, launch, parse
from kbx_env.backends.ttir.interp.traffic import sectors
from kbx_env.backends.ttir.sanitizer.shadow import Shadow

F = "*fp32"


def run(text: str, grid: tuple[int, ...], args: list[Any], detail: bool = True, meter: Meter | None = None) -> Meter:
    base, regions, flat = 1 << 32, [], []
    for k, a in enumerate(args):
        if hasattr(a, "dtype") and getattr(a, "ndim", 0):
            regions.append(Region(base, a.reshape(-1).view("u1"), f"arg{k}"))
            flat.append(base)
            base += (a.nbytes + 4096) // 256 * 256
        else:
            flat.append(a)
    meter = meter or Meter(detail=detail)
    launch(parse(text), (tuple(grid) + (1, 1))[:3], flat, regions, meter)  # type: ignore[arg-type]
    return meter


def zeros(n: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(n, dtype)


def test_bytes_by_tensor_and_launch() -> None:
    n = 1000
    text = to_ttir(add_kernel, ADD, {"B": 128})
    meter = run(text, (8,), [zeros(n), zeros(n), zeros(n), n])
    (one,) = meter.per_launch
    assert (one.kernel, one.grid) == ("add_kernel", (8, 1, 1))
    assert {k: (t.loaded, t.stored, t.atomic) for k, t in one.tensors.items()} == {
        "arg0": (4 * n, 0, 0), "arg1": (4 * n, 0, 0), "arg2": (0, 4 * n, 0),
    }  # fmt: skip
    assert one.loaded_sector_bytes == 8 * n and one.stored_sector_bytes == 4 * n and one.efficiency == 1.0
    assert one.reread_bytes == 0 and one.flops["fp32"] == 8 * 128
    run(text, (8,), [zeros(n), zeros(n), zeros(n), n], meter=meter)
    assert meter.launches == len(meter.per_launch) == 2
    assert meter.tensors["arg0"].loaded == 8 * n and meter.loaded_bytes == 16 * n
    assert meter.flops["fp32"] == 2 * 8 * 128


@triton.jit
def k_stride(x, o, S: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i * S))


@pytest.mark.parametrize(("stride", "factor"), [(1, 1), (2, 2), (8, 8), (64, 8)])
def test_strides_waste_sectors(stride: int, factor: int) -> None:
    text = to_ttir(k_stride, {"x": F, "o": F}, {"S": stride, "B": 64})
    (one,) = run(text, (4,), [zeros(256 * stride), zeros(256)]).per_launch
    assert one.loaded_bytes == 1024 and one.loaded_sector_bytes == 1024 * factor
    assert one.stored_sector_bytes == 1024


@triton.jit
def k_reread(x, o, TIMES: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    acc = tl.zeros((B,), tl.float32)
    for _ in range(TIMES):
        acc += tl.load(x + i)
    tl.store(o + tl.program_id(0) * B + i, acc)


def test_rereads_in_a_loop_and_by_other_programs() -> None:
    (one,) = run(to_ttir(k_reread, {"x": F, "o": F}, {"TIMES": 3, "B": 32}), (4,), [zeros(32), zeros(128)]).per_launch
    assert one.loaded_bytes == 3 * 4 * 128 and one.unique_loaded_bytes == 128
    assert one.reread_bytes == 11 * 128
    assert one.loaded_sector_bytes == 3 * 4 * 128
    assert one.flops["fp32"] == 4 * 3 * 32


@triton.jit
def k_atomic(o, B: tl.constexpr):
    tl.atomic_add(o + tl.arange(0, B), 1.0)


def test_atomics_are_counted_apart() -> None:
    (one,) = run(to_ttir(k_atomic, {"o": F}, {"B": 16}), (4,), [zeros(16)]).per_launch
    assert (one.atomic_bytes, one.loaded_bytes, one.stored_bytes) == (256, 0, 0)


@pytest.mark.parametrize(
    ("ptr", "dtype", "acc", "precision", "kind", "unit"),
    [
        ("*fp16", np.float16, tl.float32, "ieee", "f16*f16->f32", "tensor"),
        ("*i8", np.int8, tl.int32, "ieee", "i8*i8->i32", "tensor"),
        (F, np.float32, tl.float32, "tf32", "tf32", "tensor"),
        (F, np.float32, tl.float32, "ieee", "f32*f32->f32", "fp32"),
    ],
)
def test_matrix_products_by_kind(ptr: str, dtype: Any, acc: Any, precision: str, kind: str, unit: str) -> None:
    out = np.int32 if acc is tl.int32 else np.float32
    sig = {"a": ptr, "b": ptr, "c": "*i32" if acc is tl.int32 else F, "M": "i32", "N": "i32", "K": "i32"}
    text = to_ttir(matmul_kernel, sig, {"B": 32, "ACC": acc, "PREC": precision})
    meter = run(text, (2, 2), [zeros(4096, dtype), zeros(4096, dtype), zeros(4096, out), 64, 64, 64], detail=False)
    assert meter.dots == {kind: 2 * 64**3} and meter.dot_flops == 2 * 64**3 and meter.dot_kinds == {kind}
    assert meter.flops[unit] == 2 * 64**3


@triton.jit
def k_units(x, y, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    w = tl.load(y + i)
    s = tl.sum(v, 0)
    tl.store(o + i, tl.exp(v) + w.to(tl.float32) + s)
    tl.store(y + i, w + w)


def test_units() -> None:
    text = to_ttir(k_units, {"x": F, "y": "*fp64", "o": F}, {"B": 64})
    meter = run(text, (2,), [zeros(64), zeros(64, np.float64), zeros(64)], detail=False)
    assert meter.flops["special"] == 2 * 64
    assert meter.flops["fp64"] == 2 * 64
    assert meter.flops["fp32"] == 2 * (63 + 64 + 64)  # the sum of 64 numbers is 63 additions
    assert meter.flops["int"] > 0


@triton.jit
def k_half(x, o, flag, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    if tl.load(flag + tl.program_id(0)) > 0:
        tl.store(o + i, tl.load(x + i) * 3)


def test_programs_that_skip_a_branch_are_not_counted() -> None:
    flag = np.array([0, 1, 0, 1], np.int32)
    text = to_ttir(k_half, {"x": F, "o": F, "flag": "*i32"}, {"B": 32})
    (one,) = run(text, (4,), [zeros(128), zeros(128), flag]).per_launch
    assert one.flops["fp32"] == 64 and one.tensors["arg1"].stored == 256
    assert one.stored_sector_bytes == 256 and one.tensors["arg0"].loaded == 256


def test_a_failed_launch_is_metered_too() -> None:
    from kbx_env.backends.ttir import OutOfBounds

    meter = Meter()
    with pytest.raises(OutOfBounds):
        run(to_ttir(k_stride, {"x": F, "o": F}, {"S": 1, "B": 64}), (4,), [zeros(256), zeros(3)], meter=meter)
    assert meter.per_launch[0].flops["int"] > 0


def test_sectors_against_a_count_by_hand() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 8, 32, 128):
        addr = rng.integers(0, 4096, (5, n)) * 4
        mask = rng.random((5, n)) < 0.7
        groups = addr.reshape(-1, min(n, 32)), mask.reshape(-1, min(n, 32))
        assert sectors(addr, None) == sum(len(set((r >> 5).tolist())) for r in groups[0])
        by_hand = sum(len(set((r[m] >> 5).tolist())) for r, m in zip(*groups, strict=True))
        assert sectors(addr, mask) == by_hand


@given(st.integers(0, 7), st.integers(1, 5), st.integers(1, 40), st.integers(0, 63), st.sampled_from((1, 2, 4, 8)))
def test_sectors_of_even_spacing(bits: int, rows: int, gap: int, first: int, item: int) -> None:
    addr = ((first + np.arange(rows << bits) * gap) * item).reshape(rows, 1 << bits)
    groups = (addr >> 5).reshape(-1, min(32, 1 << bits)).tolist()
    assert sectors(addr, None) == sum(len(set(g)) for g in groups)


def test_a_shadow_becomes_finer_and_keeps_its_entries() -> None:
    s = Shadow(64, {"a": np.int32})
    s.arrays["a"][s.at(np.array([0, 8, 16]), 8)] = 7
    assert s.grain == 8
    at = s.at(np.array([4, 12, 24]), 4)
    assert s.grain == 4 and s.arrays["a"][at].tolist() == [7, 7, 0]
    assert s.arrays["a"][s.at(np.array([0, 16]), 8)].tolist() == [[7, 7], [7, 7]]
    assert s.arrays["a"][s.at(np.array([3]), 2)].tolist() == [[7, 7]] and s.grain == 1
