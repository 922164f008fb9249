"""Other integers at the places that a quantization scheme names, so that a result can show whether it was made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kbx_env.backends.ttir.frontend.graph import Op
from kbx_env.backends.ttir.interp.slices import LOADS
from kbx_env.backends.ttir.sanitizer.shadow import Array

if TYPE_CHECKING:
    from kbx_env.backends.ttir.interp.control import Machine

PRODUCTS, ROUNDINGS, BYTES = "products", "roundings", "bytes"
PLACES = (PRODUCTS, ROUNDINGS, BYTES)
MAX_SEEN = 64
"""Operands whose bytes are counted."""
_NARROWING = ("arith.fptosi", "arith.fptoui", "arith.trunci")


@dataclass
class Disturbance:
    """Exchanges bytes by a table wherever a kernel does what the scheme demands.

    Attributes:
        place: ``products``: the int8 operands of matrix products; ``roundings``: what a conversion to int8 gives;
            ``bytes``: what a load brings that is unpacked into halves of bytes.
        table: 256 bytes, by the byte that they replace.
        touched: operations of these products, converted elements or loaded bytes so far.
        seen: if not ``None``, how often each byte occurred, by operation and operand, at every place, before the exchange.
    """

    place: str
    table: Sequence[int]
    touched: int = 0
    seen: dict[tuple[int, int], Array] | None = None
    _bytes: Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._bytes = np.array(self.table, np.uint8)
        if self.place not in PLACES or self._bytes.shape != (256,):
            raise ValueError(f"a disturbance is a place ({', '.join(PLACES)}) and 256 bytes")

    def exchanged(self, v: Array) -> Array:
        """The array with every byte exchanged."""
        dense = np.ascontiguousarray(v)
        return self._bytes[dense.view(np.uint8)].view(dense.dtype).reshape(v.shape)

    def count(self, m: Machine, op: Op, operand: int, v: Array) -> None:
        """Count the bytes of an array, whose one leading entry may stand for all programs."""
        if self.seen is None or len(self.seen) >= MAX_SEEN and (id(op), operand) not in self.seen:
            return
        found = np.bincount(np.ascontiguousarray(v).view(np.uint8).reshape(-1), minlength=256)
        times = m.count() if len(v) == 1 else 1
        self.seen[id(op), operand] = self.seen.get((id(op), operand), np.zeros(256, np.int64)) + found * times

    def before(self, m: Machine, op: Op, env: list[Any]) -> dict[int, Any]:
        """Exchange operands; returns what ``after`` puts back."""
        if op.name != "tt.dot" or {t.elem for t in op.types[:2]} != {"i8"}:
            return {}
        for k, slot in enumerate(op.args[:2]):
            self.count(m, op, k, env[slot])
        if self.place != PRODUCTS:
            return {}
        self.touched += 2 * op.rtypes[0].size * op.types[0].shape[-1] * m.count()
        held = {s: env[s] for s in op.args[:2]}
        for slot, value in held.items():
            env[slot] = self.exchanged(value)
        return held

    def after(self, m: Machine, op: Op, env: list[Any], held: dict[int, Any]) -> None:
        """Put operands back that are still needed, and exchange results."""
        for slot, value in held.items():
            env[slot] = None if slot in op.dead else value
        if op.name in _NARROWING and op.rtypes[0].elem == "i8":
            place = ROUNDINGS
        elif op.name in LOADS and bool(op.attrs.get("unpacked")):
            place = BYTES
        else:
            return
        if self.seen is not None and env[op.results[0]] is not None:
            self.count(m, op, 0, env[op.results[0]])
        if place == self.place and env[op.results[0]] is not None:
            t = op.rtypes[0]
            self.touched += t.size * t.dtype.itemsize * m.count()
            env[op.results[0]] = self.exchanged(env[op.results[0]])
