"""Track values loaded from unwritten memory (taint), and stop where one of them decides what a program does.

Such a value may be anything; on a GPU it may be the result of an earlier call. Computing with it is a fault of its own
kind, and the result is judged. A branch, a mask or an address that depends on it is never right: such a kernel is
correct by luck, or looks for earlier contents of the memory. Taint is tracked by lane, in a dictionary from arrays to
masks that is empty until the first unwritten element is loaded. A select takes the taint of the side that it chooses:
lanes that a kernel loads beyond the end and then replaces are clean.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from kbx_env.backends.ttir.errors import DecidesOnUnwritten, Finding
from kbx_env.backends.ttir.frontend.graph import Block, Op
from kbx_env.backends.ttir.interp.control import OPS, MeteredMachine, lift, may_read
from kbx_env.backends.ttir.interp.memory import Array, Memory, Region
from kbx_env.backends.ttir.interp.serial import ResumableProgram
from kbx_env.backends.ttir.interp.slices import ATOMICS, LOADS, STORES
from kbx_env.backends.ttir.ops.memory import BlockPointer, block_access, descriptor_access, masks, row_access
from kbx_env.backends.ttir.ops.tensor import full

_PASS = ("scf.if", "scf.for", "scf.while", "tt.call")
"""Operations whose results are those of operations inside."""
_SHAPES = (
    "tt.splat", "tt.unsplat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.view", "tt.trans", "tt.cat",
    "tt.join", "tt.split",
)  # fmt: skip
"""Operations that only move lanes: their handlers move the taint as well."""
_LANEWISE = (
    "tt.addptr", "tt.bitcast", "tt.fp_to_fp", "tt.int_to_ptr", "tt.ptr_to_int", "tt.extern_elementwise", "tt.clampf",
    "tt.mulhiui", "tt.precise_sqrt", "tt.precise_divf",
)  # fmt: skip
"""Operations outside ``arith`` and ``math`` whose lanes depend on the same lanes of the operands."""
_HIDES = {"arith.andi": 0, "arith.muli": 0, "arith.ori": -1}
"""Operations and the value of one operand that decides the result whatever the other operand is."""
_WRITES = {"tt.store": (1, 2), "tt.atomic_rmw": (1, 2), "tt.atomic_cas": (2, 3)}
"""Positions of the written value and of the mask among the operands."""
_MANY = 4096
"""Number of tainted values from which entries of dead arrays are dropped."""


class TaintMachine(MeteredMachine):
    """A machine that tracks unwritten values; it needs a sanitizer.

    Args:
        *args: As for ``Machine``.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.taint: dict[int, tuple[Any, Array]] = {}
        """By ``id``: the value, which keeps the id in use, and its tainted lanes: bool, (programs or 1, ...)."""
        self.sees_reads = True  # without taint, no other operation brings any
        self.flags: Memory | None = None
        """The masks of written bytes as memory at the addresses of the bytes."""

    # -- execution ---------------------------------------------------------------------
    def step(self, op: Op, env: list[Any]) -> None:
        """Run one operation, check what it decides, and propagate taint."""
        if not self.taint and not may_read(op):
            super().step(op, env)
            return
        watch = self.memory.watch
        assert watch is not None
        before = watch.unwritten
        args = [env[a] for a in op.args]
        if self.taint:
            self.check_operands(op, args)
        super().step(op, env)
        if op.name in _PASS or not (self.taint or watch.unwritten != before):
            return
        fresh = self._fresh(op, args) if watch.unwritten != before else None
        tainted = [self._tainted_lanes(a) for a in args]
        if fresh is None and all(t is None for t in tainted):
            return
        if op.name in STORES or op.name in ATOMICS:
            self._unwrite(op, args, tainted, fresh)
        results = self._propagate(op, args, tainted, fresh)
        for slot, lanes in zip(op.results, results, strict=False):
            out = env[slot]
            if out is not None and lanes is not None and lanes.any():
                if isinstance(out, np.ndarray):
                    # The operation may have returned an operand; as an array of its own it gets taint of its own.
                    out = env[slot] = out.view()
                self._set_taint(out, lanes)

    def run_block(self, block: Block, env: list[Any]) -> Op:
        """Run a block and check what its terminator decides."""
        last = super().run_block(block, env)
        self.check_terminator(last, env)
        return last

    def merge(self, mask: Array, new: Any, old: Any) -> Any:
        """Join the values of two control flow paths, and their taint."""
        out = super().merge(mask, new, old)
        a, b = self._tainted_lanes(new), self._tainted_lanes(old)
        if out is not new and (a is not None or b is not None):
            none = np.zeros((1,) * (out.ndim if isinstance(out, np.ndarray) else 1), bool)
            sides = none if a is None else a, none if b is None else b
            self._set_taint(out, np.where(lift(mask, none.ndim), *sides))
        return out

    # -- decisions ---------------------------------------------------------------------
    def check_operands(self, op: Op, args: list[Any]) -> None:
        """Check the operands of an operation that is about to run.

        Args:
            op: The operation.
            args: The values of its operands.

        Raises:
            DecidesOnUnwritten: a tainted value decides a branch, a trip count, a mask or an address.
        """
        name = op.name
        if name == "scf.if":
            self._check(op, args[0], "a branch")
        elif name == "scf.for":
            for a in args[:3]:
                self._check(op, a, "a number of trips")
        elif name in LOADS or name in STORES or name in ATOMICS:
            mask_at = 1 if name == "tt.load" else _WRITES.get(name, (0, len(args)))[1]
            mask = args[mask_at] if mask_at < len(args) else None
            if mask is not None:
                self._check(op, mask, "a mask")
            pointer_like = args[:1] if name == "tt.load" or name in _WRITES else args[: len(args) - (name not in LOADS)]
            for a in pointer_like:
                self._check(op, a, "an address", mask)

    def check_terminator(self, op: Op, env: list[Any]) -> None:
        """Check the terminator of a block.

        Args:
            op: The terminator.
            env: Values by slot.

        Raises:
            DecidesOnUnwritten: a tainted value decides where control goes.
        """
        if self.taint and op.name in ("scf.condition", "cf.cond_br"):
            self._check(op, env[op.args[0]], "a branch")

    def _check(self, op: Op, value: Any, what: str, mask: Array | None = None) -> None:
        """Raise if an unmasked lane of ``value`` is tainted in an active program; ``what`` names its use."""
        lanes = self._tainted_lanes(value)
        if lanes is None:
            return
        on = lanes & lift(self.live(), lanes.ndim)
        if mask is not None and mask.ndim == on.ndim:
            on = on & mask
        if not on.any():
            return
        file, line = self.where(op)
        flat = np.broadcast_to(_rowwise(on), (self.programs,))
        program = self.program(int(np.argmax(flat)))
        found = Finding("decides_on_unwritten", self.kernel, line, file, program, "", 0, 0, what, "decision", True)
        assert self.memory.watch is not None
        self.memory.watch.report(found)
        raise DecidesOnUnwritten(found)

    # -- taint -------------------------------------------------------------------------
    def _tainted_lanes(self, value: Any) -> Array | None:
        entry = self.taint.get(id(value))
        return None if entry is None else entry[1]

    def _set_taint(self, value: Any, lanes: Array) -> None:
        if len(self.taint) >= _MANY:
            # A dead array has two references here: the entry and the argument of ``getrefcount``.
            self.taint = {k: v for k, v in self.taint.items() if sys.getrefcount(v[0]) > 2}
        self.taint[id(value)] = value, lanes
        self.sees_all = True

    def _propagate(
        self, op: Op, args: list[Any], tainted: list[Array | None], fresh: Array | None
    ) -> list[Array | None]:
        """Propagate taint from operands to results.

        Args:
            op: The operation that has run.
            args: The values of its operands.
            tainted: Their tainted lanes.
            fresh: Lanes that it loaded from unwritten memory.

        Returns:
            The tainted lanes of each result.
        """
        name, n = op.name, max(len(op.results), 1)
        if name in LOADS or name in ATOMICS:
            other = tainted[2] if name == "tt.load" and len(tainted) > 2 else None
            if other is not None:
                fresh = np.where(args[1], False if fresh is None else fresh, other)
            return [fresh]
        if name in _SHAPES:
            lanes = [np.zeros((1,) * np.ndim(a), bool) if h is None else h for a, h in zip(args, tainted, strict=True)]
            out = OPS[name](self, op, lanes)
            return list(out) if isinstance(out, tuple) else [out]
        if name == "arith.select":
            c, a, b = (np.zeros((1,) * args[1].ndim, bool) if h is None else h for h in tainted)
            lead = [lift(v, args[1].ndim) if v.ndim == 1 else v for v in (args[0], c)]
            return [np.where(lead[0], a, b) | lead[1]]
        if name in _HIDES:
            clean = [~np.zeros_like(a, bool) if h is None else ~h for a, h in zip(args, tainted, strict=True)]
            x, y = (k & (a == a.dtype.type(_HIDES[name])) for a, k in zip(args, clean, strict=True))
            return [(~clean[0] & ~y) | (~clean[1] & ~x)]
        marked = [h for h in tainted if h is not None]
        if name == "tt.reduce":
            axis = op.attrs["axis"] + 1
            over = [full(h, t).any(axis=axis) for h, t in zip(tainted, op.types, strict=False) if h is not None]
            return [np.logical_or.reduce(np.broadcast_arrays(*over))] * n
        if name.startswith(("arith.", "math.")) or name in _LANEWISE:
            return [np.logical_or.reduce(np.broadcast_arrays(*marked))] * n
        # Other operations may mix all lanes of a program.
        rows = [_rowwise(h) for h in marked]
        one = np.logical_or.reduce(np.broadcast_arrays(*rows))
        return [lift(one, len(t.shape) + 1) for t in op.rtypes] or [one]

    # -- memory ------------------------------------------------------------------------
    def _access(self, op: Op, args: list[Any], mask_at: int) -> tuple[Array, Array | None]:
        """Return the byte addresses and the mask of an access; ``mask_at`` is the position of the mask operand."""
        if op.name in ("tt.descriptor_gather", "tt.descriptor_scatter"):
            t = op.rtypes[0] if op.name in LOADS else op.types[-1]
            return row_access(args[0], args[1], args[2], t.shape[1])
        if op.name.startswith("tt.descriptor"):
            return descriptor_access(args[0], args[1 : 1 + len(args[0].block.shape)])
        if isinstance(args[0], BlockPointer):
            return block_access(args[0], op.attrs.get("boundaryCheck") or [])
        return args[0], args[mask_at] if mask_at < len(args) else None

    def _fresh(self, op: Op, args: list[Any]) -> Array | None:
        """Return which lanes of a load were unwritten memory; for an atomic operation, all lanes."""
        if op.name not in LOADS:
            return np.ones((1,) * (len(op.rtypes[0].shape) + 1), bool) if op.rtypes else None
        addr, mask = self._access(op, args, 1)
        dtype = np.dtype(f"u{self._size(op, args)}")
        set_ = np.array(int.from_bytes(b"\1" * dtype.itemsize, "little"), dtype)
        if self.flags is None:
            regions = self.memory.regions
            written = [
                np.ones(r.data.size, np.uint8) if r.initialised is None else r.initialised.view(np.uint8)
                for r in regions
            ]
            self.flags = Memory([Region(r.base, g) for r, g in zip(regions, written, strict=True)])
        out = np.asarray(self.flags.load(addr, masks(self, addr, mask), dtype, set_) != set_)
        by_program = op.name != "tt.load"
        return lift(_rowwise(out), len(op.rtypes[0].shape) + 1) if by_program else out

    def _size(self, op: Op, args: list[Any]) -> int:
        """Return the bytes of one element of an access."""
        if isinstance(args[0], BlockPointer):
            return args[0].block.dtype.itemsize
        pointee = op.types[0].pointee
        assert pointee
        return pointee.dtype.itemsize

    def _unwrite(self, op: Op, args: list[Any], tainted: list[Array | None], fresh: Array | None) -> None:
        """Mark the bytes that a tainted value was written to as unwritten: a copy must not make it clean.

        Args:
            op: The store or atomic operation that has run.
            args: The values of its operands.
            tainted: Their tainted lanes.
            fresh: Lanes that it read from unwritten memory.
        """
        value_at, mask_at = _WRITES.get(op.name, (len(args) - 1, len(args)))
        lanes = tainted[value_at]
        if lanes is None:
            lanes = fresh
        if lanes is None or op.name == "tt.descriptor_reduce":
            return
        addr, mask = self._access(op, args, mask_at)
        if lanes.ndim != addr.ndim or op.name.startswith("tt.descriptor"):
            lanes = lift(_rowwise(lanes), addr.ndim)
        on = lanes & lift(self.live(), addr.ndim)
        on = on if mask is None else on & mask
        addr, on = np.broadcast_arrays(addr, on)
        flat, size, watch = addr[on], np.arange(self._size(op, args)), self.memory.watch
        owner = np.searchsorted(self.memory.bases, flat, "right") - 1
        for k in np.unique(owner).tolist():
            region = self.memory.regions[k]
            if region.initialised is not None and watch is not None:
                region.initialised[(flat[owner == k] - region.base)[:, None] + size] = False
                watch.unwritten_again(k)


def _rowwise(lanes: Array) -> Array:
    """Return for each program whether any of its lanes is set: (programs or 1, ...) -> (programs or 1,)."""
    return np.asarray(lanes.reshape(len(lanes), -1).any(axis=1))


class TaintProgram(TaintMachine, ResumableProgram):
    """The same for a program that may wait for others."""
