"""Checks that kernels which were executed are what their source compiles to (CPU tier)."""

from __future__ import annotations

import random
import time

from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.grading.runtime.zygote_client import Zygote
from kbx_env.outcome import Violation
from kbx_env.protocol import wire

CHECKED = 1
"""Kernels of a grading that are compiled again, chosen in secret among those that were executed."""
SECONDS = 30.0
"""Time limit of compiling them; the first compilation took part of the submission's time."""


def forged_kernel(session: RunnerSession, zygote: Zygote, source: bytes, seed: int) -> Violation | None:
    """Compile secretly chosen kernels again in a process that runs none of the submission's code, and compare.

    Args:
        session: of a submission that would be paid.
        zygote: forks the process; one that lives, because the session's own may be gone.
        source: the submission.
        seed: of the choice.

    Returns:
        A violation if a kernel is not what the source defines; ``None`` if it is, or where that cannot be decided.

    Raises:
        SandboxError: the process cannot be started.
    """
    assert session.engine is not None
    texts = session.engine.texts
    keys = sorted(texts)
    random.Random(seed).shuffle(keys)
    for key in keys[:CHECKED]:
        reply, _ = session.ask({"op": "recipe", "key": key})
        recipe = reply.get("recipe")
        if not isinstance(recipe, dict):
            return _forged("Triton compiled no such kernel")
        with zygote.spawn(role="compiler") as process:
            try:
                header = {"recipe": recipe, "target": "sm_90", "text": texts[key]}
                answer, _ = process.ask(header, [source], deadline=time.monotonic() + SECONDS)
            except wire.WireError as e:  # too deep a source, or too large a constant
                return _forged(f"the source cannot be compiled again ({type(e).__name__})")
        if answer.get("absent"):
            return _forged(str(answer["absent"])[:200])
        if answer.get("same") is False:
            return _forged("the source compiles to another kernel")
    return None


def _forged(why: str) -> Violation:
    return Violation("tampering", f"a kernel was executed that the source does not define: {why}")
