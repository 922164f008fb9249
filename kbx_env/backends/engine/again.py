"""A call executed once more, from the memory as it was before it, with other integers on the way.

What the host code asked for stays the same, scalars that it read back included: nobody but the launches answers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kbx_env.backends import ttir
from kbx_env.backends.engine.engine import Engine


class Again:
    """Remembers one call: the memory before it, and what the grader and the host code asked for."""

    def __init__(self, engine: Engine) -> None:
        self._kernels = engine.kernels
        self._heap = copy.deepcopy(engine.heap)
        self._asked: list[tuple[Mapping[str, Any], list[bytearray]]] = []

    def note(self, header: Mapping[str, Any], blobs: list[bytearray]) -> None:
        """Remember one part of the call."""
        self._asked.append((header, blobs))

    def run(self, change: Mapping[str, Any], views: Sequence[Any]) -> tuple[dict[str, Any], list[bytes]]:
        """Execute it; returns how much of the work met other integers and the integers that were there if asked, or the shares of
        the numbers that were looked for, and the bytes of the views.

        Args:
            change: ``place`` and ``table`` of a ``Disturbance`` and whether to ``count``, or ``values`` and ``slack`` of a
                ``Search``; the ``seconds`` that this may take.
            views: what to read back.
        """
        engine = Engine()
        engine.kernels, engine.heap = self._kernels, copy.deepcopy(self._heap)
        flags = {k: self._asked[0][0].get(k) is True for k in ("moves", "picks", "torch_ops", "ablate")}
        engine.begin(float(change["seconds"]), **flags)
        engine.meter = ttir.Meter()  # only the values are wanted: traffic and findings are known from the call itself
        seen: dict[tuple[int, int], Any] | None = {} if change.get("count") else None
        if "values" in change:
            values, slack = ([np.array(x, np.float64) for x in change[k]] for k in ("values", "slack"))
            engine.disturbance = ttir.Search(values, slack)
        else:
            engine.disturbance = ttir.Disturbance(str(change["place"]), change["table"], seen=seen)
        for header, blobs in self._asked:
            for base in header.get("free", []):
                engine.heap.free(base)
            for name, base, size, offset, blob, spec in header.get("inputs", []):
                engine.input(name, base, size, offset, blobs[blob], spec)
            engine.run(header.get("steps", []))
        told: dict[str, Any]
        if isinstance(engine.disturbance, ttir.Search):
            told = {"shares": engine.disturbance.shares()}
        else:
            told = {"touched": engine.disturbance.touched, "seen": [v.tolist() for v in (seen or {}).values()]}
        return told, [engine.read(v)[1] for v in views]
