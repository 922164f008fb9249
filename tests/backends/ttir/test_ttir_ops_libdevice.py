"""Every libdevice symbol resolves; values against torch and exact arithmetic."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from ttir_helper import execute, to_ttir

from kbx_env.backends.ttir.ops_math import lookup

SYMBOLS = sorted(set(re.findall(r'"(__nv_\w+)"', inspect.getsource(cuda_libdevice))))
B = 64


def test_every_symbol_resolves() -> None:
    assert len(SYMBOLS) > 250
    assert [s for s in SYMBOLS if lookup(s) is None] == []


def f(name: str) -> Any:
    found = lookup("__nv_" + name)
    assert found is not None
    return found


UNARY = ["exp", "log", "log2", "log10", "log1p", "expm1", "sin", "cos", "tan", "tanh", "sinh", "cosh", "atan", "asinh",
         "erf", "erfc", "lgamma", "sqrt", "rsqrt", "exp2", "floor", "ceil", "trunc"]  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_functions_against_torch(name: str) -> None:
    x = np.linspace(0.05, 6, 200)
    want = getattr(torch, name)(torch.tensor(x)).numpy()
    np.testing.assert_allclose(f(name)(x), want, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(f(name + "f")(x.astype(np.float32)), want, rtol=1e-5, atol=1e-6)


def test_rounding_half_away_is_exact() -> None:
    x = np.array([0.49999997, 0.5, -0.5, 1.5, 2.5, 8388609.0, -2.5, 4194303.5], np.float32)
    assert f("roundf")(x).tolist() == [0, 1, -1, 2, 3, 8388609, -3, 4194304]
    assert f("llroundf")(x).tolist() == [0, 1, -1, 2, 3, 8388609, -3, 4194304]
    assert f("rintf")(x).tolist() == [0, 0, -0.0, 2, 2, 8388609, -2, 4194304]


def test_integers() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-(2**31), 2**31, (2, B)).astype(np.int32)
    wide = rng.integers(-(2**63), 2**63 - 1, (2, B))
    mirrored = [int(f"{v & 0xFFFFFFFF:032b}"[::-1], 2) for v in a.tolist()]
    assert f("brev")(a).view(np.uint32).tolist() == mirrored
    assert f("mulhi")(a, b).tolist() == [(p * q) >> 32 for p, q in zip(a.tolist(), b.tolist())]
    assert f("mul64hi")(*wide).tolist() == [(p * q) >> 64 for p, q in zip(*wide.tolist())]
    assert f("hadd")(a, b).tolist() == [(p + q) >> 1 for p, q in zip(a.tolist(), b.tolist())]
    assert f("ffs")(np.array([0, 1, 8, -(2**31)], np.int32)).tolist() == [0, 1, 4, 32]
    assert f("clz")(np.array([0, 1, -1], np.int32)).tolist() == [32, 31, 0]
    got = f("byte_perm")(*(np.array([v], np.int32) for v in (0x03020100, 0x07060504, 0x7531)))
    assert got.tolist() == [0x07050301]


@pytest.mark.parametrize("mode", "nzud")
def test_conversions_with_a_rounding_mode(mode: str) -> None:
    x = np.array([1.5, 2.5, -1.5, -2.7, 3e10, -3e10, np.nan, 0.2])
    way = {"n": np.rint, "z": np.trunc, "u": np.ceil, "d": np.floor}[mode]
    want = np.clip(way(x), -(2.0**31), 2.0**31 - 1)
    want[6] = -(2.0**31)
    assert f(f"double2int_r{mode}")(x).tolist() == want.tolist()
    v = np.array([2**53 + 1, -(2**53) - 1, 2**62 + 3, 7])
    got = [int(w) for w in f(f"ll2double_r{mode}")(v).tolist()]
    for g, e in zip(got, v.tolist()):
        assert {"n": abs(g - e) <= 512, "z": abs(g) <= abs(e), "u": g >= e, "d": g <= e}[mode]


@triton.jit
def k_mixed(x, y, o, q, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(o + i, libdevice.fdim(a, b))
    tl.store(o + B + i, libdevice.copysign(a, b))
    tl.store(o + 2 * B + i, libdevice.hypot(a, b))
    tl.store(o + 3 * B + i, libdevice.norm3d(a, b, a))
    tl.store(o + 4 * B + i, libdevice.ldexp(a, 3))
    tl.store(o + 5 * B + i, libdevice.remainder(a, b))
    tl.store(q + i, libdevice.float_as_int(a))
    tl.store(q + B + i, libdevice.ilogb(a))
    tl.store(q + 2 * B + i, libdevice.signbit(a).to(tl.int32))
    tl.store(q + 3 * B + i, libdevice.isnan(a).to(tl.int32) + libdevice.finitef(b).to(tl.int32))


def test_through_the_compiler() -> None:
    x, y = np.random.default_rng(0).standard_normal((2, B)).astype(np.float32)
    o, q = np.zeros((6, B), np.float32), np.zeros((4, B), np.int32)
    execute(to_ttir(k_mixed, {"x": "*fp32", "y": "*fp32", "o": "*fp32", "q": "*i32"}, {"B": B}), (1,), [x, y, o, q])
    a, b = x.astype(np.float64), y.astype(np.float64)
    want = [
        np.maximum(a - b, 0),
        np.copysign(a, b),
        np.hypot(a, b),
        np.sqrt(2 * a * a + b * b),
        a * 8,
        a - np.rint(a / b) * b,
    ]
    np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-6)
    assert (q[0] == x.view(np.int32)).all()
    assert (q[1] == np.floor(np.log2(np.abs(a)))).all()
    assert ((q[2] != 0) == np.signbit(x)).all()
    assert ((q[3] != 0) == np.isfinite(y)).all()
