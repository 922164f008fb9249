"""Correctly rounded floating point: conversions and the fused multiply-add, as PTX defines them."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from kbx_env.backends.ttir.interp.memory import Array

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
BF16 = np.dtype(ml_dtypes.bfloat16)
_E5M2, _E4M3 = np.dtype(ml_dtypes.float8_e5m2), np.dtype(ml_dtypes.float8_e4m3fn)
E4B15 = np.dtype(ml_dtypes.float8_e4m3b11fnuz)
"""Stores the bits of Triton's own ``fp8e4b15``, which has neither infinities nor NaN."""


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether a type is a float, the types of ml_dtypes included."""
    return dtype.kind in "fV"


def flush(x: Array) -> Array:
    """Replace f32 denormals by zeros of their sign, like the PTX modifier ``.ftz``."""
    if x.dtype != np.float32:
        return x
    tiny = np.abs(x) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), x), x) if tiny.any() else x


def _to_odd(x: Array) -> Array:
    """Round f64 to f32 with rounding to odd: a later rounding then gives the same result as a single one."""
    near = x.astype(np.float32)
    back = near.astype(np.float64)
    inexact = (back != x) & ~np.isnan(x)
    bits = near.view(np.uint32)
    bits = bits - (inexact & (np.abs(back) > np.abs(x))).astype(np.uint32)
    return (bits | inexact.astype(np.uint32)).view(np.float32)


def narrow(x: Array, dtype: np.dtype[Any]) -> Array:
    """Round f64 of any shape to any float type, to nearest even, with a single rounding."""
    if dtype == F64:
        return x
    if dtype.kind == "f":
        return x.astype(dtype)
    return _to_odd(x).astype(dtype)


def convert(x: Array, dtype: np.dtype[Any]) -> Array:
    """Convert floats of any shape to another float type, to nearest even, with a single rounding."""
    if x.dtype == dtype:
        return x
    if x.dtype == F64:
        return narrow(x, dtype)
    if x.dtype == E4B15:
        return convert(_b15_to_half(x), dtype)
    if x.dtype.kind == "V" or dtype.kind == "V":
        return x.astype(np.float32).astype(dtype)
    return x.astype(dtype)


def from_int(x: Array, dtype: np.dtype[Any]) -> Array:
    """Convert integers of any shape to a float type, to nearest even, with a single rounding."""
    if dtype.itemsize >= 4:
        return x.astype(dtype)
    if x.dtype.itemsize == 8:
        # Ten bits are gathered into one sticky bit: the rest fits the 53 bits of f64.
        low = x.dtype.type(1023)
        x = np.where(np.abs(x.astype(np.float64)) < 2.0**53, x, (x & ~low) | (((x & low) != 0) * (low + 1)))
    return narrow(x.astype(np.float64), dtype)


def to_int(x: Array, dtype: np.dtype[Any], is_signed: bool) -> Array:
    """Truncate floats toward zero, saturating, like PTX ``cvt.rzi``.

    NaN becomes 0; when either side has 64 bits it becomes the smallest integer (only the sign bit is set).

    Args:
        x: Floats of any shape.
        dtype: The signed integer type that stores the result.
        is_signed: Whether the result is a signed number.

    Returns:
        Integers: dtype ``dtype``, shape of ``x``.
    """
    wide = x.dtype == F64 or dtype.itemsize == 8
    if x.dtype.itemsize < 4:
        x = x.astype(np.float32)
    # PTX has no 8-bit conversion: the compiler converts to 16 bits and drops the upper byte.
    width = max(dtype.itemsize, 2)
    work = np.dtype(f"{'i' if is_signed else 'u'}{width}")
    info = np.iinfo(work)
    lo, hi = x.dtype.type(info.min), x.dtype.type(info.max)
    nan = np.isnan(x)
    with np.errstate(invalid="ignore"):  # numbers that do not fit are set below
        out = np.where(nan, 0, x).astype(work)
    out = np.where(x >= hi, info.max if float(hi) >= info.max else out, out)
    out = np.where(x <= lo, info.min, out).astype(work).view(f"i{width}")
    if wide:
        out = np.where(nan, np.iinfo(f"i{width}").min, out)
    return out.astype(f"i{width}").astype(dtype)


def _b15_to_half(x: Array) -> Array:
    bits = np.ascontiguousarray(x).view(np.uint8).astype(np.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).view(np.float16)


def _half_to_b15(x: Array) -> Array:
    bits = np.ascontiguousarray(x).view(np.uint16)
    mag = np.minimum(bits & 0x7FFF, 0x3F00)
    # Follows the compiler's instruction sequence: half of the dropped unit is added, so that ties round up.
    return ((((mag + 0x40) >> 7) & 0x7F) | ((bits >> 8) & 0x80)).astype(np.uint8).view(E4B15)


def _toward_zero(x: Array, dtype: np.dtype[Any]) -> Array:
    near = convert(x, dtype)
    bits = np.ascontiguousarray(near).view(f"u{dtype.itemsize}")
    over = (np.abs(near.astype(np.float64)) > np.abs(x.astype(np.float64))) & np.isfinite(x)
    return (bits - over.astype(bits.dtype)).view(dtype)


def cast(x: Array, dtype: np.dtype[Any], mode: str) -> Array:
    """Convert between float types like ``tt.fp_to_fp`` on sm_90.

    Args:
        x: Floats of any shape.
        dtype: The new type.
        mode: "rtne" (to nearest even) or "rtz" (toward zero).

    Returns:
        Floats: dtype ``dtype``, shape of ``x``.
    """
    if dtype == E4B15:
        return _half_to_b15(convert(x, np.dtype(np.float16)))
    if mode == "rtz" and dtype.itemsize < x.dtype.itemsize:
        return _toward_zero(x, dtype)
    if dtype in (_E4M3, _E5M2):
        # cvt.rn.satfinite: infinities saturate too, and NaN has one pattern.
        top = float(ml_dtypes.finfo(dtype).max)
        x = x.astype(np.float32)
        x = np.where(np.isnan(x), np.float32(np.nan), np.clip(x, np.float32(-top), np.float32(top)))
    if x.dtype == _E5M2 and dtype == BF16:
        # A multiplication by 2**112 moves the exponent, so that infinity and NaN become numbers.
        bits = np.ascontiguousarray(x).view(np.uint8).astype(np.uint16)
        moved = (((bits & 0x80) << 8) | ((bits & 0x7F) << 5)).view(BF16)
        return (moved.astype(np.float32) * np.float32(2.0**112)).astype(BF16)
    return convert(x, dtype)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the rounded sum of two arrays of one float type and its exact error (Knuth's TwoSum)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the rounded product of two f64 arrays and its exact error (Dekker's product with Veltkamp's splitting)."""
    p = a * b
    split = 134217729.0  # 2**27 + 1 splits the 53 bits of a mantissa into halves
    ah, bh = a * split, b * split
    ah, bh = ah - (ah - a), bh - (bh - b)
    al, bl = a - ah, b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def odd_sum(a: Array, b: Array) -> Array:
    """Return the sum of two f64 arrays, rounded to odd."""
    s, e = two_sum(a, b)
    e = np.where(np.isfinite(e), e, 0.0)
    bits = np.ascontiguousarray(s).view(np.int64)
    inexact = e != 0
    toward_zero = inexact & ((e > 0) != (s > 0))
    return ((bits - toward_zero) | inexact).view(np.float64)


def beyond_splitting(a: Array, b: Array, c: Array) -> Array:
    """Return where ``two_product`` of f64 overflows or loses bits, so that only rational arithmetic is exact."""
    big = (np.abs(a) >= 2.0**990) | (np.abs(b) >= 2.0**990) | (np.abs(c) >= 2.0**1000)
    size = np.abs(a * b)
    return big | ~((size > 2.0**-900) & (size < 2.0**1000))


def _fma_one(a: float, b: float, c: float) -> float:
    """Return one f64 multiply-add, computed in rational arithmetic."""
    if math.isinf(c) and math.isfinite(a) and math.isfinite(b):
        return c
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if not exact:
        return a * b + c if a * b == 0 else 0.0
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


@np.errstate(all="ignore")
def _fma_double(a: Array, b: Array, c: Array) -> Array:
    # Boldo and Melquiond, "Emulation of a FMA and Correctly Rounded Sums: Proved Algorithms Using Rounding to Odd"
    # (2008): the last addition rounds once if the low part was rounded to odd.
    plain = a * b + c
    ph, pl = two_product(a, b)
    th, tl = two_sum(c, pl)
    vh, vl = two_sum(ph, th)
    exact = vh + odd_sum(vl, tl)
    none = (a == 0) | (b == 0)
    # A product that is zero is exact, and the plain sum has the right sign of zero.
    out = np.where(np.isfinite(exact) & ~none, exact, plain)
    rational = beyond_splitting(a, b, c) & ~none
    if rational.any():
        wide = np.broadcast_arrays(a, b, c, rational)
        out = np.broadcast_to(out, wide[3].shape).copy()
        out[wide[3]] = [_fma_one(*v) for v in zip(*(w[wide[3]].tolist() for w in wide[:3]), strict=True)]
    return out


def fma(a: Array, b: Array, c: Array) -> Array:
    """Return ``a * b + c`` with a single rounding; all arrays have one float type and broadcastable shapes."""
    dtype = a.dtype
    if dtype == F64:
        return _fma_double(a, b, c)
    x, y, z = a.astype(np.float64), b.astype(np.float64), c.astype(np.float64)
    x = x * y
    s = x + z
    if dtype.kind == "V":
        return narrow(odd_sum(x, z), dtype)
    if dtype == F32:
        # The product is exact in f64. Rounding the sum to f64 first matters only if the rounded sum is
        # halfway between two f32.
        tie = (s.view(np.int64) & 0x1FFFFFFF) == 0x10000000
        if tie.any():
            s = np.where(tie, odd_sum(x, z), s)
        try:
            with np.errstate(all="ignore", under="raise"):
                return s.astype(dtype)
        except FloatingPointError:
            # Denormals have fewer bits, so that the halfway points differ.
            s = np.where(np.abs(s) < 2.0**-126, odd_sum(x, z), s)
    return s.astype(dtype)
