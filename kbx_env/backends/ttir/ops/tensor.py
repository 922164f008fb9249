"""Tensor shape operations, program ids and assertions (dialect ``tt``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from kbx_env.backends.ttir.errors import DeviceAssert
from kbx_env.backends.ttir.frontend.graph import Op, Type
from kbx_env.backends.ttir.interp.control import Machine, register
from kbx_env.backends.ttir.interp.memory import Array


def full(v: Array, t: Type, programs: int | None = None) -> Array:
    """Broadcast a value to its true tensor shape.

    Args:
        v: The value: (programs or 1, ...), with axes of length 1 for its true lengths.
        t: Its type.
        programs: Length of the leading axis, by default that of ``v``.

    Returns:
        A view that nobody may change: (programs, *t.shape).
    """
    shape = (programs or len(v), *t.shape)
    return v if v.shape == shape else np.broadcast_to(v, shape)


@register("tt.get_program_id")
def _pid(m: Machine, op: Op, a: list[Any]) -> Any:
    axis = op.attrs["word"] or op.attrs.get("axis", 0)
    return m.pids["xyz".index(axis) if isinstance(axis, str) else axis]


@register("tt.get_num_programs")
def _nprog(m: Machine, op: Op, a: list[Any]) -> Any:
    axis = op.attrs["word"] or op.attrs.get("axis", 0)
    return np.array([m.grid["xyz".index(axis) if isinstance(axis, str) else axis]], np.int32)


@register("tt.make_range")
def _range(m: Machine, op: Op, a: list[Any]) -> Any:
    return np.arange(op.attrs["start"], op.attrs["end"], dtype=np.int32)[None]


@register("tt.splat")
def _splat(m: Machine, op: Op, a: list[Any]) -> Any:
    return a[0].reshape((len(a[0]),) + (1,) * len(op.rtypes[0].shape))


@register("tt.unsplat")
def _unsplat(m: Machine, op: Op, a: list[Any]) -> Any:
    return a[0].reshape(len(a[0]), -1)[:, 0]


@register("tt.broadcast")
def _broadcast(m: Machine, op: Op, a: list[Any]) -> Any:
    return a[0]


@register("tt.expand_dims")
def _expand(m: Machine, op: Op, a: list[Any]) -> Any:
    return np.expand_dims(a[0], op.attrs["axis"] + 1)


@register("tt.reshape", "tt.view")
def _reshape(m: Machine, op: Op, a: list[Any]) -> Any:
    x = a[0]
    if x.size == len(x):
        return x.reshape((len(x),) + (1,) * len(op.rtypes[0].shape))
    return full(x, op.types[0]).reshape((len(x), *op.rtypes[0].shape))


@register("tt.trans")
def _trans(m: Machine, op: Op, a: list[Any]) -> Any:
    order = op.attrs.get("order") or [1, 0]
    return a[0].transpose([0, *(k + 1 for k in order)])


@register("tt.cat")
def _cat(m: Machine, op: Op, a: list[Any]) -> Any:
    t = op.types[0]
    n = max(len(v) for v in a)
    return np.concatenate([full(v, t, n) for v in a], axis=1)


@register("tt.join")
def _join(m: Machine, op: Op, a: list[Any]) -> Any:
    return np.stack(np.broadcast_arrays(*a), axis=-1)


@register("tt.split")
def _split(m: Machine, op: Op, a: list[Any]) -> Any:
    x = a[0]
    return x[..., 0], x[..., -1]


@register("tt.gather")
def _gather(m: Machine, op: Op, a: list[Any]) -> Any:
    n = max(len(a[0]), len(a[1]))
    src, idx = full(a[0], op.types[0], n), full(a[1], op.types[1], n)
    axis = op.attrs["axis"] + 1
    idx = idx.astype(np.int64)
    inside = (idx >= 0) & (idx < src.shape[axis])
    if inside.all():
        return np.take_along_axis(src, idx, axis)
    # What an index outside the source finds is not defined. It stops nobody: a kernel may replace it afterwards.
    found = np.take_along_axis(src, np.clip(idx, 0, src.shape[axis] - 1), axis)
    return np.where(inside, found, _undefined(src.dtype))


def _undefined(dtype: np.dtype[Any]) -> Any:
    """Return a value that no kernel expects: NaN, or an integer with a pattern of bits."""
    if dtype.kind == "b":
        return np.True_
    if dtype.kind in "iu":
        return np.frombuffer(b"\x5a" * dtype.itemsize, dtype)[0]
    return np.array(np.nan).astype(dtype)[()]


@register("tt.histogram")
def _histogram(m: Machine, op: Op, a: list[Any]) -> Any:
    bins = op.rtypes[0].shape[0]
    x = full(a[0], op.types[0]).astype(np.int64)
    ok = (x >= 0) & (x < bins)
    if len(a) > 1:
        n = max(len(x), len(a[1]))
        ok = np.broadcast_to(ok & a[1], (n, *op.types[0].shape))
        x = np.broadcast_to(x, ok.shape)
    flat = (x + np.arange(len(x))[:, None] * bins)[ok]
    return np.bincount(flat, minlength=len(x) * bins).reshape(len(x), bins).astype(op.rtypes[0].dtype)


@register("ub.poison")
def _poison(m: Machine, op: Op, a: list[Any]) -> Any:
    t = op.rtypes[0]
    return np.zeros((1,) * (len(t.shape) + 1), t.dtype)


@register("llvm.intr.assume", "tt.print", "gpu.barrier", "ttg.barrier", "ttg.local_barrier", "tt.debug_barrier")
def _ignore(m: Machine, op: Op, a: list[Any]) -> Any:
    return None


@register("tt.assert", "cf.assert")
def _assert(m: Machine, op: Op, a: list[Any]) -> Any:
    ok = np.broadcast_to(a[0].reshape(len(a[0]), -1).all(axis=1), (m.programs,))
    bad = m.live() & ~ok
    if bad.any():
        file, line = m.where(op)
        text = (op.attrs["strings"] or [""])[0]
        raise DeviceAssert(m.kernel, line, text, m.program(int(np.argmax(bad))), file)
