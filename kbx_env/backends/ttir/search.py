"""Numbers looked for among all that a kernel computes, so that a wrong kernel can show how far it comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .graph import Op
from .shadow import Array

if TYPE_CHECKING:
    from .control import Machine

MOST = 1 << 24
"""Floats that are looked through at most: by count, not by time, so that the same is found every time."""
_NEW = ("arith.", "math.")
_ALSO = ("tt.dot", "tt.reduce", "tt.scan", "tt.extern_elementwise", "tt.precise_sqrt", "tt.precise_divf", "tt.clampf")
"""Operations whose results are values of their own; what only moves or repeats values is passed over."""


@dataclass
class Search:
    """Looks for sets of numbers among the fp32 and fp64 results of every operation.

    Attributes:
        values: each set, fp64.
        slack: how far from each of its numbers a result may lie.
        left: floats that may still be looked through.
    """

    values: Sequence[Array]
    slack: Sequence[Array]
    left: int = MOST
    _found: dict[tuple[int, int], list[Array]] = field(default_factory=dict)

    def before(self, m: Machine, op: Op, env: list[Any]) -> dict[int, Any]:
        """Nothing is changed."""
        return {}

    def after(self, m: Machine, op: Op, env: list[Any], held: dict[int, Any]) -> None:
        """Look through the results of an operation."""
        if op.name == "arith.constant" or not (op.name.startswith(_NEW) or op.name in _ALSO):
            return
        for slot, t in zip(op.results, op.rtypes, strict=True):
            v = env[slot]
            if t.elem not in ("f32", "f64") or not isinstance(v, np.ndarray) or v.size > self.left:
                continue
            self.left -= v.size
            there = np.sort(v, axis=None).astype(np.float64)
            there = there[np.isfinite(there)]
            if len(there):
                seen = self._found.setdefault((id(op), slot), [np.zeros(len(x), bool) for x in self.values])
                for mark, x, slack in zip(seen, self.values, self.slack, strict=True):
                    at = np.searchsorted(there, x)
                    below, above = there[np.maximum(at - 1, 0)], there[np.minimum(at, len(there) - 1)]
                    mark |= np.minimum(np.abs(x - below), np.abs(x - above)) <= slack

    def shares(self) -> list[float]:
        """Of each set, the share that one operation has computed: that of which most was found."""
        return [max((float(m[k].mean()) for m in self._found.values()), default=0.0) for k in range(len(self.values))]
