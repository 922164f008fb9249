"""Client of the process that compiles a submission's kernels from its source (CPU tier)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from kbx_env.grading.runtime.zygote_client import Runner, Zygote
from kbx_env.protocol import wire

TARGET = "sm_90"
"""GPU that kernels of the CPU tier are specialised for, as in ``sandbox.launches``."""


class KernelCompiler:
    """Compiles kernels in a process that runs none of the submission's code, so that what the engine executes is in the source.

    Attributes:
        rows: what the engine needs of each compiled kernel, by key.
        changed: how the submission's process has replaced the text of a function; empty if it has not.
    """

    def __init__(self, zygote: Zygote, source: bytes) -> None:
        """Start the process.

        Args:
            zygote: forks it.
            source: the submission.

        Raises:
            SandboxError: the process did not start.
        """
        self._zygote, self._source = zygote, source
        self._process: Runner | None = zygote.spawn(role="compiler")
        self._told = False
        self.rows: dict[str, Mapping[str, Any]] = {}
        self.changed = ""

    def compile(self, recipe: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """Compile a kernel.

        Args:
            recipe: the runner's description, not trusted.
            deadline: in seconds of ``time.monotonic``.

        Returns:
            The answer to the runner: ``key`` and the TTIR in ``text``, or ``error`` with the reason why the source does not give
            this kernel.

        Raises:
            wire.Late: the deadline passed.
            SandboxError: the process cannot be set up.
        """
        if self._process is None:
            self._process = self._zygote.spawn(role="compiler")
            self._told = False
        try:
            if not self._told:
                self._told = True
                self._process.ask({"source": True}, [self._source], deadline=deadline)
            answer, _ = self._process.ask({"recipe": recipe, "target": TARGET}, deadline=deadline)
        except wire.Late:
            raise
        except wire.WireError as e:  # too deep a source, or too large a constant: the next kernel gets another process
            self.close()
            return {"error": f"compiling it ends the process ({type(e).__name__})"}
        if "changed" in answer:
            self.changed = self.changed or str(answer["changed"])
            return {"error": self.changed}
        if "kernel" not in answer:
            return {"error": str(answer.get("error"))}
        row = dict(answer["kernel"])
        key = str(row.pop("key"))
        self.rows[key] = row
        return {"key": key, "text": row["text"]}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None


CompilerMaker: TypeAlias = Callable[[Zygote, bytes], KernelCompiler]
"""Makes the compiler of a grading from the zygote and the submission."""
