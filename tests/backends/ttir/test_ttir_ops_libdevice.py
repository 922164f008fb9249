"""Every libdevice symbol resolves; values against torch and exact arithmetic."""

from __future__ import annotations

import inspect
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from ttir_helper import execute, to_ttir

from kbx_env.backends.ttir.interp.rounding import fma
from kbx_env.backends.ttir.ops.math import lookup

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


SUB, TINY, TOP = 1.1754942106924411e-38, 1.1754943508222875e-38, 3.4028234663852886e38
MEASURED = [
    # (symbol, arguments, what an H200 gave)
    ("__nv_log1pf", [SUB], 0.0), ("__nv_expm1f", [SUB], 0.0), ("__nv_asinhf", [-SUB], -0.0),
    ("__nv_cbrtf", [1.401298464324817e-45], np.nan), ("__nv_rcbrtf", [SUB], np.nan), ("__nv_lgammaf", [SUB], np.inf),
    ("__nv_sinpif", [2.802596928649634e-45], 0.0), ("__nv_j0f", [-np.inf], 0.0), ("__nv_powf", [SUB, 1.0], 0.0),
    ("__nv_atan2f", [-SUB, -TINY], -3.1415927410125732), ("__nv_atan2f", [SUB, 3.2456955909729004], 0.0),
    ("__nv_hypotf", [-1.401298464324817e-45, SUB], 0.0), ("__nv_hypotf", [TINY, SUB], TINY),
    ("__nv_fmodf", [7.3783135414123535, -2.802596928649634e-45], np.nan), ("__nv_fmodf", [2.802596928649634e-45, 1.0], 0.0),
    ("__nv_nextafterf", [0.0, -np.inf], -TINY), ("__nv_nextafterf", [2.802596928649634e-45, -TINY], -TINY),
    ("__nv_nextafterf", [TINY, -2.33892822265625], SUB), ("__nv_nextafterf", [-2.8e-45, np.nan], np.nan),
    ("__nv_lgammaf", [-np.inf], np.inf), ("__nv_sinpif", [-1.0], -0.0), ("__nv_powf", [-1.0, -1.4e-45], np.nan),
    ("__nv_powf", [-2.802596928649634e-45, 4.837601184844971], np.nan),
    ("__nv_fmul_ru", [TOP, -TOP], -TOP), ("__nv_fdiv_rz", [6.729254245758057, -TINY], -TOP),
]  # fmt: skip


@pytest.mark.parametrize(("symbol", "args", "want"), MEASURED)
def test_edges_as_measured_on_an_h200(symbol: str, args: list[float], want: float) -> None:
    f = lookup(symbol)
    assert f is not None
    with np.errstate(all="ignore"):
        got = f(*(np.array([a], np.float32) for a in args))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.array([want], np.float32))


@pytest.mark.parametrize(
    ("a", "b", "c", "want"),
    [
        (1.7976931348623157e308, 7.596789698774334, -np.inf, -np.inf),
        (2.225073858507201e-308, 2.244480302383426, 5e-324, 4.994134446767699e-308),
        (-2.225073858507201e-308, 1.7976931348623157e308, -1.00390625, -5.003906249999999),
        (1.7976931348623157e308, -2.225073858507201e-308, -0.6491717245101292, -4.649171724510128),
        (2.0**1000, 2.0**100, 0.0, np.inf), (2.0**600, 2.0**600, -(2.0**1000), np.inf), (3.0, 5.0, -15.0, 0.0),
    ],
)  # fmt: skip
def test_fused_doubles_are_rounded_once_at_every_exponent(a: float, b: float, c: float, want: float) -> None:
    with np.errstate(all="ignore"):
        got = fma(np.array([a]), np.array([b]), np.array([c]))[0]
    assert got == want
    if np.isfinite(want):
        assert want == float(Fraction(a) * Fraction(b) + Fraction(c))


def test_a_huge_remainder_is_what_the_compiler_makes_of_it() -> None:
    x, y = np.array([-1.7976931348623157e308]), np.array([3.7926685906353796])
    with np.errstate(all="ignore"):
        assert fma(-np.trunc(x / y), y, x)[0] == 3.2019547986498943e291
