"""Integer and floating point arithmetic, comparisons and conversions (dialect ``arith``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kbx_env.backends.ttir.frontend.graph import Op
from kbx_env.backends.ttir.interp.control import Machine, register, select
from kbx_env.backends.ttir.interp.memory import Array
from kbx_env.backends.ttir.interp.rounding import cast, convert, fma, from_int, to_int


def unsigned(a: Array) -> Array:
    """View integers as unsigned, booleans as bytes."""
    if a.dtype == np.bool_:
        return a.view(np.uint8)
    return a.view(f"u{a.dtype.itemsize}") if a.dtype.kind == "i" else a


def signed(a: Array) -> Array:
    """View booleans as 0 and -1, which is how ``i1`` reads as a signed number."""
    return -a.astype(np.int8) if a.dtype == np.bool_ else a


def _int_binary(on_ints: Callable[..., Any], on_bits: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the handler of a binary operation, with another function for ``i1`` operands if there is one."""

    def run(m: Machine, op: Op, a: list[Any]) -> Any:
        if on_bits is not None and a[0].dtype == np.bool_:
            return on_bits(a[0], a[1])
        return on_ints(a[0], a[1])

    return run


def _scalar(b: Array) -> Any:
    """Return a one-element array as a numpy scalar, which numpy divides by faster."""
    return b.reshape(-1)[0] if b.size == 1 else b


def _shape(out: Any, *a: Array) -> Array:
    return np.asarray(out).reshape(np.broadcast_shapes(*(x.shape for x in a)))


def divide(a: Array, b: Array) -> Array:
    """Divide integers, rounding toward zero.

    Args:
        a: Dividends, signed or unsigned.
        b: Divisors of the same dtype, broadcastable with ``a``.

    Returns:
        The quotients in the broadcast shape; 0 for a zero divisor.
    """
    d = _scalar(b)
    q = _shape(np.floor_divide(a, d), a, b)
    if a.size and a.dtype.kind == "i" and (a.min() < 0 or b.min() < 0):
        q = q + ((np.asarray(q * b) != a) & ((a < 0) != (b < 0)) & (b != 0)).astype(a.dtype)
    return q


def _divui(a: Array, b: Array) -> Array:
    return _shape(np.floor_divide(unsigned(a), _scalar(unsigned(b))), a, b).view(a.dtype)


def _remui(a: Array, b: Array) -> Array:
    return _shape(np.remainder(unsigned(a), _scalar(unsigned(b))), a, b).view(a.dtype)


def _ceildiv(a: Array, b: Array) -> Array:
    return -np.floor_divide(-a, b)


def _shift(kind: str) -> Callable[[Array, Array], Array]:
    def run(a: Array, b: Array) -> Array:
        if kind == "l":
            return np.left_shift(a, b)
        if kind == "u":
            return np.right_shift(unsigned(a), unsigned(b)).view(a.dtype)
        return np.right_shift(a, b)

    return run


def _us(f: Callable[..., Any]) -> Callable[[Array, Array], Array]:
    return lambda a, b: np.ascontiguousarray(f(unsigned(a), unsigned(b))).view(a.dtype)


_BINARY: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
    "addi": (np.add, np.bitwise_xor),
    "subi": (np.subtract, np.bitwise_xor),
    "muli": (np.multiply, np.bitwise_and),
    "andi": (np.bitwise_and, None),
    "ori": (np.bitwise_or, None),
    "xori": (np.bitwise_xor, None),
    "maxsi": (np.maximum, np.bitwise_and),
    "minsi": (np.minimum, np.bitwise_or),
    "maxui": (_us(np.maximum), np.bitwise_or),
    "minui": (_us(np.minimum), np.bitwise_and),
    "divsi": (divide, np.bitwise_and),
    "divui": (_divui, np.bitwise_and),
    "remsi": (lambda a, b: np.fmod(a, b), lambda a, b: a & ~b),
    "remui": (_remui, lambda a, b: a & ~b),
    "floordivsi": (np.floor_divide, None),
    "ceildivsi": (_ceildiv, None),
    "ceildivui": (lambda a, b: _ceildiv(unsigned(a).astype(object), unsigned(b)).astype(a.dtype), None),
    "shli": (_shift("l"), lambda a, b: a & ~b),
    "shrsi": (_shift("s"), lambda a, b: a),
    "shrui": (_shift("u"), lambda a, b: a & ~b),
    "addf": (np.add, None),
    "subf": (np.subtract, None),
    "mulf": (np.multiply, None),
    "divf": (np.divide, None),
    "maxnumf": (np.fmax, None),
    "minnumf": (np.fmin, None),
    "maximumf": (np.maximum, None),
    "minimumf": (np.minimum, None),
}
"""Functions of binary operations on numbers, and on ``i1`` where it needs another one."""
for _name, (_f, _g) in _BINARY.items():
    register(f"arith.{_name}")(_int_binary(_f, _g))


def _repeated(x: Array, chain: list[Op]) -> Array:
    """Apply the shape operations that lie between a product and its sum."""
    for op in chain:
        if op.name == "tt.splat":
            x = x.reshape((len(x),) + (1,) * len(op.rtypes[0].shape))
        elif op.name == "tt.expand_dims":
            x = np.expand_dims(x, op.attrs["axis"] + 1)
    return x


@register("arith.addf", "arith.subf")
def _sum(m: Machine, op: Op, a: list[Any]) -> Any:
    minus = op.name == "arith.subf"
    fused = op.attrs.get("fused")
    if fused is None:
        return np.subtract(a[0], a[1]) if minus else np.add(a[0], a[1])
    k, chain = fused
    x, y, z = a
    if chain:
        x, y = _repeated(x, chain), _repeated(y, chain)
    if minus:
        x, z = (x, np.negative(z)) if k == 0 else (np.negative(x), z)
    return fma(x, y, z)


@register("arith.remf")
def _remf(m: Machine, op: Op, a: list[Any]) -> Any:
    """Compute ``x - trunc(x / y) * y``, as the compiler expands it, not the exact remainder."""
    dtype = a[0].dtype
    x, y = (v.astype(np.float32) if dtype.itemsize < 4 else v for v in a)
    out = np.where(np.isinf(y), x, fma(-np.trunc(x / y), y, x))
    return convert(out, dtype)


COMBINE = {
    f"arith.{n}": _BINARY[n][0]
    for n in ("addi", "muli", "andi", "ori", "xori", "maxsi", "minsi", "addf", "mulf",
              "maxnumf", "minnumf", "maximumf", "minimumf")
}  # fmt: skip
"""Functions of the one-operation combine regions that reductions and scans run directly."""

_INT_CMP = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


@register("arith.cmpi")
def _cmpi(m: Machine, op: Op, a: list[Any]) -> Any:
    pred = op.attrs["word"]
    if pred in ("eq", "ne"):
        return _INT_CMP[pred](a[0], a[1])
    view = unsigned if pred[0] == "u" else signed
    return _INT_CMP[pred[1:]](view(a[0]), view(a[1]))


@register("arith.cmpf")
def _cmpf(m: Machine, op: Op, a: list[Any]) -> Any:
    pred = op.attrs["word"]
    x, y = a[0], a[1]
    if pred in ("true", "false", "ord", "uno"):
        nan = np.isnan(x) | np.isnan(y)
        return {"true": nan | True, "false": nan & False, "ord": ~nan, "uno": nan}[pred]
    out = _INT_CMP[pred[1:]](x, y)
    # Numpy comparisons are ordered except for !=, which is true for NaN.
    if pred == "one":
        return out & ~(np.isnan(x) | np.isnan(y))
    if pred[0] == "u" and pred != "une":
        return out | np.isnan(x) | np.isnan(y)
    return out


@register("arith.select")
def _select(m: Machine, op: Op, a: list[Any]) -> Any:
    cond, x, y = a
    if not isinstance(x, np.ndarray):
        return select(np.broadcast_to(cond, (m.programs,)), x, y)
    if cond.ndim < x.ndim:
        cond = cond.reshape(cond.shape + (1,) * (x.ndim - cond.ndim))
    return np.where(cond, x, y)


@register("arith.constant")
def _constant(m: Machine, op: Op, a: list[Any]) -> Any:
    return op.attrs["value"]


@register("arith.negf")
def _negf(m: Machine, op: Op, a: list[Any]) -> Any:
    return np.negative(a[0])


@register("arith.extsi")
def _extsi(m: Machine, op: Op, a: list[Any]) -> Any:
    return signed(a[0]).astype(op.rtypes[0].dtype)


@register("arith.extui", "arith.index_castui")
def _extui(m: Machine, op: Op, a: list[Any]) -> Any:
    return unsigned(a[0]).astype(op.rtypes[0].dtype)


@register("arith.trunci")
def _trunci(m: Machine, op: Op, a: list[Any]) -> Any:
    if op.rtypes[0].elem == "i1":
        return (a[0] & 1).astype(np.bool_)
    return a[0].astype(op.rtypes[0].dtype)


@register("arith.index_cast")
def _index_cast(m: Machine, op: Op, a: list[Any]) -> Any:
    return signed(a[0]).astype(op.rtypes[0].dtype)


@register("arith.extf", "arith.truncf")
def _resize(m: Machine, op: Op, a: list[Any]) -> Any:
    return convert(a[0], op.rtypes[0].dtype)


@register("tt.fp_to_fp")
def _fp_to_fp(m: Machine, op: Op, a: list[Any]) -> Any:
    return cast(a[0], op.rtypes[0].dtype, op.attrs.get("rounding", "rtne"))


@register("arith.sitofp")
def _sitofp(m: Machine, op: Op, a: list[Any]) -> Any:
    return from_int(signed(a[0]), op.rtypes[0].dtype)


@register("arith.uitofp")
def _uitofp(m: Machine, op: Op, a: list[Any]) -> Any:
    return from_int(unsigned(a[0]), op.rtypes[0].dtype)


@register("arith.fptosi", "arith.fptoui")
def _fptoint(m: Machine, op: Op, a: list[Any]) -> Any:
    if op.rtypes[0].elem == "i1":
        return a[0] != 0
    return to_int(a[0], op.rtypes[0].dtype, op.name == "arith.fptosi")


@register("arith.bitcast", "tt.bitcast")
def _bitcast(m: Machine, op: Op, a: list[Any]) -> Any:
    dt = op.rtypes[0].dtype
    if a[0].dtype == dt:
        return a[0]
    if dt == np.bool_ or a[0].dtype == np.bool_:
        return a[0].astype(dt)
    return a[0].view(dt)


def _wide(a: Array, b: Array, is_signed: bool) -> tuple[Array, Array]:
    """Return the low and the high half of the full product of integers."""
    size = a.dtype.itemsize
    if size < 8:
        kind = "i" if is_signed else "u"
        x, y = (a, b) if is_signed else (unsigned(a), unsigned(b))
        p = x.astype(f"{kind}8") * y.astype(f"{kind}8")
        return p.astype(a.dtype), (p >> (8 * size)).astype(a.dtype)
    x, y = unsigned(a), unsigned(b)
    mask, s = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, y0, y1 = x & mask, x >> s, y & mask, y >> s
    mid = x1 * y0 + ((x0 * y0) >> s)
    mid2 = x0 * y1 + (mid & mask)
    high = (x1 * y1 + (mid >> s) + (mid2 >> s)).view(np.int64)
    if is_signed:
        high = high - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)
    return a * b, high


@register("arith.mulsi_extended")
def _mulsi(m: Machine, op: Op, a: list[Any]) -> Any:
    return _wide(a[0], a[1], True)


@register("arith.mului_extended")
def _mului(m: Machine, op: Op, a: list[Any]) -> Any:
    return _wide(a[0], a[1], False)


@register("tt.mulhiui")
def _mulhiui(m: Machine, op: Op, a: list[Any]) -> Any:
    return _wide(a[0], a[1], False)[1]


@register("arith.addui_extended")
def _addui(m: Machine, op: Op, a: list[Any]) -> Any:
    total = a[0] + a[1]
    return total, unsigned(total) < unsigned(a[0])
