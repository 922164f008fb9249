"""Checkpoints of SQLite files in a thread of their own, so that no commit waits for one."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

PAGES = 16_384
"""Pages of the write-ahead log (64 MiB) at which a writer makes the checkpoint itself, because the thread does not keep up."""
_SECONDS = 1.0
"""Pause between two checkpoints."""


class Checkpoints:
    """Copies the write-ahead logs of some files to the files themselves, once a second.

    By default SQLite does it in the commit that makes the log longer than 1,000 pages. That commit then takes 5 to 30 ms in
    place of 0.2 ms. The writers of the files must call ``leave`` on their connections.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Start the thread.

        Args:
            paths: the SQLite files.
        """
        self._paths, self._ended = paths, threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            files = [
                stack.enter_context(contextlib.closing(sqlite3.connect(p, timeout=1, check_same_thread=False)))
                for p in self._paths
            ]
            while not self._ended.wait(_SECONDS):
                for db in files:
                    with contextlib.suppress(sqlite3.OperationalError):  # another process has the file; the next one does it
                        db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def leave(db: sqlite3.Connection) -> None:
    """Let a connection make a checkpoint only at a log of ``PAGES``.

    Args:
        db: the connection.
    """
    db.execute(f"PRAGMA wal_autocheckpoint={PAGES}")
