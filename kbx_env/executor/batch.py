"""``kbx_env.grade_many``: grades many sources in one call, in worker processes that end with the call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kbx_env.errors import UsageError
from kbx_env.executor import Executor, ProcessPool, Request
from kbx_env.executor.worker_count import default_workers
from kbx_env.options import GradeOptions
from kbx_env.outcome import Outcome


def grade_many(
    pairs: Iterable[tuple[str, str | bytes]], *, workers: int | None = None, progress: bool = True, **options: Any
) -> list[Outcome]:
    """Grade many sources in worker processes that end with the call.

    Args:
        pairs: (task, source).
        workers: gradings at a time; by default the number of cores, on CUDA less two and at most 16. Timed gradings share the
            GPU through its lock.
        progress: show a progress bar on stderr, if stderr is a terminal.
        **options: fields of ``kbx_env.options.GradeOptions``, the same for all.

    Returns:
        The outcomes, in the order of the pairs.

    Raises:
        UsageError: an unknown task or option, a value that is not accepted, or fewer than one worker.
        KeyboardInterrupt: on Ctrl-C, after the workers have ended.
    """
    chosen = GradeOptions.of(options).resolved()
    if workers is None:
        workers = default_workers(chosen.backend)
    if workers < 1:
        raise UsageError(f"workers is {workers}; at least 1")
    requests = _requests(pairs, {**options, "backend": chosen.backend})
    if not requests:
        return []
    with Executor(ProcessPool(min(workers, len(requests))), deadline=chosen.deadline) as executor:
        return executor.grade_many(requests, progress)


def _requests(pairs: Iterable[tuple[str, str | bytes]], options: dict[str, Any]) -> Sequence[Request]:
    requests = []
    for pair in pairs:
        if not (isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[1], str | bytes)):
            raise UsageError(f"cannot grade {str(pair)[:80]!r}; give (task, source) with the source as str or bytes")
        task, source = pair
        data = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
        requests.append(Request(task, data, options))
    return requests
