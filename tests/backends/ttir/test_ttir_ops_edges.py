"""Arithmetic at the edges of the formats: denormals, overflow, cancellation, the signs of zeros and NaN."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from ttir_helper import execute, to_ttir

from kbx_env.backends.ttir.interp.rounding import fma
from kbx_env.backends.ttir.ops.math import lookup

NAN, INF = math.nan, math.inf
SUB, TINY, TOP = 1.1754942106924411e-38, 1.1754943508222875e-38, 3.4028234663852886e38
MAX, LOW = 1.7976931348623157e308, 2.225073858507201e-308


def same(got: Any, want: Any) -> None:
    """Compare values and the signs of zeros."""
    np.testing.assert_array_equal(got, want)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number])


@triton.jit
def k_doubles(x, y, z, o, W: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b, c = tl.load(x + i), tl.load(y + i), tl.load(z + i)
    if W == 0:
        r = a * b + c
    elif W == 1:
        r = a * b - c
    elif W == 2:
        r = c - a * b
    elif W == 3:
        r = a * b + c * a
    else:
        r = a % b
    tl.store(o + i, r)


DOUBLES = [
    # (which expression, operands, what an H200 gave)
    (0, (MAX, 7.596789698774334, -INF), -INF), (0, (LOW, 2.244480302383426, 5e-324), 4.994134446767699e-308),
    (0, (-LOW, MAX, -1.00390625), -5.003906249999999), (1, (-1.00390625, MAX, -INF), INF),
    (1, (-MAX, 5.709597514830527, -INF), INF), (2, (MAX, LOW, -0.6491717245101292), -4.649171724510128),
    (3, (LOW, 2.888040895559582, -6.427557784168744), -7.87568650058899e-308),
    (3, (-MAX, 2.068251641006812, -1.00390625), INF), (3, (MAX, 7.544094609628152, -2.4457420795502127), -INF),
    (4, (-MAX, 3.7926685906353796, 0.0), 3.2019547986498943e291), (4, (MAX, 6.52839210625749, 0.0), -1.2000626425679094e292),
    (4, (-MAX, -5.63860650106175, 0.0), -9.213225868371934e291),
]  # fmt: skip


@pytest.mark.parametrize("which", range(5))
def test_doubles_as_measured_on_an_h200(which: int) -> None:
    rows = [(*a, g) for w, a, g in DOUBLES if w == which]
    x, y, z, want = np.array((rows * 4)[:4]).T.copy()
    o = np.zeros(4)
    execute(to_ttir(k_doubles, dict.fromkeys("xyzo", "*fp64"), {"W": which, "B": 4}), (1,), [x, y, z, o])
    same(o, want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zero_products_keep_the_sign_of_their_sum(dtype: Any) -> None:
    a, b, c = np.array([[-1, 0, 0, 1], [0, -3, 5, 1], [-0.0, -0.0, -0.0, -1]], dtype)
    same(fma(a, b, c), np.array([-0.0, -0.0, 0.0, 0.0], dtype))


def test_a_product_just_beyond_the_range_may_come_back() -> None:
    root, top = 1.3407807929942597e154, np.array([MAX])
    want = rounded(Fraction(MAX) - Fraction(root) ** 2, "n", 53, -1074, 1024)
    assert fma(np.array([-root]), np.array([root]), top)[0] == want != 0


wide = st.floats(allow_nan=False, allow_infinity=False)
narrow = st.floats(allow_nan=False, allow_infinity=False, width=32)
small = st.tuples(st.integers(-(2**24), 2**24), st.integers(-149, -110)).map(lambda v: math.ldexp(*v))


def rounded(exact: Fraction, mode: str, digits: int, lowest: int, highest: int) -> float:
    """Round a rational to a binary format; ``highest`` is the exponent that overflows."""
    if not exact:
        return 0.0
    size, sign = abs(exact), -1.0 if exact < 0 else 1.0
    e = size.numerator.bit_length() - size.denominator.bit_length()
    e -= size < Fraction(2) ** e
    unit = Fraction(2) ** max(e - digits + 1, lowest)
    n, rest = divmod(size, unit)
    half = 2 * rest - unit
    up = {
        "n": half > 0 or (half == 0 and n % 2 == 1),
        "z": False,
        "u": sign > 0 and rest > 0,
        "d": sign < 0 and rest > 0,
    }
    value = (n + up[mode]) * unit
    if value >= Fraction(2) ** highest:
        away = mode == "n" or mode == ("u" if sign > 0 else "d")
        return sign * (INF if away else float((2 - Fraction(2) ** (1 - digits)) * Fraction(2) ** (highest - 1)))
    return sign * float(value)


@settings(max_examples=150, deadline=None)
@given(st.one_of(narrow, small), st.one_of(narrow, small), st.one_of(narrow, small))
def test_fused_floats_are_rounded_once(a: float, b: float, c: float) -> None:
    x, y, z = (np.array([v], np.float32) for v in (a, b, c))
    with np.errstate(all="ignore"):
        got = fma(x, y, z)[0]
    assert got == rounded(Fraction(float(x[0])) * Fraction(float(y[0])) + Fraction(float(z[0])), "n", 24, -149, 128)


def test_fused_denormals_are_rounded_once() -> None:
    # 8384513 * 8392705 == 2**46 + 1: the sum lies just above halfway, and its f64 rounding on it.
    a, b, c = (np.array([math.ldexp(*v)], np.float32) for v in ((8384513, -98), (8392705, -98), (1, -127)))
    assert fma(a, b, c)[0] == math.ldexp(2**22 + 1, -149)
    assert fma(-a, b, -c)[0] == -math.ldexp(2**22 + 1, -149)


EXACT = {
    "add": lambda a, b, c: a + b,
    "mul": lambda a, b, c: a * b,
    "div": lambda a, b, c: a / b,
    "fma": lambda a, b, c: a * b + c,
}


@pytest.mark.parametrize("mode", "nzud")
@pytest.mark.parametrize("kind", sorted(EXACT))
@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(wide, st.floats(-8, 8), st.sampled_from([MAX, -MAX, LOW, -LOW, 5e-324, 1e-323])),
        min_size=3,
        max_size=3,
    )
)
def test_directed_doubles(kind: str, mode: str, values: list[float]) -> None:
    if kind == "div" and values[1] == 0:
        return
    f = lookup(f"__nv_{'' if kind == 'fma' else 'd'}{kind}_r{mode}")
    assert f is not None
    args = values[: 3 if kind == "fma" else 2]
    with np.errstate(all="ignore"):
        got = f(*(np.array([v]) for v in args))[0]
    assert got == rounded(EXACT[kind](*map(Fraction, values)), mode, 53, -1074, 1024)


@pytest.mark.parametrize("mode", "nzud")
def test_directed_roots(mode: str) -> None:
    f = lookup(f"__nv_dsqrt_r{mode}")
    assert f is not None
    for x in (5e-324, 1e-323, LOW, 2.0, 3.0, 4.0, MAX, 2.0761319460471307e-308):
        got = Fraction(float(f(np.array([x]))[0]))
        step = Fraction(float(np.spacing(float(got))))
        low, high = {
            "n": (got - step / 2, got + step / 2),
            "z": (got, got + step),
            "d": (got, got + step),
            "u": (got - step, got),
        }[mode]
        assert low**2 <= Fraction(x) <= high**2


OVERFLOWS = {"n": (INF, -INF), "z": (TOP, -TOP), "u": (INF, -TOP), "d": (TOP, -INF)}


@pytest.mark.parametrize("mode", "nzud")
def test_directed_overflow(mode: str) -> None:
    up, down = OVERFLOWS[mode]
    x = np.array([TOP, -TOP, INF, -INF, 1.0], np.float32)
    for kind, rest in (("fadd", (x,)), ("fmul", (np.abs(x),)), ("fdiv", (np.float32([TINY, TINY, 2, 2, 0]),)),
                       ("fmaf", (np.abs(x), x))):  # fmt: skip
        f = lookup(f"__nv_{kind}_r{mode}")
        assert f is not None
        with np.errstate(all="ignore"):
            same(f(x, *rest)[:4], np.array([up, down, INF, -INF], np.float32))
    f = lookup(f"__nv_fdiv_r{mode}")
    assert f is not None
    with np.errstate(all="ignore"):
        assert f(np.float32([1]), np.float32([0]))[0] == INF


def test_cancellation_downwards_leaves_the_negative_zero() -> None:
    for mode, zero in (("d", -0.0), ("u", 0.0), ("z", 0.0), ("n", 0.0)):
        for name in ("fadd", "dadd"):
            f = lookup(f"__nv_{name}_r{mode}")
            assert f is not None
            dtype = np.float32 if name[0] == "f" else np.float64
            same(f(np.array([1, 0], dtype), np.array([-1, 0], dtype)), np.array([zero, 0.0], dtype))


LOWERED = [
    # (symbol, arguments, what the compiled instructions for sm_90 give)
    ("__nv_nextafterf", [2.802596928649634e-45, -SUB], -0.0), ("__nv_nextafterf", [-TINY, -SUB], -SUB),
    ("__nv_powf", [1.401298464324817e-45, -1.0], 1.7014118346046923e38), ("__nv_powf", [SUB, 0.5], 2.0**-63.5),
    ("__nv_log1pf", [-SUB], 0.0), ("__nv_expm1f", [-SUB], 0.0), ("__nv_sinpif", [-SUB], 0.0), ("__nv_log1pf", [-0.0], -0.0),
    ("__nv_asinf", [-SUB], -0.0), ("__nv_atanhf", [SUB], 0.0), ("__nv_erfinvf", [-0.0], -0.0), ("__nv_fabsf", [-SUB], 0.0),
    ("__nv_erfcinvf", [-SUB], INF), ("__nv_erfcinvf", [1.0], 0.0), ("__nv_erfcxf", [TOP], 0.0), ("__nv_tgammaf", [SUB], INF),
    ("__nv_normcdfinvf", [-2.8e-45], -INF), ("__nv_normcdfinvf", [-SUB], NAN), ("__nv_cyl_bessel_i0f", [-INF], INF),
    ("__nv_cyl_bessel_i1f", [TINY], 0.0), ("__nv_cyl_bessel_i1f", [-INF], -INF), ("__nv_j1f", [-INF], -0.0),
    ("__nv_j1f", [-SUB], -0.0), ("__nv_y0f", [INF], 0.0), ("__nv_y0f", [SUB], -INF), ("__nv_y1f", [-SUB], NAN),
    ("__nv_saturatef", [NAN], 0.0), ("__nv_fdimf", [NAN, 1.0], NAN), ("__nv_fdimf", [1.0, 3.0], 0.0),
    ("__nv_remainderf", [1.0, SUB], NAN), ("__nv_rhypotf", [SUB, -SUB], INF), ("__nv_rhypotf", [NAN, INF], 0.0),
    ("__nv_norm3df", [-SUB, 0.0, SUB], 0.0), ("__nv_norm3df", [NAN, INF, NAN], INF),
    ("__nv_fast_logf", [-SUB], -INF), ("__nv_fast_log2f", [SUB], -INF), ("__nv_fast_log10f", [SUB], -INF),
    ("__nv_fast_powf", [-SUB, -2.0], INF), ("__nv_fast_powf", [-SUB, 0.5], 0.0), ("__nv_fast_powf", [-0.0, 1.0], 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("symbol", "args", "want"), LOWERED)
def test_edges_as_they_are_lowered(symbol: str, args: list[float], want: float) -> None:
    f = lookup(symbol)
    assert f is not None
    with np.errstate(all="ignore"):
        got = np.asarray(f(*(np.array([a], np.float32) for a in args)), np.float32)
    if math.isfinite(want) and want:
        np.testing.assert_allclose(got, [want], rtol=1e-6)
    else:
        same(got, np.array([want], np.float32))


def test_scaling_a_denormal_doubles_it() -> None:
    f, g = lookup("__nv_ldexpf"), lookup("__nv_powif")
    assert f is not None and g is not None
    x, k = np.array([SUB, -SUB, 1.5, INF], np.float32), np.array([-1, 7, 3, -9], np.int32)
    same(f(x, k), np.array([2 * SUB, -2 * SUB, 12.0, INF], np.float32))
    with np.errstate(all="ignore"):
        same(np.asarray(g(x[:3], k[:3]), np.float32), np.array([INF, -0.0, 3.375], np.float32))


@triton.jit
def k_clamp(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(o + i, tl.clamp(v, -2.0, 2.0))
    tl.store(o + B + i, tl.clamp(v, -1.0, 2.0))
    tl.store(o + 2 * B + i, tl.clamp(v, -2.0, 2.0, propagate_nan=tl.PropagateNan.ALL))


def test_symmetric_bounds_take_the_sign_of_nan() -> None:
    x = np.array([NAN, -NAN, -7.0, 1.0], np.float32)
    o = np.zeros((3, 4), np.float32)
    execute(to_ttir(k_clamp, {"x": "*fp32", "o": "*fp32"}, {"B": 4}), (1,), [x, o])
    same(o, np.array([[2, -2, -2, 1], [-1, -1, -1, 1], [NAN, NAN, -2, 1]], np.float32))
