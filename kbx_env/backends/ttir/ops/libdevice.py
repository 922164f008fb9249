"""The libdevice functions that are not elementary functions.

Conversions and arithmetic with directed rounding, bit manipulation and norms; ``ops.math`` has the others.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import scipy.special

from kbx_env.backends.ttir.interp.memory import Array
from kbx_env.backends.ttir.interp.rounding import (
    beyond_splitting,
    flush,
    fma,
    from_int,
    odd_sum,
    to_int,
    two_product,
    two_sum,
)

Fn = Callable[..., Any]
_I32, _I64 = np.dtype(np.int32), np.dtype(np.int64)
_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
_ROUND: dict[str, Fn] = {"n": np.rint, "z": np.trunc, "u": np.ceil, "d": np.floor}
"""Roundings to integers by the letter of their mode: to nearest, toward zero, up, down."""


def _step(near: Array, error: Array, mode: str) -> Array:
    """Turn a rounding to nearest into a directed rounding.

    Args:
        near: The rounded values.
        error: A number with the sign of the exact value minus ``near``.
        mode: A key of ``_ROUND``.

    Returns:
        The values rounded in the given direction.
    """
    if mode == "n":
        return near
    inf = near.dtype.type(np.inf)
    below = (error < 0) if mode == "d" else (error < 0) & (near > 0) if mode == "z" else np.zeros(error.shape, bool)
    above = (error > 0) if mode == "u" else (error > 0) & (near < 0) if mode == "z" else np.zeros(error.shape, bool)
    out = np.where(below, np.nextafter(near, -inf), near)
    return np.where(above, np.nextafter(near, inf), out)


def _error_one(kind: str, near: float, *xs: float) -> int:
    """Return the sign of the exact result of an operation ``kind`` on ``xs`` (f64) minus ``near``."""
    n, (x, *rest) = Fraction(near), map(Fraction, xs)
    if kind == "div":
        error = (x - n * rest[0]) * (1 if rest[0] > 0 else -1)
    elif kind == "mul":
        error = x * rest[0] - n
    elif kind == "fma":
        error = x * rest[0] + rest[1] - n
    else:
        error = x - n * n if kind == "sqrt" else x + rest[0] - n
    return (error > 0) - (error < 0)


def _error_double(kind: str, near: Array, xs: list[Array]) -> Array:
    """Return numbers with the sign of the exact result of an f64 operation minus its rounding to nearest.

    Args:
        kind: "add", "mul", "div", "sqrt" or "fma".
        near: The rounded results.
        xs: The operands.

    Returns:
        f64; 0 where an operand or the result is not finite.
    """
    x, y, z = (*xs, near, near)[:3]
    if kind == "add":
        error, odd = two_sum(x, y)[1], (np.abs(x) >= 2.0**1000) | (np.abs(y) >= 2.0**1000)
    elif kind == "mul":
        error, odd = two_product(x, y)[1], beyond_splitting(x, y, near)
    elif kind == "fma":
        # The error of a fused multiply-add is the sum of two floats (Boldo and Muller, "Exact and Approximated Error of
        # the FMA", 2011).
        high, low = two_product(x, y)
        first, rest = two_sum(z, low)
        total, left = two_sum(high, first)
        error, odd = ((total - near) + left) + rest, beyond_splitting(x, y, z)
    else:
        root = kind == "sqrt"
        error = fma(-near, near, x) if root else fma(-near, y, x) * np.sign(y)
        odd = np.abs(x) <= 2.0**-900
    valid = np.isfinite(near)
    for v in xs:
        valid = valid & np.isfinite(v)
    odd = odd & valid & ((y != 0) if kind == "div" else True)
    error = np.where(valid, error, 0.0)
    if odd.any():
        lanes = zip(*(np.broadcast_to(v, odd.shape)[odd].tolist() for v in (near, *xs)), strict=True)
        error[odd] = [_error_one(kind, *v) for v in lanes]
    return error


def _directed(kind: str, mode: str) -> Fn:
    """Return an operation with a rounding mode.

    Args:
        kind: "add", "sub", "mul", "div", "sqrt", "rcp" or "fma".
        mode: A key of ``_ROUND``.

    Returns:
        A function of f32 or f64 arrays.
    """

    @np.errstate(all="ignore")
    def run(*operands: Array) -> Array:
        xs, name = [np.asarray(x) for x in operands], kind
        if kind == "rcp":
            xs, name = [np.ones_like(xs[0]), xs[0]], "div"
        elif kind == "sub":
            xs, name = [xs[0], -xs[1]], "add"
        single = xs[0].dtype == _F32
        w = [x.astype(np.float64) for x in xs]
        if name == "add":
            near = xs[0] + xs[1]
            error = odd_sum(*w) - near if single else None
        elif name == "mul":
            near = xs[0] * xs[1]
            error = w[0] * w[1] - near if single else None
        elif name == "sqrt":
            near = np.sqrt(xs[0])
            error = np.sqrt(w[0]) - near if single else None
        elif name == "fma":
            near = fma(*xs)
            error = odd_sum(w[0] * w[1], w[2]) - near if single else None
        else:
            near = xs[0] / xs[1]
            error = w[0] / w[1] - near if single else None
        if error is None:
            error = _error_double(name, near, xs)
        error = np.where(np.isfinite(near), error, 0.0)
        if mode == "d" and name in ("add", "fma"):
            # With rounding down, an exact sum of zero is the negative zero.
            left = np.signbit(xs[0]) if name == "add" else np.signbit(xs[0]) ^ np.signbit(xs[1])
            none = (near == 0) & (error == 0) & (left | np.signbit(xs[-1]))
            near = np.where(none, near.dtype.type(-0.0), near)
        out = _step(near, error, mode)
        finite = np.isfinite(w[0])
        for x in w[1:]:
            finite = finite & np.isfinite(x)
        # A quotient by zero is infinite in every mode; an overflow is not.
        return _bounded(out, finite & (w[1] != 0) if name == "div" else finite, mode)

    return run


def _bounded(out: Array, finite: Array, mode: str) -> Array:
    """Replace an overflow of finite operands by the largest number where the mode rounds toward it."""
    stops = {"n": (), "z": (-1, 1), "u": (-1,), "d": (1,)}[mode]
    top = np.finfo(out.dtype).max
    for sign in stops:
        out = np.where(finite & (out == sign * np.inf), out.dtype.type(sign * top), out)
    return out


def _float_to_int(dtype: np.dtype[Any], is_signed: bool, mode: str) -> Fn:
    return lambda x: to_int(_ROUND[mode](x), dtype, is_signed)


def _int_to_float(dtype: np.dtype[Any], is_signed: bool, mode: str) -> Fn:
    def run(x: Array) -> Array:
        v = x if is_signed else x.view(f"u{x.dtype.itemsize}")
        near = from_int(v, dtype)
        if mode == "n":
            return near
        # Python integers, because 64-bit values are not exact in any float type.
        flat = [int(a) - int(b) for a, b in zip(v.reshape(-1).tolist(), near.reshape(-1).tolist(), strict=True)]
        return _step(near, np.array(flat, np.float64).reshape(near.shape), mode)

    return run


def _double_to_float(mode: str) -> Fn:
    def run(x: Array) -> Array:
        near = x.astype(np.float32)
        return _bounded(_step(near, np.where(np.isfinite(near), x - near, 0.0), mode), np.isfinite(x), mode)

    return run


def _reverse_bits(x: Array) -> Array:
    size = x.dtype.itemsize
    raw = np.ascontiguousarray(x).reshape(-1, 1).view(np.uint8)
    bits = np.unpackbits(raw, axis=1, bitorder="little")[:, ::-1]
    return np.packbits(bits, axis=1, bitorder="little").view(f"i{size}").reshape(x.shape)


def _byte_perm(x: Array, y: Array, s: Array) -> Array:
    both = (y.view(np.uint32).astype(np.uint64) << np.uint64(32)) | x.view(np.uint32)
    out = np.zeros(np.broadcast_shapes(x.shape, y.shape, s.shape), np.uint32)
    for k in range(4):
        pick = ((s >> (4 * k)) & 7).astype(np.uint64)
        out = out | (((both >> (pick * np.uint64(8))) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * k))
    return out.view(np.int32)


def _first_set(x: Array) -> Array:
    low = (x & -x).view(f"u{x.dtype.itemsize}")
    return np.where(x == 0, 0, np.bitwise_count(low - low.dtype.type(1)).astype(np.int32) + 1)


def _high(is_signed: bool) -> Fn:
    def run(a: Array, b: Array) -> Array:
        if a.dtype == _I32:
            k = "i" if is_signed else "u"
            return ((a.view(f"{k}4").astype(f"{k}8") * b.view(f"{k}4").astype(f"{k}8")) >> 32).astype(np.int32)
        mask = (1 << 64) - 1
        one = (lambda v: int(v)) if is_signed else (lambda v: int(v) & mask)
        flat = [(one(p) * one(q)) >> 64 for p, q in np.broadcast(a, b)]
        bits = np.array([v & mask for v in flat], np.uint64)
        return bits.view(np.int64).reshape(np.broadcast_shapes(a.shape, b.shape))

    return run


def _mul24(is_signed: bool) -> Fn:
    def run(a: Array, b: Array) -> Array:
        low = [(v << 8) >> 8 if is_signed else v & 0xFFFFFF for v in (a, b)]
        return (low[0].astype(np.int64) * low[1]).astype(np.int32)

    return run


def _average(is_signed: bool, extra: int) -> Fn:
    def run(a: Array, b: Array) -> Array:
        x, y = (v.astype(np.int64) if is_signed else v.view(np.uint32).astype(np.int64) for v in (a, b))
        return ((x + y + extra) >> 1).astype(np.int32)

    return run


def _sad(is_signed: bool) -> Fn:
    def run(a: Array, b: Array, c: Array) -> Array:
        x, y = (v.astype(np.int64) if is_signed else v.view(np.uint32).astype(np.int64) for v in (a, b))
        return (np.abs(x - y) + c).astype(np.int32)

    return run


def _length(xs: tuple[Array, ...]) -> Array:
    """Return the Euclidean norm of a vector in f64: infinite when a component is, even if another one is NaN."""
    xs = tuple(flush(x) for x in xs)
    infinite = np.logical_or.reduce([np.isinf(x) for x in xs])
    return np.where(infinite, np.inf, np.sqrt(sum(x.astype(np.float64) ** 2 for x in xs)))


def _norm(*xs: Array) -> Array:
    return _length(xs).astype(xs[0].dtype)


def _rnorm(*xs: Array) -> Array:
    return (1.0 / _length(xs)).astype(xs[0].dtype)


def _logb(x: Array) -> Array:
    e = np.frexp(x)[1] - 1
    return np.where(np.isfinite(x), np.where(x == 0, -np.inf, e), np.abs(x)).astype(x.dtype)


def _ilogb(x: Array) -> Array:
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    e = np.frexp(x)[1] - 1
    return np.where(np.isnan(x) | (x == 0), low, np.where(np.isinf(x), high, e)).astype(np.int32)


def _round_to_int(x: Array) -> Array:
    integer = np.trunc(x)
    return to_int(integer + np.copysign(np.abs(x - integer) >= 0.5, x), _I64, True)


def _halves(which: int) -> Fn:
    return lambda x: np.ascontiguousarray(x).view(np.int64) >> 32 if which else np.ascontiguousarray(x).view(np.int64)


def _bits(kind: str) -> Fn:
    return lambda x: np.ascontiguousarray(x).view(kind)


TABLE: dict[str, Fn] = {  # functions by the symbol without its prefix
    "brev": _reverse_bits, "brevll": _reverse_bits, "byte_perm": _byte_perm, "ffs": _first_set, "ffsll": _first_set,
    "mulhi": _high(True), "umulhi": _high(False), "mul64hi": _high(True), "umul64hi": _high(False),
    "mul24": _mul24(True), "umul24": _mul24(False), "hadd": _average(True, 0), "uhadd": _average(False, 0),
    "rhadd": _average(True, 1), "urhadd": _average(False, 1), "sad": _sad(True), "usad": _sad(False),
    "norm3d": _norm, "norm4d": _norm, "rnorm3d": _rnorm, "rnorm4d": _rnorm, "rhypot": _rnorm,
    "logb": _logb, "ilogb": _ilogb, "jn": lambda n, x: scipy.special.jv(n, x),
    "yn": lambda n, x: scipy.special.yn(n, x), "erfcinv": lambda x: scipy.special.erfcinv(x) + 0.0,
    "llrint": _float_to_int(_I64, True, "n"),
    "llround": _round_to_int,
    "double2hiint": _halves(1), "double2loint": _halves(0),
    "hiloint2double": lambda h, l: ((h.astype(np.int64) << 32) | l.view(np.uint32).astype(np.int64)).view(np.float64),
    "rcp64h": lambda x: ((1.0 / x).view(np.int64) & ~np.int64(0xFFFFFFFF)).view(np.float64), "float_as_int": _bits("i4"),
    "float_as_uint": _bits("i4"), "int_as_float": _bits("f4"), "uint_as_float": _bits("f4"),
    "double_as_longlong": _bits("i8"), "longlong_as_double": _bits("f8"),
}  # fmt: skip
for _mode in "nzud":
    for _kind in ("add", "sub", "mul", "div", "sqrt", "rcp", "fma"):
        for _name in (f"f{_kind}_r{_mode}", f"d{_kind}_r{_mode}", f"{_kind}_r{_mode}"):
            TABLE[_name] = _directed(_kind, _mode)
    TABLE[f"fmaf_r{_mode}"] = TABLE[f"fma_r{_mode}"]
    TABLE[f"double2float_r{_mode}"] = _double_to_float(_mode)
    for _int, _dt, _sg in (("int", _I32, True), ("uint", _I32, False), ("ll", _I64, True), ("ull", _I64, False)):
        for _flt, _fd in (("float", _F32), ("double", _F64)):
            TABLE[f"{_flt}2{_int}_r{_mode}"] = _float_to_int(_dt, _sg, _mode)
            TABLE[f"{_int}2{_flt}_r{_mode}"] = _int_to_float(_fd, _sg, _mode)
for _flt, _fd in (("float", _F32), ("double", _F64)):
    TABLE[f"int2{_flt}"] = _int_to_float(_fd, True, "n")
    TABLE[f"uint2{_flt}"] = _int_to_float(_fd, False, "n")


def find(name: str) -> Fn | None:
    """Return the function of a symbol without the prefix "__nv_", ``None`` when it is not in the table."""
    return TABLE.get(name) or (TABLE.get(name[:-1]) if name.endswith("f") else None)
