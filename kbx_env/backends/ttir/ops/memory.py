"""Loads, stores, atomics, block pointers and tensor descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kbx_env.backends.ttir.errors import Finding, OutOfBounds
from kbx_env.backends.ttir.frontend.graph import Op, Type
from kbx_env.backends.ttir.interp.control import Machine, lift, register
from kbx_env.backends.ttir.interp.hooks import Extent
from kbx_env.backends.ttir.interp.memory import Array, BadAddress
from kbx_env.backends.ttir.ops.arith import unsigned
from kbx_env.backends.ttir.ops.tensor import full


@dataclass(frozen=True)
class BlockPointer:
    """A block pointer or a tensor descriptor.

    Every number is an int64 or int32 array over programs: (programs,) or (1,).

    Attributes:
        base: Address of the tensor's first element.
        shape: Sizes of the tensor, by dimension.
        strides: Strides of the tensor in elements, by dimension.
        offsets: Index of the block's first element, by dimension; empty for a descriptor.
        block: Type of one block.
        padding: How a descriptor fills elements outside the tensor: "nan" or "2" for NaN, otherwise zero.
    """

    base: Array
    shape: list[Array]
    strides: list[Array]
    offsets: list[Array]
    block: Type
    padding: str = ""


def masks(m: Machine, addr: Array, mask: Array | None) -> Array | None:
    """Combine the mask of an access with the active programs.

    Args:
        m: The running programs.
        addr: Byte addresses: int64, (programs or 1, *shape).
        mask: The access's own mask, broadcastable to ``addr``; ``None`` for all lanes.

    Returns:
        A mask broadcastable to ``addr``, or ``None`` for all lanes.
    """
    if m.active is None:
        return mask
    if len(addr) == 1 and (mask is None or len(mask) == 1):
        # All active programs do the same access: one row stands for all of them.
        return mask
    live = lift(m.active, addr.ndim)
    return live if mask is None else mask & live


def lanes(m: Machine, mask: Array | None, shape: tuple[int, ...]) -> int:
    """Count the unmasked lanes of an access, summed over the active programs.

    Args:
        m: The running programs.
        mask: The access's own mask: bool, (programs or 1, ...), broadcastable to ``shape`` behind the first axis.
        shape: Tensor shape of the access.

    Returns:
        The number of lanes.
    """
    total = 1
    for s in shape:
        total *= s
    if mask is None:
        return total * m.count()
    if m.active is not None and len(mask) > 1:
        mask = mask & lift(m.active, mask.ndim)
    on = int(np.count_nonzero(mask))
    scale = total * (m.programs if len(mask) > 1 else m.count()) / max(mask.size // len(mask), 1)
    return round(on * scale / len(mask))


def fail(m: Machine, op: Op, e: BadAddress, owner: Array, size: int, access: str) -> OutOfBounds:
    """Turn an internal error into the public one, and report it to the sanitizer.

    Args:
        m: The running programs.
        op: The access.
        e: The internal error.
        owner: Position in the chunk of each lane's program, -1 where one lane stands for all: any shape of the access.
        size: Bytes of one element.
        access: "load", "store" or "atomic".

    Returns:
        The error to raise.
    """
    file, line = m.where(op)
    args = op.attrs.get("tensors", ())
    if args:
        # If the pointer may come from several tensors, name the nearest one.
        near = [m.memory.extent(a) for a in args]
        off = [max(x.start - e.address, e.address + size - x.start - x.size) for x in near]
        by, extent = min(zip(off, near, strict=True), key=lambda p: p[0])
        name, first = extent.name, m.memory.address(extent.arg)
    else:
        name, by, first = m.memory.nearest(e.address, size)
    k = int(owner.reshape(-1)[e.position])
    if k < 0:
        k = int(np.argmax(m.live()))
    index = (e.address - first) // size
    indirect = bool(op.attrs.get("indirect", True))
    found = Finding(
        "out_of_bounds", m.kernel, line, file, m.program(k), name, index, max(by, 1), "", access, indirect
    )  # fmt: skip
    if m.memory.watch is not None:
        m.memory.watch.report(found)
    return OutOfBounds(found, e.address)


def _owner(m: Machine, shape: tuple[int, ...]) -> Array:
    ids = np.arange(shape[0]) if shape[0] > 1 or m.programs == 1 else np.full(1, -1)
    return np.broadcast_to(lift(ids, len(shape)), shape)


def read(m: Machine, op: Op, addr: Array, mask: Array | None, other: Any, t: Type) -> Array:
    """Load a tensor.

    Args:
        m: The running programs.
        op: The load.
        addr: Byte addresses: int64, broadcastable to (programs or 1, *t.shape).
        mask: Lanes to load, broadcastable likewise; ``None`` for all.
        other: Value of masked lanes, broadcastable likewise; ``None`` for 0.
        t: Type of the tensor.

    Returns:
        The elements: the broadcast shape of ``addr``, ``mask`` and ``other``.

    Raises:
        OutOfBounds: an unmasked lane is outside every region, or outside its tensor.
    """
    size = t.dtype.itemsize
    m.meter.moved("loaded", op.attrs.get("tensors", ()), lanes(m, mask, t.shape) * size)
    mask = masks(m, addr, mask)
    watch, hook = m.memory.watch, None
    within: Sequence[Extent] = ()
    if watch is not None:
        hook, within = watch.loading(m, op, size), watch.extents(op)
    if m.meter.detail:
        m.meter.trace("loaded", addr, mask, t.shape, m.count())
        hook = m.memory.noting(m.meter, size, hook)
    try:
        return m.memory.load(addr, mask, t.dtype, other, within, hook)
    except BadAddress as e:
        shape = np.broadcast_shapes(addr.shape, mask.shape) if mask is not None else addr.shape
        raise fail(m, op, e, _owner(m, shape), size, "load") from None


def write(m: Machine, op: Op, addr: Array, value: Array, mask: Array | None, t: Type) -> None:
    """Store a tensor.

    Args:
        m: The running programs.
        op: The store.
        addr: Byte addresses: int64, broadcastable to (programs or 1, *t.shape).
        value: The elements, broadcastable likewise.
        mask: Lanes to store, broadcastable likewise; ``None`` for all.
        t: Type of the tensor.

    Raises:
        OutOfBounds: an unmasked lane is outside every region, or outside its tensor.
    """
    size = t.dtype.itemsize
    m.meter.moved("stored", op.attrs.get("tensors", ()), lanes(m, mask, t.shape) * size)
    if len(addr) != m.programs and (len(addr) != len(value) or m.active is not None):
        addr = np.broadcast_to(addr, (m.programs, *addr.shape[1:]))
    mask = masks(m, addr, mask)
    if m.meter.detail:
        m.meter.trace("stored", addr, mask, t.shape, m.count())
    watch, hook = m.memory.watch, None
    within: Sequence[Extent] = ()
    if watch is not None:
        hook, within = watch.storing(m, op, size), watch.extents(op)
    try:
        m.memory.store(addr, value, mask, within, hook)
    except BadAddress as e:
        shape = np.broadcast_shapes(addr.shape, value.shape, mask.shape if mask is not None else ())
        raise fail(m, op, e, _owner(m, shape), size, "store") from None


def block_access(b: BlockPointer, check: list[int]) -> tuple[Array, Array | None]:
    """Return the addresses of a block.

    Args:
        b: The block, with offsets.
        check: Dimensions whose bounds are checked.

    Returns:
        Byte addresses (int64) and the mask of the lanes inside the checked dimensions (``None`` without any); both are
        broadcastable to (programs or 1, *block shape).
    """
    dims = len(b.block.shape)
    addr = b.base.reshape((-1,) + (1,) * dims)
    mask: Array | None = None
    size = b.block.dtype.itemsize
    for d, n in enumerate(b.block.shape):
        axis = [1] * (dims + 1)
        axis[d + 1] = n
        idx = b.offsets[d].astype(np.int64).reshape((-1,) + (1,) * dims) + np.arange(n).reshape(axis)
        addr = addr + idx * b.strides[d].astype(np.int64).reshape((-1,) + (1,) * dims) * size
        if d in check:
            ok = (idx >= 0) & (idx < b.shape[d].astype(np.int64).reshape((-1,) + (1,) * dims))
            mask = ok if mask is None else mask & ok
    return addr, mask


@register("tt.load")
def _load(m: Machine, op: Op, a: list[Any]) -> Any:
    if isinstance(a[0], BlockPointer):
        b = a[0]
        addr, mask = block_access(b, op.attrs.get("boundaryCheck") or [])
        other = np.array(np.nan).astype(b.block.dtype) if op.attrs.get("padding") == 2 else None
        return read(m, op, addr, mask, other, b.block)
    return read(m, op, a[0], a[1] if len(a) > 1 else None, a[2] if len(a) > 2 else None, op.rtypes[0])


@register("tt.store")
def _store(m: Machine, op: Op, a: list[Any]) -> Any:
    if isinstance(a[0], BlockPointer):
        addr, mask = block_access(a[0], op.attrs.get("boundaryCheck") or [])
        write(m, op, addr, a[1], mask, a[0].block)
        return
    p = op.types[0].pointee
    assert p
    write(m, op, a[0], a[1], a[2] if len(a) > 2 else None, Type(p.elem, op.types[0].shape, p.pointee))


@register("tt.addptr")
def _addptr(m: Machine, op: Op, a: list[Any]) -> Any:
    p = op.types[0].pointee
    assert p
    return a[0] + a[1].astype(np.int64) * p.dtype.itemsize


@register("tt.int_to_ptr", "tt.ptr_to_int")
def _ptr(m: Machine, op: Op, a: list[Any]) -> Any:
    return a[0].astype(np.int64)


@register("tt.make_tensor_ptr")
def _make_ptr(m: Machine, op: Op, a: list[Any]) -> Any:
    n = len(op.rtypes[0].pointee.shape) if op.rtypes[0].pointee else 0
    assert op.rtypes[0].pointee
    return BlockPointer(a[0], a[1 : 1 + n], a[1 + n : 1 + 2 * n], a[1 + 2 * n : 1 + 3 * n], op.rtypes[0].pointee)


@register("tt.advance")
def _advance(m: Machine, op: Op, a: list[Any]) -> Any:
    b = a[0]
    moved = [x + y for x, y in zip(b.offsets, a[1:], strict=True)]
    return BlockPointer(b.base, b.shape, b.strides, moved, b.block)


@register("tt.make_tensor_descriptor")
def _make_desc(m: Machine, op: Op, a: list[Any]) -> Any:
    t = op.rtypes[0].pointee
    assert t
    n = len(t.shape)
    pad = str(op.attrs.get("padding", ""))
    return BlockPointer(a[0], a[1 : 1 + n], a[1 + n : 1 + 2 * n], [], t, pad)


def descriptor_access(b: BlockPointer, offsets: list[Array]) -> tuple[Array, Array | None]:
    """Return the addresses of a descriptor's block at some offsets and the mask of its elements inside the tensor.

    Args:
        b: The descriptor.
        offsets: Index of the block's first element, by dimension: (programs or 1,) each.

    Returns:
        As ``block_access``, with every dimension checked.
    """
    placed = BlockPointer(b.base, b.shape, b.strides, offsets, b.block)
    return block_access(placed, list(range(len(b.block.shape))))


def row_access(b: BlockPointer, rows: Array, first: Array, columns: int) -> tuple[Array, Array]:
    """Return the addresses of some rows of a matrix and the mask of the elements inside it.

    Args:
        b: Descriptor of the matrix.
        rows: Numbers of the rows: (programs or 1, rows).
        first: Number of the first column: (programs or 1,).
        columns: How many columns.

    Returns:
        Byte addresses (int64) and the mask, (programs or 1, rows, columns).
    """
    r = rows.astype(np.int64)[:, :, None]
    c = first.astype(np.int64)[:, None, None] + np.arange(columns)
    strides, shape = ([v.astype(np.int64)[:, None, None] for v in part] for part in (b.strides, b.shape))
    addr = b.base[:, None, None] + (r * strides[0] + c * strides[1]) * b.block.dtype.itemsize
    return addr, (r >= 0) & (r < shape[0]) & (c >= 0) & (c < shape[1])


def _padding(b: BlockPointer) -> Array | None:
    """Return the value of a descriptor's elements outside its tensor, ``None`` for zero."""
    return np.array(np.nan).astype(b.block.dtype) if b.padding in ("2", "nan") else None


@register("tt.descriptor_load")
def _desc_load(m: Machine, op: Op, a: list[Any]) -> Any:
    b = a[0]
    addr, mask = descriptor_access(b, a[1:])
    out = read(m, op, addr, mask, _padding(b), b.block)
    return full(out, b.block).reshape((len(out), *op.rtypes[0].shape))


@register("tt.descriptor_store")
def _desc_store(m: Machine, op: Op, a: list[Any]) -> Any:
    b = a[0]
    n = len(b.block.shape)
    # The operands are the descriptor, the indices and the value.
    addr, mask = descriptor_access(b, a[1 : 1 + n])
    value = full(a[1 + n], op.types[-1])
    write(m, op, addr, value.reshape((len(value), *b.block.shape)), mask, b.block)


@register("tt.descriptor_gather")
def _desc_gather(m: Machine, op: Op, a: list[Any]) -> Any:
    b, t = a[0], op.rtypes[0]
    addr, mask = row_access(b, a[1], a[2], t.shape[1])
    return read(m, op, addr, mask, _padding(b), Type(b.block.elem, t.shape))


@register("tt.descriptor_scatter")
def _desc_scatter(m: Machine, op: Op, a: list[Any]) -> Any:
    b, t = a[0], op.types[-1]
    addr, mask = row_access(b, a[1], a[2], t.shape[1])
    write(m, op, addr, full(a[3], t), mask, Type(b.block.elem, t.shape))


@register("tt.descriptor_reduce")
def _desc_reduce(m: Machine, op: Op, a: list[Any]) -> Any:
    b = a[0]
    n = len(b.block.shape)
    addr, mask = block_access(replace(b, offsets=a[1 : 1 + n]), list(range(n)))
    value = full(a[1 + n], op.types[-1])
    kind = op.attrs["word"]
    if op.attrs["unsigned"] and kind in ("max", "min"):
        kind = "u" + kind
    as_atomic = replace(op, rtypes=[b.block], attrs={**op.attrs, "word": kind})
    _rmw(m, as_atomic, [addr, value.reshape((len(value), *b.block.shape)), mask])


def _apply(kind: str, old: Array, v: Array) -> Array:
    """Return the new memory content after an atomic operation of a kind with operand ``v`` on ``old``."""
    if kind in ("add", "fadd"):
        return old + v
    if kind in ("max", "min"):
        return (np.maximum if kind == "max" else np.minimum)(old, v)
    if kind in ("umax", "umin"):
        return (np.maximum if kind == "umax" else np.minimum)(unsigned(old), unsigned(v)).view(old.dtype)
    if kind == "exch":
        return v
    return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[kind](old, v)


_UFUNCS = {
    "add": np.add, "fadd": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "max": np.maximum, "min": np.minimum,
}  # fmt: skip
"""Operations that ``ufunc.at`` applies to all lanes at once when the old values are not used."""


def _atomic_lanes(m: Machine, op: Op, a: list[Any], values: int) -> tuple[list[Array], Array, tuple[int, ...]]:
    """Flatten the operands of an atomic operation to its unmasked lanes, in program order.

    Args:
        m: The running programs.
        op: The operation.
        a: Addresses, then the values, then the mask if there is one.
        values: How many values: 1, or 2 for a compare-and-swap.

    Returns:
        Addresses and values of the lanes (each (lanes,)), the lanes' positions in the whole result (int64, (lanes,)),
        and the shape of the whole result.
    """
    shape = (m.programs, *op.rtypes[0].shape)
    on = np.broadcast_to(lift(m.live(), len(shape)), shape)
    if len(a) > 1 + values:
        on = on & a[1 + values]
    where = np.nonzero(on.reshape(-1))[0]
    flat = [np.broadcast_to(v, shape).reshape(-1)[where] for v in a[: 1 + values]]
    m.meter.atomics += len(where)
    m.meter.moved("atomic", op.attrs.get("tensors", ()), len(where) * flat[-1].dtype.itemsize)
    return flat, where, shape


def _rounds(idx: Array) -> list[Array]:
    """Split positions into rounds without repeated indices, keeping the order of each index."""
    order = np.argsort(idx, kind="stable")
    s = idx[order]
    new = np.r_[True, s[1:] != s[:-1]]
    start = np.maximum.accumulate(np.where(new, np.arange(len(s)), 0))
    rank = np.arange(len(s)) - start
    by_rank = np.argsort(rank, kind="stable")
    return np.split(order[by_rank], np.cumsum(np.bincount(rank))[:-1])


def _prefix(idx: Array, v: Array) -> Array:
    """Sum, for each position, the earlier values that have the same index.

    Args:
        idx: Index of each position: (n,).
        v: Value of each position: (n,), integers.

    Returns:
        The exclusive prefix sums: (n,), dtype of ``v``.
    """
    order = np.argsort(idx, kind="stable")
    s, ordered = idx[order], v[order]
    before = np.cumsum(ordered, dtype=v.dtype) - ordered
    first = np.maximum.accumulate(np.where(np.r_[True, s[1:] != s[:-1]], np.arange(len(s)), 0))
    out = np.empty_like(v)
    out[order] = before - before[first]
    return out


def _groups(m: Machine, op: Op, addr: Array, val: Array, where: Array) -> list[tuple[Array, Array, Array]]:
    """Split the lanes of an atomic operation by region, and let the sanitizer see them.

    Args:
        m: The running programs.
        op: The operation.
        addr: Byte addresses: (lanes,).
        val: Values, for their dtype: (lanes,).
        where: Positions of the lanes in the whole result: (lanes,).

    Returns:
        For each region: a view of its elements, and of each lane in it the element's index and the lane's number.

    Raises:
        OutOfBounds: a lane is outside every region, or outside its tensor.
    """
    programs = where // max(op.rtypes[0].size, 1)
    size, watch = val.dtype.itemsize, m.memory.watch
    try:
        groups = m.memory.locate(addr, val.dtype, watch.extents(op) if watch is not None else ())
    except BadAddress as e:
        raise fail(m, op, e, programs, size, "atomic") from None
    if watch is not None:
        for k, _, idx, at in groups:
            watch.updating(m, op, k, idx * size, programs[at], size)
    return [g[1:] for g in groups]


@register("tt.atomic_rmw")
def _rmw(m: Machine, op: Op, a: list[Any]) -> Any:
    kind = op.attrs["word"]
    (addr, val), where, shape = _atomic_lanes(m, op, a, 1)
    old = np.zeros(len(where), val.dtype)
    for view, idx, at in _groups(m, op, addr, val, where):
        v = val[at]
        if not op.used and kind in _UFUNCS and v.dtype.kind in "if" and v.dtype.itemsize >= 4:
            _UFUNCS[kind].at(view, idx, v)
            continue
        if kind == "add" and v.dtype.kind == "i":
            # Integer sums are exact in any order: the old values are prefix sums, computed in one pass.
            old[at] = view[idx] + _prefix(idx, v)
            np.add.at(view, idx, v)
            continue
        for r in _rounds(idx):
            i = idx[r]
            before = view[i]
            old[at[r]] = before
            view[i] = _apply(kind, before, v[r])
    out = np.zeros(int(np.prod(shape)), val.dtype)
    out[where] = old
    return out.reshape(shape)


@register("tt.atomic_cas")
def _cas(m: Machine, op: Op, a: list[Any]) -> Any:
    (addr, cmp, val), where, shape = _atomic_lanes(m, op, a, 2)
    old = np.zeros(len(where), val.dtype)
    for view, idx, at in _groups(m, op, addr, val, where):
        for r in _rounds(idx):
            i = idx[r]
            before = view[i]
            old[at[r]] = before
            view[i] = np.where(before == cmp[at[r]], val[at[r]], before)
    out = np.zeros(int(np.prod(shape)), val.dtype)
    out[where] = old
    return out.reshape(shape)
