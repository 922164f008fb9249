"""Rounding, conversions, matrix products and random numbers as an sm_90 GPU gives them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from ttir_helper import execute, to_ttir

from kbx_env.backends.ttir import parse
from kbx_env.backends.ttir.interp import rounding

B = 64
FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}


def call(fn: Any, sig: dict[str, str], arrays: list[Any], const: dict[str, Any] | None = None, **kw: Any) -> str:
    text = to_ttir(fn, sig, const)
    execute(text, kw.pop("grid", (1,)), arrays, **kw)
    return text


@triton.jit
def k_fused(x, y, z, o, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b, c = tl.load(x + i), tl.load(y + i), tl.load(z + i)
    tl.store(o + i, a * b + c)
    tl.store(o + B + i, a * b - c)
    tl.store(o + 2 * B + i, c - a * b)
    tl.store(o + 3 * B + i, tl.fma(a, b, c))
    tl.store(o + 4 * B + i, tl.where(c > 0, a * b, c) - c)
    s = tl.load(x) * tl.load(y)
    tl.store(o + 5 * B + i, s + c)


def bits_of(t: torch.Tensor) -> np.ndarray:
    wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return t.contiguous().view(wide).numpy()


@pytest.mark.parametrize("dtype", list(FLOATS))
def test_products_fuse_into_sums(dtype: str) -> None:
    torch.manual_seed(0)
    t = FLOATS[dtype]
    x, y = torch.randn(2, B, dtype=torch.float64).to(t)
    z = -(x * y)
    o = torch.zeros(6, B, dtype=t)
    arrays = [bits_of(v) for v in (x, y, z, o)]
    sig = dict.fromkeys(("x", "y", "z", "o"), "*" + dtype)
    call(k_fused, sig, arrays, {"B": B})
    if dtype == "fp64":
        from fractions import Fraction

        exact = [float(Fraction(a) * Fraction(b) + Fraction(c)) for a, b, c in zip(*(v.tolist() for v in (x, y, z)))]
        want = torch.tensor(exact, dtype=t)
        assert torch.equal(o[0], want) and torch.equal(o[3], want)
        return
    a, b, c = x.double(), y.double(), z.double()
    for k, exact64 in enumerate((a * b + c, a * b - c, c - a * b, a * b + c)):
        assert torch.equal(o[k], exact64.to(t)), k
    # A selection between the two keeps the product's own rounding.
    assert torch.equal(o[4], torch.where(z > 0, x * y, z) - z)
    assert torch.equal(o[5], (a[0] * b[0] + c).to(t))


def test_fusion_can_be_turned_off() -> None:
    text = to_ttir(k_fused, dict.fromkeys(("x", "y", "z", "o"), "*fp32"), {"B": B})
    names = {op.name for op in parse(text, fp_fusion=False).entry.body.blocks[0].ops if "fused" in op.attrs}
    assert not names
    assert any("fused" in op.attrs for op in parse(text).entry.body.blocks[0].ops)


@triton.jit
def k_special(x, o, q, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(o + i, tl.sqrt(v))
    tl.store(o + B + i, tl.sqrt_rn(v))
    tl.store(o + 2 * B + i, tl.floor(v))
    tl.store(o + 3 * B + i, tl.exp2(v))
    tl.store(o + 4 * B + i, tl.rsqrt(v))
    tl.store(o + 5 * B + i, v * 1.5)
    tl.store(o + 6 * B + i, v % 3.0)
    tl.store(o + 7 * B + i, tl.maximum(v, 2.0))
    tl.store(o + 8 * B + i, tl.maximum(v, 2.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(q + i, v.to(tl.int32))
    tl.store(q + B + i, v.to(tl.uint8).to(tl.int32))
    tl.store(q + 2 * B + i, (v.to(tl.int64) >> 32).to(tl.int32))
    tl.store(q + 3 * B + i, v.to(tl.uint32).to(tl.int32))


def test_special_values() -> None:
    x = np.array([1e-40, -1e-40, np.nan, np.inf, -np.inf, 300.7, -5.5, 3e9], np.float32)
    o, q = np.zeros((9, 8), np.float32), np.zeros((4, 8), np.int32)
    call(k_special, {"x": "*fp32", "o": "*fp32", "q": "*i32"}, [x, o, q], {"B": 8})
    nan, inf = np.nan, np.inf
    # sqrt.approx.ftz, cvt.rmi.ftz and rsqrt.approx.ftz flush denormals, sqrt.rn and products do not.
    np.testing.assert_array_equal(o[0, :5], [0, 0, nan, inf, nan])
    assert o[1, 0] == np.sqrt(x[0]) > 0
    np.testing.assert_array_equal(o[2], [0, 0, nan, inf, -inf, 300, -6, 3e9])
    np.testing.assert_array_equal(o[3, :5], [1, 1, nan, inf, 0])
    assert o[4, 0] == inf
    assert o[5, 0] == x[0] * np.float32(1.5) != 0
    np.testing.assert_allclose(o[6, 5:7], [300.7 % 3, -2.5], rtol=1e-4)
    np.testing.assert_array_equal(o[7, :5], [2, 2, 2, inf, 2])
    np.testing.assert_array_equal(o[8, 2], nan)
    high, low = 2**31 - 1, -(2**31)
    assert q[0].tolist() == [0, 0, 0, high, low, 300, -5, high]
    assert q[1].tolist() == [0, 0, 0, 255, 0, 300 - 256, 0, 255]
    # NaN gives the sign bit alone when the result has 64 bits.
    assert q[2].tolist() == [0, 0, low, high, low, 0, -1, 0]
    assert q[3].tolist() == [0, 0, 0, -1, 0, 300, 0, 3 * 10**9 - 2**32]


@triton.jit
def k_casts(x, h, b, e, f, hz, bz, ez, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(h + i, v.to(tl.float16))
    tl.store(b + i, v.to(tl.bfloat16))
    tl.store(e + i, v.to(tl.float8e4nv))
    tl.store(f + i, v.to(tl.float8e5))
    tl.store(hz + i, tl.cast(v, tl.float16, fp_downcast_rounding="rtz"))
    tl.store(bz + i, tl.cast(v, tl.bfloat16, fp_downcast_rounding="rtz"))
    tl.store(ez + i, tl.cast(v, tl.float8e5, fp_downcast_rounding="rtz"))


CAST_SIG = {"x": "*fp32", "h": "*fp16", "b": "*bf16", "e": "*fp8e4nv", "f": "*fp8e5", "hz": "*fp16", "bz": "*bf16",
            "ez": "*fp8e5"}  # fmt: skip
CAST_TEXT = to_ttir(k_casts, CAST_SIG, {"B": 16})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=16))
def test_float_casts(bits: list[int]) -> None:
    x = np.array(bits, np.uint32).view(np.float32)
    h, b, hz, bz = np.zeros((4, 16), np.int16)
    e, f, ez = np.zeros((3, 16), np.uint8)
    execute(CAST_TEXT, (1,), [x, h, b, e, f, hz, bz, ez])
    t = torch.tensor(x)
    nan = np.isnan(x)
    assert (h == bits_of(t.half()))[~nan].all()
    assert (b == bits_of(t.bfloat16()))[~nan].all()
    clip = torch.tensor(np.where(nan, 0, x))
    assert (e == bits_of(clip.clamp(-448, 448).to(torch.float8_e4m3fn)))[~nan].all()
    assert (f == bits_of(clip.clamp(-57344, 57344).to(torch.float8_e5m2)))[~nan].all()
    assert (e[nan] == 0x7F).all() and np.isnan(bz.view(ml_dtypes.bfloat16)[nan].astype(np.float32)).all()
    for got, d in ((hz, np.float16), (bz, ml_dtypes.bfloat16), (ez, ml_dtypes.float8_e5m2)):
        g = got.view(d).astype(np.float64)
        w = x.astype(np.float64)
        with np.errstate(over="ignore"):
            up = np.nextafter(got.view(d), d(np.inf) if d is np.float16 else got.view(d)).astype(np.float64)
        ok = np.abs(g) <= np.abs(w)
        assert (ok | nan).all()
        if d is np.float16:
            assert ((np.abs(up) >= np.abs(w)) | (g < 0) | nan | (g == 65504)).all()
    bf = np.where(nan, 0, x.view(np.uint32) >> 16).astype(np.uint16)
    assert (bz.view(np.uint16) == bf)[~nan].all()


@triton.jit
def k_small(e, f, h, b, g, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(h + i, tl.load(e + i).to(tl.float16))
    tl.store(b + i, tl.load(f + i).to(tl.bfloat16))
    tl.store(g + i, tl.load(h + B + i).to(tl.float8e4b15))


def test_formats_without_hardware_support() -> None:
    codes = np.arange(256, dtype=np.uint8)
    h, b, g = np.zeros((2, 256), np.float16), np.zeros(256, np.int16), np.zeros(256, np.uint8)
    mantissa = (1 + (codes & 7) / 8) * 2.0 ** ((codes >> 3 & 15).astype(int) - 15)
    plain = np.where(codes >> 3 & 15, mantissa, (codes & 7) / 8 * 2.0**-14) * np.where(codes >> 7, -1, 1)
    h[1] = plain
    sig = {"e": "*fp8e4b15", "f": "*fp8e5", "h": "*fp16", "b": "*bf16", "g": "*fp8e4b15"}
    call(k_small, sig, [codes, codes, h, b, g], {"B": 256})
    assert (h[0] == plain).all()
    # The largest magnitude of a conversion to fp8e4b15 is 1.75: the code above it is not produced.
    assert (g == np.where((codes & 127) == 127, codes - 1, codes)).all()
    wide = torch.from_numpy(b).view(torch.bfloat16).float().numpy()
    want = codes.view(ml_dtypes.float8_e5m2).astype(np.float32)
    finite = np.isfinite(want)
    assert (wide[finite] == want[finite]).all()
    # The compiler moves exponents without regard to infinities.
    assert (wide[0x7C:0x80] == [65536, 81920, 98304, 114688]).all()


@settings(max_examples=200, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1))
def test_integers_round_once(v: int) -> None:
    from fractions import Fraction

    got = rounding.from_int(np.array([v]), rounding.BF16)
    near = float(got[0])
    step = np.array([near]).astype(np.float32).view(np.uint32)
    for other in (step + 0x10000, step - 0x10000):
        far = float(other.view(np.float32)[0])
        if v:
            assert abs(Fraction(near) - v) <= abs(Fraction(far) - v)


@triton.jit
def k_ints(x, y, o, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    d = tl.where(b == 0, 1, b)
    tl.store(o + i, a + b)
    tl.store(o + B + i, a * b)
    tl.store(o + 2 * B + i, a // d)
    tl.store(o + 3 * B + i, a % d)
    tl.store(o + 4 * B + i, a << (b & 63))
    tl.store(o + 5 * B + i, a >> (b & 63))
    tl.store(o + 6 * B + i, tl.minimum(a, b))
    tl.store(o + 7 * B + i, -a)


INT_TEXT = {
    d: to_ttir(k_ints, dict.fromkeys("xyo", "*" + d), {"B": 8}) for d in ("i8", "i16", "i32", "i64", "u8", "u32", "u64")
}


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(INT_TEXT)), st.lists(st.integers(-(2**63), 2**63 - 1), min_size=16, max_size=16))
def test_integer_operations_wrap(kind: str, values: list[int]) -> None:
    bits = int(kind[1:])
    dtype = np.dtype(kind[0] + str(bits // 8))

    def wrap(v: int) -> int:
        v &= (1 << bits) - 1
        return v - (1 << bits) if kind[0] == "i" and v >> (bits - 1) else v

    x, y = (np.array([wrap(v) for v in part], dtype) for part in (values[:8], values[8:]))
    o = np.zeros((8, 8), dtype)
    execute(INT_TEXT[kind], (1,), [x, y, o])
    for k, (a, b) in enumerate(zip(x.tolist(), y.tolist())):
        d = b or 1
        q = abs(a) // abs(d) * (1 if (a < 0) == (d < 0) else -1)
        want = [a + b, a * b, q, a - q * d, a << (b & 63), a >> (b & 63), min(a, b), -a]
        assert o[:, k].tolist() == [wrap(w) for w in want]


@triton.jit
def k_dot(a, b, c, o, P: tl.constexpr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    x, y = tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :])
    at = m[:, None] * N + n[None, :]
    tl.store(o + at, tl.dot(x, y, tl.load(c + at), input_precision=P, out_dtype=o.dtype.element_ty))


DOTS = [
    ("fp32", "ieee", 1e-6), ("fp32", "tf32", 0), ("fp32", "tf32x3", 1e-6), ("fp32", "bf16x3", 1e-4),
    ("fp32", "bf16x6", 1e-6), ("fp16", "ieee", 1e-6), ("bf16", "ieee", 1e-6), ("fp64", "ieee", 1e-14),
    ("i8", "ieee", 0), ("fp8e4nv", "ieee", 1e-6), ("fp8e5", "ieee", 1e-6),
]  # fmt: skip
TORCH = FLOATS | {"i8": torch.int8, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


@pytest.mark.parametrize("dtype, precision, bound", DOTS)
def test_dot(dtype: str, precision: str, bound: float) -> None:
    torch.manual_seed(0)
    M, K, N = 16, 64, 32
    out = "i32" if dtype == "i8" else "fp64" if dtype == "fp64" else "fp32"
    x, y = ((torch.randn(s) * (30 if dtype == "i8" else 1)).to(TORCH[dtype]) for s in ((M, K), (K, N)))
    c = (torch.randn(M, N) * 10).to(torch.int32 if out == "i32" else FLOATS[out])
    o = torch.zeros_like(c)
    sig = {"a": "*" + dtype, "b": "*" + dtype, "c": "*" + out, "o": "*" + out}
    call(k_dot, sig, [bits_of(v) for v in (x, y, c, o)], {"P": precision, "M": M, "K": K, "N": N})
    a, b = x.double(), y.double()
    if precision == "tf32":
        # The tensor cores ignore the low bits of the operands.
        a, b = ((v.view(torch.int32) & -8192).view(torch.float32).double() for v in (x, y))
        bound = 1e-6
    want = a @ b + c.double()
    assert (o.double() - want).abs().max() <= bound * want.abs().max()


@triton.jit
def k_batched(a, b, o):
    z, i = tl.arange(0, 2), tl.arange(0, 16)
    at = z[:, None, None] * 256 + i[None, :, None] * 16 + i[None, None, :]
    tl.store(o + at, tl.dot(tl.load(a + at), tl.load(b + at), max_num_imprecise_acc=0))


def test_batched_dot() -> None:
    a, b = torch.randn(2, 2, 16, 16).half()
    o = torch.zeros(2, 16, 16)
    call(k_batched, {"a": "*fp16", "b": "*fp16", "o": "*fp32"}, [bits_of(a), bits_of(b), o.numpy()])
    torch.testing.assert_close(o, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@triton.jit
def k_scaled(a, b, s, o, F: tl.constexpr, K: tl.constexpr):
    i, k, kb, z = tl.arange(0, 32), tl.arange(0, K), tl.arange(0, 64), tl.arange(0, 2)
    x = tl.load(a + i[:, None] * K + k[None, :])
    y = tl.load(b + kb[:, None] * 32 + i[None, :])
    r = tl.dot_scaled(x, tl.load(s + i[:, None] * 2 + z[None, :]), F, y, None, "bf16")
    tl.store(o + i[:, None] * 32 + i[None, :], r)


@pytest.mark.parametrize("elem", ["e2m1", "e4m3", "e5m2"])
def test_dot_scaled(elem: str) -> None:
    rng = np.random.default_rng(0)
    K = 32 if elem == "e2m1" else 64
    x = rng.integers(0, 120, (32, K)).astype(np.uint8)
    s = rng.integers(120, 134, (32, 2)).astype(np.uint8)
    y = torch.randn(64, 32).bfloat16()
    o = np.zeros((32, 32), np.float32)
    sig = {"a": "*u8", "b": "*bf16", "s": "*u8", "o": "*fp32"}
    call(k_scaled, sig, [x, bits_of(y), s, o], {"F": elem, "K": K})
    if elem == "e2m1":
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        table = np.r_[table, -table]
        v = np.stack([table[x & 15], table[x >> 4]], -1).reshape(32, 64)
    else:
        v = x.view(ml_dtypes.float8_e4m3fn if elem == "e4m3" else ml_dtypes.float8_e5m2).astype(np.float64)
    v = v * np.repeat(2.0 ** (s.astype(int) - 127), 32, 1)
    want = v @ y.double().numpy()
    assert np.abs(o - want).max() <= 1e-5 * np.abs(want).max()


@triton.jit
def k_random(o, f, seed, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b, c, d = tl.randint4x(seed, i)
    tl.store(o + i, a)
    tl.store(o + B + i, b)
    tl.store(o + 2 * B + i, c)
    tl.store(o + 3 * B + i, d)
    tl.store(o + 4 * B + i, tl.randint(seed, i))
    tl.store(f + i, tl.randn(seed, i))
    u, v, w, x = tl.rand4x(seed, i)
    tl.store(f + B + i, x)
    p, q, r, s = tl.randn4x(seed, i)
    tl.store(f + 2 * B + i, p)


def test_philox_known_answers() -> None:
    o, f = np.zeros((5, B), np.uint32), np.zeros((3, B), np.float32)
    call(k_random, {"o": "*u32", "f": "*fp32", "seed": "i64"}, [o, f, 0], {"B": B})
    # The published answer of Philox4x32-10 for a zero key and a zero counter.
    assert o[:4, 0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert (o[4] == o[0]).all()
    u = [np.where(v < 0, -v - 1, v).astype(np.float64) * 4.6566127342e-10 for v in o[:4].view(np.int32)]
    np.testing.assert_allclose(f[1], u[3], rtol=1e-6)
    normal = np.sqrt(-2 * np.log(np.maximum(u[0], 1e-7))) * np.cos(2 * np.pi * u[1])
    np.testing.assert_allclose(f[0], normal, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(f[2], normal, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode, sign", [("rd", -1), ("ru", 1)])
def test_directed_rounding(mode: str, sign: int) -> None:
    from kbx_env.backends.ttir.ops.math import lookup

    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 500)).astype(np.float32)
    for name, exact in (("fadd", a.astype(float) + b), ("fmul", a.astype(float) * b), ("fdiv", a.astype(float) / b)):
        f = lookup(f"__nv_{name}_{mode}")
        assert f is not None
        got = f(a, b)
        assert ((got - exact) * sign >= 0).all()
        assert ((np.nextafter(got, np.float32(-sign * np.inf)) - exact) * sign < 0).all() or name == "fadd"
