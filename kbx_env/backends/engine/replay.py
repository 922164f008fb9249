"""Execute a call once more from the memory before it, with other integers on the way or in another order of programs.

The steps of the host code stay the same, also where it read scalars back: only the launches differ.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from kbx_env.backends import ttir
from kbx_env.backends.engine.engine import Engine


class Replay:
    """Remembers one call: the memory before it, and the messages of the grader with the steps of the host code.

    Args:
        engine: The engine that is about to execute the call.
    """

    def __init__(self, engine: Engine) -> None:
        self._kernels, self._texts = engine.kernels, engine.texts
        self._heap = copy.deepcopy(engine.heap)
        self._messages: list[tuple[Mapping[str, Any], list[bytearray]]] = []

    def record(self, header: Mapping[str, Any], blobs: list[bytearray]) -> None:
        """Remember one message of the call and the bytes that came with it."""
        self._messages.append((header, blobs))

    def run(self, change: Mapping[str, Any], views: Sequence[Any]) -> tuple[dict[str, Any], list[bytes]]:
        """Execute the call again.

        Args:
            change: ``seconds``, the limit of CPU time; and either the ``order`` of the programs of each launch, or
                ``place`` and ``table`` of a ``Perturbation`` and whether to ``count``.
            views: The views to read afterwards, as ``Heap.view`` takes them.

        Returns:
            ``touched``, the amount of work that met other integers, ``seen``, how often each byte occurred if ``count``
            is set, and the bytes of the views. Without other integers, only these bytes.

        Raises:
            TtirError: a launch fails.
            TimeoutError: the launches took too long.
        """
        engine = Engine()
        engine.kernels, engine.texts, engine.heap = self._kernels, self._texts, copy.deepcopy(self._heap)
        flags = {k: self._messages[0][0].get(k) is True for k in ("moves", "picks", "torch_ops", "ablate", "values")}
        engine.begin(float(change["seconds"]), **flags)
        engine.meter = ttir.Meter()  # without details: traffic and findings are known from the call itself
        seen: dict[tuple[int, int], Any] | None = {} if change.get("count") else None
        if "order" in change:
            engine.order = str(change["order"])
        else:
            engine.perturbation = ttir.Perturbation(str(change["place"]), change["table"], seen=seen)
        for header, blobs in self._messages:
            for base in header.get("free", []):
                engine.heap.free(base)
            for name, base, size, offset, blob, spec in header.get("inputs", []):
                engine.input(name, base, size, offset, blobs[blob], spec)
            engine.run(header.get("steps", []))
        reply: dict[str, Any] = {}
        if engine.perturbation is not None:
            reply = {"touched": engine.perturbation.touched, "seen": [v.tolist() for v in (seen or {}).values()]}
        return reply, [engine.read(v)[1] for v in views]
