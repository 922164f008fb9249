"""Elementary functions: dialect ``math``, libdevice symbols and Triton's own float operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special

from .control import Machine, register
from .graph import Op
from .memory import Array

Fn = Callable[..., Any]


def _special(name: str) -> Fn:
    function = getattr(scipy.special, name)

    def run(*xs: Array) -> Array:
        return np.asarray(function(*xs))

    return run


def _round_away(x: Array) -> Array:
    return np.copysign(np.trunc(np.abs(x) + x.dtype.type(0.5)), x)


def _fma(a: Array, b: Array, c: Array) -> Array:
    # The product of two f32 is exact in f64, so that only the final rounding differs in rare ties.
    if a.dtype == np.float32:
        return (a.astype(np.float64) * b + c).astype(np.float32)
    return a * b + c


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


#: Functions by the common part of their names in the math dialect and in libdevice.
FUNCTIONS: dict[str, Fn] = {
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: np.power(x.dtype.type(10), x), "expm1": np.expm1,
    "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p,
    "sqrt": np.sqrt, "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x), "cbrt": np.cbrt,
    "rcbrt": lambda x: x.dtype.type(1) / np.cbrt(x),
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "atan2": np.arctan2,
    "sinpi": lambda x: np.sin(x * x.dtype.type(np.pi)), "cospi": lambda x: np.cos(x * x.dtype.type(np.pi)),
    "erf": _special("erf"), "erfc": _special("erfc"), "erfinv": _special("erfinv"), "erfcx": _special("erfcx"),
    "lgamma": _special("gammaln"), "normcdf": _special("ndtr"), "normcdfinv": _special("ndtri"),
    "j0": _special("j0"), "j1": _special("j1"), "y0": _special("y0"), "y1": _special("y1"),
    "cyl_bessel_i0": _special("i0"), "cyl_bessel_i1": _special("i1"), "tgamma": lambda x: np.exp(_special("gammaln")(x)),
    "absf": np.abs, "fabs": np.abs, "absi": np.abs, "abs": np.abs, "llabs": np.abs,
    "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint, "nearbyint": np.rint,
    "roundeven": np.rint, "round": _round_away,
    "pow": np.power, "powf": np.power, "fpowi": np.power, "powi": np.power, "fmod": np.fmod,
    "copysign": np.copysign, "hypot": np.hypot, "fdim": lambda a, b: np.fmax(a - b, a.dtype.type(0)),
    "fmax": np.fmax, "fmin": np.fmin, "max": np.maximum, "min": np.minimum, "fma": _fma,
    "nextafter": np.nextafter, "ldexp": np.ldexp,
    "remainder": lambda a, b: a - np.rint(a / b) * b,
    "div_rn": np.divide, "mul_rn": np.multiply, "add_rn": np.add, "sub_rn": np.subtract,
    "sqrt_rn": np.sqrt, "rsqrt_rn": lambda x: x.dtype.type(1) / np.sqrt(x),
    "fdivide": np.divide, "fast_div": np.divide, "saturate": lambda x: np.fmax(np.fmin(x, 1), 0).astype(x.dtype),
    "rcp_rn": lambda x: x.dtype.type(1) / x,
    "isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite, "finite": np.isfinite, "signbit": np.signbit,
    "ctpop": _bit_count, "popc": _bit_count, "ctlz": _clz, "clz": _clz, "cttz": _ctz,
}  # fmt: skip

#: libdevice symbols that do not follow the "name", "namef" pattern.
_ALIASES = {
    "fast_expf": "exp", "fast_exp2f": "exp2", "fast_exp10f": "exp10", "fast_logf": "log", "fast_log2f": "log2",
    "fast_log10f": "log10", "fast_sinf": "sin", "fast_cosf": "cos", "fast_tanf": "tan", "fast_tanhf": "tanh",
    "fast_powf": "pow", "fast_fdividef": "fdivide", "fdiv_rn": "div_rn", "ddiv_rn": "div_rn",
    "fsqrt_rn": "sqrt", "dsqrt_rn": "sqrt", "frsqrt_rn": "rsqrt", "fmul_rn": "mul_rn", "dmul_rn": "mul_rn",
    "fadd_rn": "add_rn", "dadd_rn": "add_rn", "fsub_rn": "sub_rn", "dsub_rn": "sub_rn",
    "fmaf_rn": "fma", "fma_rn": "fma", "frcp_rn": "rcp_rn", "drcp_rn": "rcp_rn",
    "isnanf": "isnan", "isnand": "isnan", "isinff": "isinf", "isinfd": "isinf", "finitef": "finite",
    "isfinited": "finite", "signbitf": "signbit", "signbitd": "signbit", "popcll": "popc", "clzll": "clz",
    "llroundf": "round", "llrintf": "rint", "floorf": "floor", "fabsf": "fabs",
}  # fmt: skip


def lookup(symbol: str) -> Fn | None:
    """Return the function of a libdevice symbol, None when there is none."""
    name = symbol.removeprefix("__nv_")
    name = _ALIASES.get(name, name)
    return FUNCTIONS.get(name) or (FUNCTIONS.get(name[:-1]) if name.endswith("f") else None)


def _apply(f: Fn, args: list[Array], dtype: np.dtype[Any]) -> Array:
    if dtype.itemsize < 4 and dtype.kind in "fV":
        args = [x.astype(np.float32) if x.dtype.kind in "fV" else x for x in args]
    return np.asarray(f(*args)).astype(dtype, copy=False)


@register(*(f"math.{n}" for n in FUNCTIONS))
def _math(m: Machine, op: Op, a: list[Any]) -> Any:
    return _apply(FUNCTIONS[op.name[5:]], a, op.rtypes[0].dtype)


@register("tt.extern_elementwise")
def _extern(m: Machine, op: Op, a: list[Any]) -> Any:
    f = lookup(op.attrs.get("symbol", ""))
    if f is None:
        raise m.unsupported(op, op.attrs.get("symbol", ""))
    return _apply(f, a, op.rtypes[0].dtype)


@register("tt.elementwise_inline_asm")
def _asm(m: Machine, op: Op, a: list[Any]) -> Any:
    raise m.unsupported(op, "inline assembly")


@register("tt.precise_sqrt")
def _sqrt(m: Machine, op: Op, a: list[Any]) -> Any:
    return np.sqrt(a[0])


@register("tt.precise_divf")
def _div(m: Machine, op: Op, a: list[Any]) -> Any:
    return np.divide(a[0], a[1])


@register("tt.clampf")
def _clamp(m: Machine, op: Op, a: list[Any]) -> Any:
    if op.attrs.get("propagateNan") == "all":
        return np.minimum(np.maximum(a[0], a[1]), a[2])
    return np.fmin(np.fmax(a[0], a[1]), a[2])
