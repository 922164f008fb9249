"""Tensor descriptors: gathers and scatters of rows, and atomic reductions into memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kbx_env.backends.ttir.frontend.graph import Op, Type
from kbx_env.backends.ttir.interp.control import OPS, Machine, register
from kbx_env.backends.ttir.interp.memory import Array
from kbx_env.backends.ttir.ops.memory import Block, block_access, read, write
from kbx_env.backends.ttir.ops.tensor import full


def _rows(b: Block, rows: Array, first: Array, columns: int) -> tuple[Array, Array]:
    """Return the addresses of some rows of a matrix and the mask of those inside it."""
    r = rows.astype(np.int64)[:, :, None]
    c = first.astype(np.int64)[:, None, None] + np.arange(columns)
    strides, shape = ([v.astype(np.int64)[:, None, None] for v in part] for part in (b.strides, b.shape))
    addr = b.base[:, None, None] + (r * strides[0] + c * strides[1]) * b.block.dtype.itemsize
    return addr, (r >= 0) & (r < shape[0]) & (c >= 0) & (c < shape[1])


@register("tt.descriptor_gather")
def _gather(m: Machine, op: Op, a: list[Any]) -> Any:
    b, t = a[0], op.rtypes[0]
    addr, mask = _rows(b, a[1], a[2], t.shape[1])
    other = np.array(np.nan).astype(b.block.dtype) if b.padding in ("2", "nan") else None
    return read(m, op, addr, mask, other, Type(b.block.elem, t.shape))


@register("tt.descriptor_scatter")
def _scatter(m: Machine, op: Op, a: list[Any]) -> Any:
    b, t = a[0], op.types[-1]
    addr, mask = _rows(b, a[1], a[2], t.shape[1])
    write(m, op, addr, full(a[3], t), mask, Type(b.block.elem, t.shape))


@register("tt.descriptor_reduce")
def _reduce(m: Machine, op: Op, a: list[Any]) -> Any:
    b = a[0]
    n = len(b.block.shape)
    addr, mask = block_access(replace(b, offsets=a[1 : 1 + n]), list(range(n)))
    value = full(a[1 + n], op.types[-1])
    kind = op.attrs["word"]
    if op.attrs["unsigned"] and kind in ("max", "min"):
        kind = "u" + kind
    as_atomic = replace(op, rtypes=[b.block], attrs={**op.attrs, "word": kind})
    OPS["tt.atomic_rmw"](m, as_atomic, [addr, value.reshape((len(value), *b.block.shape)), mask])
