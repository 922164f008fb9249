"""Matrix products, with the operand rounding of the tensor cores."""

from __future__ import annotations

from typing import Any

import numpy as np

from kbx_env.backends.ttir.frontend.graph import Op
from kbx_env.backends.ttir.interp.control import Machine, register
from kbx_env.backends.ttir.interp.memory import Array
from kbx_env.backends.ttir.interp.rounding import BF16, convert
from kbx_env.backends.ttir.ops.tensor import full


def tf32(x: Array, nearest: bool = False) -> Array:
    """Reduce f32 to the 10 mantissa bits of TF32.

    For ``input_precision="tf32"`` the compiler passes the bits of the f32 operands to ``mma`` and
    ``wgmma`` without a conversion, and these ignore the low 13 bits: a truncation. Only the split
    of tf32x3 uses ``cvt.rna.tf32``, which rounds to nearest, ties away from zero.

    Args:
        x: f32, any shape.
        nearest: Round as ``cvt.rna.tf32`` instead of truncating.

    Returns:
        f32, shape of ``x``; infinities and NaN stay as they are.
    """
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    out = ((bits + np.uint32(0x1000 if nearest else 0)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), out, x)


def _split_tf32(x: Array) -> tuple[Array, Array]:
    """Split f32 into a large and a small part with 10 mantissa bits each."""
    big = tf32(x, nearest=True)
    return big, tf32(x - big)


def _split_bf16(x: Array, parts: int) -> list[Array]:
    """Split f32 into bf16 numbers, as f32, whose sum approximates it; the largest comes first."""
    out = []
    for _ in range(parts):
        big = x.astype(BF16).astype(np.float32)
        out.append(big)
        x = x - big
    return out


def _no_nan(x: Array) -> Array:
    # As the compiler does: the small part of an infinite operand is inf - inf.
    return np.where(np.isnan(x), np.float32(0), x)


def product(x: Array, y: Array, precision: str) -> Array:
    """Multiply f32 matrices with one of Triton's input precisions.

    Args:
        x: f32, (..., rows, inner).
        y: f32, (..., inner, columns).
        precision: "tf32", "tf32x3", "bf16x3", "bf16x6" or "ieee".

    Returns:
        f32, (..., rows, columns).
    """
    if precision == "tf32":
        return np.matmul(tf32(x), tf32(y))
    if precision == "tf32x3":
        (xb, xs), (yb, ys) = _split_tf32(x), _split_tf32(y)
        return _no_nan(np.matmul(xs, yb) + np.matmul(xb, ys)) + np.matmul(xb, yb)
    if precision in ("bf16x3", "bf16x6"):
        a, b = _split_bf16(x, 3), _split_bf16(y, 3)
        pairs = [(1, 0), (0, 1)]
        if precision == "bf16x6":
            pairs = [(1, 1), (2, 0), (0, 2), *pairs]
        small = sum(np.matmul(a[i], b[j]) for i, j in pairs)
        return _no_nan(np.asarray(small)) + np.matmul(a[0], b[0])
    return np.matmul(x, y)


@register("tt.dot")
def _dot(m: Machine, op: Op, a: list[Any]) -> Any:
    ta, tb, out = op.types[0], op.types[1], op.rtypes[0]
    x, y = full(a[0], ta), full(a[1], tb)
    rows, inner = ta.shape[-2:]
    cols = tb.shape[-1]
    batch = out.size // (rows * cols)
    m.meter.dot_flops += 2 * rows * cols * inner * batch * m.count()
    precision = op.attrs.get("inputPrecision", "ieee") if ta.elem == "f32" else "ieee"
    m.meter.dot_kinds.add(f"{ta.elem}*{tb.elem}->{out.elem}" if precision == "ieee" else precision)
    if ta.elem[0] == "i":
        # Floats are much faster to multiply than integers, and exact while every sum fits their mantissa.
        if inner * 2 ** (ta.bits + tb.bits - 2) <= 1 << 24:
            work: Any = np.float32
        elif ta.bits <= 8:
            work = np.float64
        else:
            work = np.int64
        prod = np.matmul(x.astype(work), y.astype(work))
        return a[2] + prod.astype(np.int64).astype(out.dtype)
    if ta.elem == "f64":
        return a[2] + np.matmul(x, y)
    single = np.dtype(np.float32)
    prod = product(convert(x, single), convert(y, single), precision)
    if out.elem == "f32":
        return a[2] + prod
    return convert(convert(a[2], single) + prod, out.dtype)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Values of the 4-bit format e2m1, by code."""


def unpack_e2m1(x: Array, axis: int) -> Array:
    """Expand bytes with two e2m1 numbers each, the low half first.

    Args:
        x: 8-bit integers.
        axis: The axis along which numbers are packed; it becomes twice as long.

    Returns:
        The numbers: f32.
    """
    codes = np.ascontiguousarray(x).view(np.uint8)
    pair = np.stack([_E2M1[codes & 15], _E2M1[codes >> 4]], axis=axis + 1 if axis >= 0 else x.ndim + axis + 1)
    shape = list(x.shape)
    shape[axis] *= 2
    return pair.reshape(shape)


def _scale(s: Array, length: int, axis: int, dtype: np.dtype[Any], fast: bool) -> Array:
    """Convert e8m0 scales to floats and repeat them along the inner axis.

    Args:
        s: The codes: 8-bit integers, one per group of elements.
        length: Number of elements along the axis.
        axis: The inner axis.
        dtype: The 16-bit float type to which the compiler converts them.
        fast: Whether code 255 is not turned into NaN (``fastMath``).

    Returns:
        f32, with ``length`` elements along the axis.
    """
    codes = np.ascontiguousarray(s).view(np.uint8)
    # The code becomes the exponent field: code 0 is zero and not 2**-127.
    values = (codes.astype(np.uint32) << 23).view(np.float32)
    if not fast:
        values = np.where(codes == 255, np.float32(np.nan), values)
    values = values.astype(dtype).astype(np.float32)
    return np.repeat(values, length // s.shape[axis], axis=axis)


@register("tt.dot_scaled")
def _dot_scaled(m: Machine, op: Op, a: list[Any]) -> Any:
    """Multiply scaled operands: without native support the compiler upcasts both to 16 bits."""
    elems = (op.attrs["lhs"], op.attrs["rhs"])
    work = np.dtype(np.float16) if "fp16" in elems else BF16
    n = max(len(v) for v in a)
    at = 0
    sides = []
    for k, name in enumerate(("lhs", "rhs")):
        v, inner = full(a[at], op.types[at], n), -1 - k
        at += 1
        if elems[k] == "e2m1":
            v = unpack_e2m1(v, inner if op.attrs.get(f"{name}_k_pack", True) else -2 + k)
        v = v.astype(np.float32)
        if op.attrs["scales"][k]:
            s = full(a[at], op.types[at], n)
            at += 1
            s = s if k == 0 else np.swapaxes(s, -1, -2)
            factor = _scale(s, v.shape[inner], inner, work, bool(op.attrs.get("fastMath")))
            v = (v.astype(work).astype(np.float32) * factor).astype(work).astype(np.float32)
        sides.append(v)
    out = op.rtypes[0]
    m.meter.dot_flops += 2 * out.size * sides[0].shape[-1] * m.count()
    m.meter.dot_kinds.add(f"scaled {elems[0]}*{elems[1]}->{out.elem}")
    return convert(convert(a[at], np.dtype(np.float32)) + np.matmul(sides[0], sides[1]), out.dtype)
