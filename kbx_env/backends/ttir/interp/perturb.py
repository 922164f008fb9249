"""Replace integers where a quantization scheme requires them: an unchanged result was not computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kbx_env.backends.ttir.frontend.graph import Op
from kbx_env.backends.ttir.interp.control import Machine
from kbx_env.backends.ttir.interp.slices import LOADS
from kbx_env.backends.ttir.sanitizer.shadow import Array

PRODUCTS, ROUNDINGS, BYTES = "products", "roundings", "bytes"
PLACES = (PRODUCTS, ROUNDINGS, BYTES)
"""Operations whose integers can be replaced, see ``Perturbation.place``."""
MAX_SEEN = 64
"""Largest number of operands whose bytes are counted."""
_NARROWING = ("arith.fptosi", "arith.fptoui", "arith.trunci")


@dataclass
class Perturbation:
    """Replaces bytes by a table, at one kind of operation.

    Attributes:
        place: ``products``: the int8 operands of matrix products; ``roundings``: the results of conversions to int8;
            ``bytes``: the results of loads that are unpacked into halves of bytes.
        table: The new byte for each of the 256 bytes.
        touched: Amount of work so far that met replaced bytes: operations of products, converted elements or loaded
            bytes.
        seen: If not ``None``, how often each byte occurred before it was replaced, by operation and operand, at all
            three kinds of operations: int64, (256,) each.
    """

    place: str
    table: Sequence[int]
    touched: int = 0
    seen: dict[tuple[int, int], Array] | None = None
    _bytes: Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._bytes = np.array(self.table, np.uint8)
        if self.place not in PLACES or self._bytes.shape != (256,):
            raise ValueError(f"a perturbation is a place ({', '.join(PLACES)}) and a table of 256 bytes")

    def replaced(self, v: Array) -> Array:
        """Return an array of integers with every byte replaced by the table."""
        dense = np.ascontiguousarray(v)
        return self._bytes[dense.view(np.uint8)].view(dense.dtype).reshape(v.shape)

    def count(self, m: Machine, op: Op, operand: int, v: Array) -> None:
        """Count the bytes of an array in ``seen``.

        Args:
            m: The running programs.
            op: The operation.
            operand: Number of the operand.
            v: Its value, (programs or 1, ...); a leading 1 stands for all active programs.
        """
        if self.seen is None or len(self.seen) >= MAX_SEEN and (id(op), operand) not in self.seen:
            return
        found = np.bincount(np.ascontiguousarray(v).view(np.uint8).reshape(-1), minlength=256)
        times = m.count() if len(v) == 1 else 1
        self.seen[id(op), operand] = self.seen.get((id(op), operand), np.zeros(256, np.int64)) + found * times

    def before(self, m: Machine, op: Op, env: list[Any]) -> dict[int, Any]:
        """Replace the operands of an int8 product in ``env``.

        Args:
            m: The running programs.
            op: The operation that runs next.
            env: Values by slot.

        Returns:
            The original operands by slot, for ``after``.
        """
        if op.name != "tt.dot" or {t.elem for t in op.types[:2]} != {"i8"}:
            return {}
        for k, slot in enumerate(op.args[:2]):
            self.count(m, op, k, env[slot])
        if self.place != PRODUCTS:
            return {}
        self.touched += 2 * op.rtypes[0].size * op.types[0].shape[-1] * m.count()
        operands = {s: env[s] for s in op.args[:2]}
        for slot, value in operands.items():
            env[slot] = self.replaced(value)
        return operands

    def after(self, m: Machine, op: Op, env: list[Any], operands: dict[int, Any]) -> None:
        """Put operands back that are still needed, and replace results.

        Args:
            m: The running programs.
            op: The operation that has run.
            env: Values by slot.
            operands: The result of ``before``.
        """
        for slot, value in operands.items():
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
            env[op.results[0]] = self.replaced(env[op.results[0]])
