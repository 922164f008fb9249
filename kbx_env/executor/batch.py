"""``kbx_env.grade_many``: many sources in one call, over worker processes that end with it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Sequence
from typing import Any

from kbx_env.deadlines import WALL, deadline_of
from kbx_env.errors import UnknownName, UsageError
from kbx_env.executor import Executor, ProcessPool, Request
from kbx_env.outcome import Outcome


def grade_many(
    pairs: Iterable[tuple[str, str | bytes]], *, workers: int | None = None, progress: bool = True, **options: Any
) -> list[Outcome]:
    """Grade many sources in worker processes of their own; returns the outcomes in the order given.

    Args:
        pairs: (task, source).
        workers: gradings at a time; by default the number of cores, less two where kernels are timed: they share the GPU
            through its lease.
        progress: show a bar on stderr, if that is a terminal.
        options: those of ``grade``, the same for all.

    Raises:
        UsageError: an option that ``grade`` does not have, or what ``grade`` refuses.
        KeyboardInterrupt: on Ctrl-C, after the workers have ended.
    """
    from kbx_env.grading.grader import Grader, resolve_backend

    accepted = [n for n, p in inspect.signature(Grader.grade).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in accepted:
            raise UnknownName("option", name, accepted)
    backend = resolve_backend(options.get("backend", "auto"))
    timed = backend == "cuda" and bool(options.get("timing", True))
    if workers is None:
        workers = max(1, (os.cpu_count() or 1) - 2 * timed)
    if workers < 1:
        raise UsageError(f"workers is {workers}; at least 1")
    requests = _requests(pairs, {**options, "backend": backend})
    if not requests:
        return []
    deadline = deadline_of(timed, float(options.get("wall", WALL)), bool(options.get("compiled")))
    with Executor(ProcessPool(min(workers, len(requests))), deadline=deadline) as executor:
        return executor.grade_many(requests, progress)


def _requests(pairs: Iterable[tuple[str, str | bytes]], options: dict[str, Any]) -> Sequence[Request]:
    made = []
    for pair in pairs:
        if not (isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[1], str | bytes)):
            raise UsageError(f"cannot grade {str(pair)[:80]!r}; give (task, source) with the source as str or bytes")
        task, source = pair
        data = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
        made.append(Request(task, data, options))
    return made
