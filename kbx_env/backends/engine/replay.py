"""A call executed once more, from the memory as it was before it, with other integers on the way.

What the host code asked for stays the same, scalars that it read back included: nobody but the launches answers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

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
        """Execute it; returns how much of the work met other integers, the integers that were there if asked, and the bytes of
        the views.

        Args:
            change: ``place`` and ``table`` of a ``Perturbation``, the ``seconds`` that this may take, whether to ``count``.
            views: what to read back.
        """
        engine = Engine()
        engine.kernels, engine.heap = self._kernels, copy.deepcopy(self._heap)
        flags = {k: self._asked[0][0].get(k) is True for k in ("moves", "picks", "torch_ops", "ablate")}
        engine.begin(float(change["seconds"]), **flags)
        engine.meter = ttir.Meter()  # only the values are wanted: traffic and findings are known from the call itself
        seen: dict[tuple[int, int], Any] | None = {} if change.get("count") else None
        engine.perturbation = ttir.Perturbation(str(change["place"]), change["table"], seen=seen)
        for header, blobs in self._asked:
            for base in header.get("free", []):
                engine.heap.free(base)
            for name, base, size, offset, blob, spec in header.get("inputs", []):
                engine.input(name, base, size, offset, blobs[blob], spec)
            engine.run(header.get("steps", []))
        told = {"touched": engine.perturbation.touched, "seen": [v.tolist() for v in (seen or {}).values()]}
        return told, [engine.read(v)[1] for v in views]
