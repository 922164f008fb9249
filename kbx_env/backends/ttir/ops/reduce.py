"""Reductions and scans with arbitrary combine regions, in a fixed order."""

from __future__ import annotations

from typing import Any

import numpy as np

from kbx_env.backends.ttir.frontend.graph import Op
from kbx_env.backends.ttir.interp.control import Machine, register
from kbx_env.backends.ttir.interp.memory import Array
from kbx_env.backends.ttir.ops.arith import COMBINE
from kbx_env.backends.ttir.ops.tensor import full

_ORDER_FREE = {
    "arith.maxnumf": np.fmax, "arith.minnumf": np.fmin, "arith.maximumf": np.maximum,
    "arith.minimumf": np.minimum, "arith.maxsi": np.maximum, "arith.minsi": np.minimum,
    "arith.andi": np.bitwise_and, "arith.ori": np.bitwise_or, "arith.xori": np.bitwise_xor,
}  # fmt: skip
"""Combine operations whose result does not depend on the order; they run as one numpy reduction."""


def single_op(op: Op) -> str:
    """Return the name of the only operation of a combine region, "" for other regions."""
    block = op.regions[0].blocks[0]
    if len(op.regions[0].blocks) != 1 or len(block.ops) != 2 or len(block.args) != 2:
        return ""
    inner = block.ops[0]
    if inner.args != block.args or block.ops[1].args != inner.results or inner.name not in COMBINE:
        return ""
    return inner.name


def combine(m: Machine, op: Op, left: list[Array], right: list[Array]) -> list[Array]:
    """Run a combine region on all lanes at once, as if each lane were a program.

    Args:
        m: The running programs.
        op: The reduction, scan or map.
        left: The first operands of the region, of one shape.
        right: The second operands, of the same shape.

    Returns:
        The results of the region, of the same shape.
    """
    name = single_op(op)
    if name and left[0].dtype != np.bool_:
        return [COMBINE[name](left[0], right[0])]
    shape = left[0].shape
    sub = Machine(m.module, m.kernel, m.grid, m.pids, m.memory, m.meter, m.deadline)
    sub.programs = left[0].size
    # The region may read outer values, because the compiler hoists constants out of it.
    env = list(m.env)
    out = sub.run_region(op.regions[0], env, [v.reshape(-1) for v in left + right])
    return [np.broadcast_to(o, (sub.programs,)).reshape(shape) for o in out]


@register("tt.reduce")
def _reduce(m: Machine, op: Op, a: list[Any]) -> Any:
    axis = op.attrs["axis"] + 1
    n = max(len(v) for v in a)
    name = single_op(op)
    if name in _ORDER_FREE:
        x = full(a[0], op.types[0])
        return _ORDER_FREE[name].reduce(x, axis=axis)
    if name == "arith.addi" and a[0].dtype != np.bool_:
        return np.add.reduce(full(a[0], op.types[0]), axis=axis, dtype=a[0].dtype)
    if name and len(a) == 1 and a[0].dtype != np.bool_:
        x = full(a[0], op.types[0])
        if axis < x.ndim - 1:
            x = np.moveaxis(x, axis, -1)
        # The same halves as below; the length of an axis is a power of two.
        while (half := x.shape[-1] // 2) and not x.shape[-1] % 2:
            x = COMBINE[name](x[..., :half], x[..., half:])
        if x.shape[-1] == 1:
            return [x[..., 0]]
    xs = [np.moveaxis(full(v, t, n), axis, -1) for v, t in zip(a, op.types, strict=False)]
    length = xs[0].shape[-1]
    while length > 1:
        half = length // 2
        if length % 2:
            head = combine(m, op, [x[..., 0] for x in xs], [x[..., 1] for x in xs])
            xs = [np.concatenate([h[..., None], x[..., 2:]], -1) for h, x in zip(head, xs, strict=True)]
        elif name:
            # The operation is commutative; halves are contiguous, unlike pairs of neighbours.
            xs = combine(m, op, [x[..., :half] for x in xs], [x[..., half:] for x in xs])
        else:
            xs = combine(m, op, [x[..., 0::2] for x in xs], [x[..., 1::2] for x in xs])
        length = xs[0].shape[-1]
    return [x[..., 0] for x in xs]


@register("tt.scan")
def _scan(m: Machine, op: Op, a: list[Any]) -> Any:
    axis = op.attrs["axis"] + 1
    n = max(len(v) for v in a)
    xs = [np.moveaxis(full(v, t, n), axis, -1) for v, t in zip(a, op.types, strict=False)]
    reverse = op.attrs.get("reverse", False)
    if reverse:
        xs = [x[..., ::-1] for x in xs]
    if single_op(op) == "arith.addi" and xs[0].dtype != np.bool_:
        xs = [np.add.accumulate(xs[0], axis=-1, dtype=xs[0].dtype)]
    else:
        d = 1
        while d < xs[0].shape[-1]:
            new = combine(m, op, [x[..., :-d] for x in xs], [x[..., d:] for x in xs])
            xs = [np.concatenate([x[..., :d], v], -1) for x, v in zip(xs, new, strict=True)]
            d *= 2
    if reverse:
        xs = [x[..., ::-1] for x in xs]
    return [np.moveaxis(x, -1, axis) for x in xs]


@register("tt.map_elementwise")
def _map(m: Machine, op: Op, a: list[Any]) -> Any:
    pack = op.attrs.get("pack", 1)
    xs = [
        np.ascontiguousarray(x) for x in np.broadcast_arrays(*(full(v, t) for v, t in zip(a, op.types, strict=False)))
    ]
    if pack == 1:
        return combine(m, op, xs, [])
    # One call gets ``pack`` neighbouring elements of each operand, operand after operand.
    lanes = [x.reshape(*x.shape[:-1], -1, pack)[..., k] for x in xs for k in range(pack)]
    out = combine(m, op, lanes, [])
    return [np.stack(out[k : k + pack], -1).reshape(xs[0].shape) for k in range(0, len(out), pack)]
