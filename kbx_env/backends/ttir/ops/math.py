"""Elementary functions: dialect ``math``, libdevice symbols and Triton's own float operations."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special

from kbx_env.backends.ttir.frontend.graph import Op
from kbx_env.backends.ttir.interp.control import Machine, register
from kbx_env.backends.ttir.interp.memory import Array
from kbx_env.backends.ttir.interp.rounding import E4B15, cast, flush, fma
from kbx_env.backends.ttir.ops.libdevice import find

Fn = Callable[..., Any]
"""A function of arrays that returns an array."""


def _special(name: str) -> Fn:
    """Return a function of ``scipy.special``."""
    function = getattr(scipy.special, name)

    def run(*xs: Array) -> Array:
        return np.asarray(function(*xs))

    return run


def _round_away(x: Array) -> Array:
    integer = np.trunc(x)
    return integer + np.copysign(np.abs(x - integer) >= 0.5, x).astype(x.dtype)


def _remainder(a: float, b: float) -> float:
    return math.remainder(a, b) if math.isfinite(a) and b else math.nan


def _exp(x: Array) -> Array:
    # The compiler emits a multiplication and ex2.approx: the rounding of the product shows in the result.
    return np.exp2(x * np.float32(1.44269504)) if x.dtype == np.float32 else np.exp(x)


def _exp2(x: Array) -> Array:
    return flush(np.exp2(x))


def _sqrt(x: Array) -> Array:
    return np.sqrt(flush(x))


def _rsqrt(x: Array) -> Array:
    return x.dtype.type(1) / np.sqrt(flush(x))


def _floor(x: Array) -> Array:
    return np.floor(flush(x))


def _ceil(x: Array) -> Array:
    return np.ceil(flush(x))


def _bit_count(x: Array) -> Array:
    return np.bitwise_count(x.view(f"u{x.dtype.itemsize}")).astype(x.dtype)


def _clz(x: Array) -> Array:
    u = x.view(f"u{x.dtype.itemsize}").copy()
    bits = 8 * x.dtype.itemsize
    for s in (1, 2, 4, 8, 16, 32):
        if s < bits:
            u |= u >> u.dtype.type(s)
    return (bits - np.bitwise_count(u).astype(np.int64)).astype(x.dtype)


def _ctz(x: Array) -> Array:
    return _bit_count((x & -x) - x.dtype.type(1))


def _bessel(name: str, even: bool = True) -> Fn:
    inner = _special(name)
    return lambda x: np.where(np.isinf(x), np.abs(0 / x) if even else 0 / x, inner(flush(x)))


def _second_bessel(name: str) -> Fn:
    inner = _special(name)

    def run(x: Array) -> Array:
        pole = (x > 0) & (flush(x) == 0)
        return np.where(pole, x.dtype.type(-np.inf), np.where(x == np.inf, x.dtype.type(0), inner(x)))

    return run


def _power(x: Array, k: Array) -> Array:
    return np.power(flush(x), k).astype(x.dtype)


def _cbrt(x: Array) -> Array:
    # libdevice scales f32 denormals after they were flushed, and divides zero by zero.
    return np.where((flush(x) == 0) & (x != 0), x.dtype.type(np.nan), np.cbrt(x))


def _next_after(x: Array, y: Array) -> Array:
    # Denormals are flushed: the smallest normal number follows zero.
    if x.dtype != np.float32:
        return np.nextafter(x, y)
    from_zero = np.where(flush(y) == 0, flush(y), np.copysign(np.finfo(np.float32).tiny, y))
    return np.where((flush(x) == 0) & ~np.isnan(y), from_zero, np.nextafter(x, y))


def _pow(x: Array, y: Array) -> Array:
    if x.dtype == np.float32:
        # The exponent field of a flushed denormal is read as that of 2**-127.
        x = np.where((flush(x) == 0) & (x != 0), np.copysign(np.float32(2.0**-127), x), x)
    return flush(np.power(x, y))


def _fast_pow(x: Array, y: Array) -> Array:
    return flush(np.exp2(flush(y * np.log2(_unsigned_zero(x)))))


def _ldexp(x: Array, k: Array) -> Array:
    # A denormal takes the branch for zeros, infinities and NaN, which adds the number to itself.
    return np.where(flush(x) == 0, x + x, np.ldexp(x, k)) if x.dtype == np.float32 else np.ldexp(x, k)


def _difference(a: Array, b: Array) -> Array:
    return np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), np.fmax(a - b, a.dtype.type(0)))


def _gamma(x: Array) -> Array:
    return np.where((x > 0) & (flush(x) == 0), x.dtype.type(np.inf), _special("gamma")(x))


def _quantile(p: Array) -> Array:
    # The argument is doubled before it is flushed.
    return np.where(flush(p + p) == 0, p.dtype.type(-np.inf), _special("ndtri")(p))


def _unsigned_zero(x: Array) -> Array:
    """Replace f32 denormals by the positive zero, like an addition that flushes them."""
    return np.where((flush(x) == 0) & (x != 0), x.dtype.type(0), x)


def _pi(f: Fn, zero: float) -> Fn:
    """Return a function of x that is ``f(pi x)``, exactly zero where x is ``zero`` away from an integer."""

    def run(x: Array) -> Array:
        part = np.fmod(x, 2).astype(np.float64)
        return np.where(np.fmod(np.abs(part), 1) == zero, np.copysign(0.0, x), f(part * np.pi))

    return run


FUNCTIONS: dict[str, Fn] = {
    "exp": _exp, "exp2": _exp2, "exp10": lambda x: np.power(x.dtype.type(10), x), "expm1": np.expm1,
    "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p,
    "sqrt": _sqrt, "rsqrt": _rsqrt, "cbrt": _cbrt,
    "rcbrt": lambda x: x.dtype.type(1) / _cbrt(x),
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "atan2": np.arctan2,
    "sinpi": _pi(np.sin, 0.0), "cospi": _pi(np.cos, 0.5),
    "erf": _special("erf"), "erfc": _special("erfc"), "erfcx": _special("erfcx"),
    "erfinv": lambda x: np.where(x == 0, x, _special("erfinv")(x)),
    "lgamma": lambda x: np.where(np.isinf(x), np.abs(x), _special("gammaln")(x)),
    "normcdf": _special("ndtr"), "normcdfinv": _quantile,
    "j0": _bessel("j0"), "j1": _bessel("j1", even=False),
    "y0": _second_bessel("y0"), "y1": _second_bessel("y1"),
    "cyl_bessel_i0": lambda x: np.where(np.isinf(x), np.abs(x), _special("i0")(x)),
    "cyl_bessel_i1": lambda x: np.where(np.isinf(x) | (x == 0), x, _special("i1")(x)), "tgamma": _gamma,
    "absf": np.abs, "fabs": np.abs, "absi": np.abs, "abs": np.abs, "llabs": np.abs,
    "floor": _floor, "ceil": _ceil, "trunc": np.trunc, "rint": np.rint, "nearbyint": np.rint,
    "roundeven": np.rint, "round": _round_away,
    "pow": _pow, "powf": _pow,
    "fpowi": _power, "powi": _power, "fmod": np.fmod,
    "copysign": np.copysign, "hypot": np.hypot, "fdim": _difference,
    "fmax": np.fmax, "fmin": np.fmin, "max": np.maximum, "min": np.minimum, "fma": fma,
    "nextafter": _next_after, "ldexp": _ldexp, "scalbn": _ldexp,
    "remainder": lambda a, b: np.vectorize(_remainder, otypes=[np.float64])(a, b),
    "rsqrt_rn": lambda x: (1.0 / np.sqrt(x.astype(np.float64))).astype(x.dtype), "fdivide": np.divide,
    "saturate": lambda x: np.fmax(np.minimum(x, 1), 0).astype(x.dtype),
    "isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite, "finite": np.isfinite, "signbit": np.signbit,
    "ctpop": _bit_count, "popc": _bit_count, "ctlz": _clz, "clz": _clz, "cttz": _ctz,
}  # fmt: skip
"""Functions by the common part of their names in the math dialect and in libdevice."""

_ALIASES = {
    "fast_expf": "exp", "fast_exp2f": "exp2", "fast_log2f": "log2",
    "fast_sinf": "sin", "fast_cosf": "cos", "fast_tanf": "tan", "fast_tanhf": "tanh",
    "fast_fdividef": "fdivide", "frsqrt_rn": "rsqrt_rn",
    "isnanf": "isnan", "isnand": "isnan", "isinff": "isinf", "isinfd": "isinf", "finitef": "finite",
    "isfinited": "finite", "signbitf": "signbit", "signbitd": "signbit", "popcll": "popc", "clzll": "clz",
}  # fmt: skip
"""libdevice symbols that do not follow the "name", "namef" pattern."""

_FLUSHED = (
    "fdivide", "saturate", "sin", "cos", "tan", "erf", "erfc", "tanh", "atan", "sinh", "exp10", "asinh", "lgamma",
    "cospi", "atan2", "hypot", "fmod", "asin", "atanh", "erfcx", "remainder",
    "cyl_bessel_i0", "cyl_bessel_i1",
)  # fmt: skip
"""Functions with a visible effect of libdevice's flushing of f32 denormals, in arguments and results."""
_UNSIGNED = ("log1p", "expm1", "sinpi")
"""Functions that lose the sign of a flushed argument."""


def _flushing(f: Fn) -> Fn:
    """Return a function that flushes f32 denormals in the arguments and results of ``f``."""
    return lambda *xs: flush(np.asarray(f(*(flush(x) for x in xs))))


def _after(f: Fn, prepare: Fn) -> Fn:
    """Return a function that applies ``prepare`` to the argument of ``f`` and flushes its results."""
    return lambda x: flush(np.asarray(f(prepare(x))))


for _name in _FLUSHED:
    FUNCTIONS[_name] = _flushing(FUNCTIONS[_name])
for _name in _UNSIGNED:
    FUNCTIONS[_name] = _after(FUNCTIONS[_name], _unsigned_zero)

_LIBDEVICE: dict[str, Fn] = {
    # Unlike tl.exp, libdevice reduces the argument exactly.
    "exp": _flushing(np.exp), "expf": _flushing(np.exp),
    "fabsf": lambda x: flush(np.abs(x)),
    "fast_logf": _after(np.log, _unsigned_zero), "fast_log2f": _after(np.log2, _unsigned_zero),
    "fast_log10f": _after(np.log10, _unsigned_zero), "fast_powf": _fast_pow,
    "fast_exp10f": lambda x: flush(np.exp2(x * np.float32(3.3219281))),
}  # fmt: skip
"""libdevice symbols that differ from the operation of the math dialect with the same name."""
_FLUSHED_THERE = ("erfcinvf", "norm3df", "norm4df")
"""Functions of ``ops.libdevice`` whose f32 arguments and results are flushed."""


def lookup(symbol: str) -> Fn | None:
    """Return the function of a libdevice symbol such as "__nv_expf", ``None`` when it is not implemented."""
    name = symbol.removeprefix("__nv_")
    if name in _LIBDEVICE:
        return _LIBDEVICE[name]
    wrapped = name in _FLUSHED_THERE or re.search(r"_r[nzud]$", name)
    name = _ALIASES.get(name, name)
    if name not in FUNCTIONS and name.endswith("f") and name[:-1] in FUNCTIONS:
        name = name[:-1]
    f = find(name) or FUNCTIONS.get(name)
    return _flushing(f) if f is not None and (wrapped or name == "fma") else f


def _apply(f: Fn, args: list[Array], dtype: np.dtype[Any]) -> Array:
    """Apply a function; floats of fewer than 32 bits are computed in f32 when the result is one."""
    if dtype.itemsize < 4 and dtype.kind in "fV":
        args = [x.astype(np.float32) if x.dtype.kind in "fV" else x for x in args]
    return np.asarray(f(*np.broadcast_arrays(*args) if len(args) > 1 else args)).astype(dtype, copy=False)


@register(*(f"math.{n}" for n in FUNCTIONS))
def _math(m: Machine, op: Op, a: list[Any]) -> Any:
    return _apply(FUNCTIONS[op.name[5:]], a, op.rtypes[0].dtype)


@register("math.fma")
def _fma(m: Machine, op: Op, a: list[Any]) -> Any:
    return fma(*a)


@register("tt.extern_elementwise")
def _extern(m: Machine, op: Op, a: list[Any]) -> Any:
    f = lookup(op.attrs.get("symbol", ""))
    if f is None:
        raise m.unsupported(op, op.attrs.get("symbol", ""))
    return _apply(f, a, op.rtypes[0].dtype)


@register("tt.elementwise_inline_asm")
def _asm(m: Machine, op: Op, a: list[Any]) -> Any:
    text = (op.attrs["strings"] or [""])[0]
    # ``triton.language`` writes the conversions of fp8e4b15 as inline assembly over bytes.
    if len(a) == 1 and "prmt.b32 a0, 0, $2, 0x5746" in text and op.rtypes[0].elem == "f16":
        return cast(a[0].view(E4B15), op.rtypes[0].dtype, "rtne")
    if len(a) == 1 and "max_val_f16x2, 0x3F003F00" in text and op.types[0].elem == "f16":
        return cast(a[0], E4B15, "rtne").view(np.int8)
    raise m.unsupported(op, "inline assembly")


@register("tt.precise_sqrt")
def _precise_sqrt(m: Machine, op: Op, a: list[Any]) -> Any:
    return np.sqrt(a[0])


@register("tt.precise_divf")
def _div(m: Machine, op: Op, a: list[Any]) -> Any:
    return np.divide(a[0], a[1])


@register("tt.clampf")
def _clamp(m: Machine, op: Op, a: list[Any]) -> Any:
    if op.attrs.get("propagateNan") == "all":
        return np.minimum(np.maximum(a[0], a[1]), a[2])
    out = np.fmin(np.fmax(a[0], a[1]), a[2])
    if out.dtype in (np.float16, np.float32):
        # Symmetric bounds become min.xorsign.abs: a NaN becomes the bound on the side of its sign.
        lost = np.isnan(a[0])
        if lost.any():
            out = np.where(lost & (a[1] == -a[2]), np.copysign(a[2], a[0]), out)
    return out
