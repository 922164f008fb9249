"""Compiles the kernels of one source once for several gradings of it, as a proof makes them.

Only the generator uses it, for its own kernels. Every grading of a submission has a compiler of its own. What is shared is the
answer of the process that runs none of the source's code: the same source and the same description give the same kernel.
A grading executes only kernels that it has described itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kbx_env.grading.runtime.compiler_client import KernelCompiler
from kbx_env.grading.runtime.zygote_client import Zygote


class SharedCompiler:
    """Makes the compilers of gradings. Those of the same source, one grading after the other, share a process.

    Attributes:
        rows: compiled kernels of the last source by description: the key, and what the engine needs.
    """

    def __init__(self) -> None:
        self.rows: dict[str, tuple[str, Mapping[str, Any]]] = {}
        self._made: tuple[Zygote, bytes, KernelCompiler] | None = None

    def __call__(self, zygote: Zygote, source: bytes) -> KernelCompiler:
        """Return the compiler of one grading.

        Args:
            zygote: forks the process.
            source: the submission.

        Returns:
            The compiler; its ``close`` leaves the process to the next grading of the same source.

        Raises:
            SandboxError: the process did not start.
        """
        if self._made is None or self._made[0] is not zygote or self._made[1] != source:
            self.close()
            self._made = zygote, source, KernelCompiler(zygote, source)
        return _OneGrading(self, self._made[2])

    def shares(self, process: KernelCompiler) -> bool:
        """Return whether the next grading of the same source gets this process."""
        return self._made is not None and self._made[2] is process

    def close(self) -> None:
        """End the process and forget the kernels."""
        self.rows = {}
        if self._made is not None:
            self._made[2].close()
            self._made = None


class _OneGrading(KernelCompiler):
    """The compiler of one grading; attributes as for ``KernelCompiler``."""

    def __init__(self, shared: SharedCompiler, process: KernelCompiler) -> None:
        self._shared, self._compiler = shared, process
        self.rows, self.changed = {}, ""

    def compile(self, recipe: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """Compile a kernel, or return the one of an equal description; arguments as for ``KernelCompiler``."""
        described = json.dumps(recipe, sort_keys=True)
        if described not in self._shared.rows:
            answer: dict[str, Any] = {}
            try:
                answer = self._compiler.compile(recipe, deadline)
            finally:
                # A late answer would be taken for the answer to the next description.
                if "key" not in answer:
                    self._shared.close()
            self.changed = self._compiler.changed
            if "key" not in answer:
                return answer
            self._shared.rows[described] = answer["key"], self._compiler.rows[answer["key"]]
        key, row = self._shared.rows[described]
        self.rows[key] = row
        return {"key": key, "text": row["text"]}

    def close(self) -> None:
        """Leave the process to the next grading, unless it has failed."""
        if not self._shared.shares(self._compiler):
            self._compiler.close()
