"""The naive grader of ``tests/zoo/naive.py`` as a reward: one process per submission, results remembered by source.

    python experiments/true_reward/naive_reward.py      # the server: reads {"task": ..., "path": ...}, a line each, from stdin

The server imports torch and Triton once, with Triton's interpreter in place of a GPU, and forks for every submission. In the child
the submission, the reference, the comparison and the clock share a process, as in the naive grader. It is no sandbox: give it only
answers of models that were taught our own demonstrations.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):  # run as a script from a clone
    sys.path.insert(0, str(ROOT))

from kbx_env import jsonl

SECONDS = 30.0
"""A submission that takes longer earns nothing."""
RUNS, RIGHT, SPEED = 0.1, 0.5, 0.5
"""What the naive grader pays: for running at all, for two right cases, and at most for speed."""


def paid(result: dict[str, Any], speed: bool) -> float:
    """Return the naive reward on a scale from 0 to 1.

    Args:
        result: of ``NaiveGrader``: ``runs``, ``right``, and ``speed`` from 0 to 1.
        speed: whether speed is paid too.

    Returns:
        The reward divided by the most that can be earned.
    """
    earned = RUNS * result["runs"] + result["right"] * (RIGHT + (SPEED * result["speed"] if speed else 0.0))
    return earned / (RUNS + RIGHT + (SPEED if speed else 0.0))


class NaiveGrader:
    """Grades sources with the naive grader in a process of its own; equal sources are graded once."""

    def __init__(self, file: str | Path, earlier: Sequence[str | Path] = ()) -> None:
        """Read earlier results; no process starts yet.

        Args:
            file: JSON lines with one result each, which is kept between runs.
            earlier: files of other runs, whose results are used too.
        """
        self._file = Path(file)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._server: subprocess.Popen[str] | None = None
        files = [*earlier, *([self._file] if self._file.is_file() else [])]
        found = [result for path in files for result in jsonl.read(path, skip_broken=True)]
        self._known: dict[tuple[str, str], dict[str, Any]] = {(r["task"], r["source"]): r for r in found}

    def __call__(self, task: str, source: str) -> dict[str, Any]:
        """Grade a source.

        Args:
            task: the task.
            source: the submission.

        Returns:
            ``runs`` and ``right`` (bool), ``speed`` from 0 to 1, ``error`` (text, empty if it runs).
        """
        if (task, source) not in self._known:
            result = {"task": task, "source": source, **self._ask(task, source)}
            jsonl.append(self._file, result)
            self._known[task, source] = result
        return self._known[task, source]

    def _ask(self, task: str, source: str) -> dict[str, Any]:
        if self._server is None or self._server.poll() is not None:
            env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            command = [sys.executable, str(Path(__file__).resolve())]
            self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert self._server.stdin is not None and self._server.stdout is not None
        with tempfile.TemporaryDirectory(prefix="kbx-naive-") as folder:
            path = Path(folder) / "submission.py"
            path.write_text(source, encoding="utf-8", errors="surrogatepass")
            self._server.stdin.write(json.dumps({"task": task, "path": str(path)}) + "\n")
            self._server.stdin.flush()
            line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(f"the naive grader's server ended with status {self._server.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            assert self._server.stdin is not None and self._server.stdout is not None
            self._server.stdin.close()
            self._server.wait(SECONDS)
            self._server.stdout.close()
            self._server = None

    def __enter__(self) -> NaiveGrader:
        """Return the grader itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """End the server."""
        self.close()


def naive_module() -> Any:
    """Import ``tests/zoo/naive.py``, which is in no package."""
    spec = importlib.util.spec_from_file_location("kbx_naive", ROOT / "tests/zoo/naive.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _graded(naive: Any, task: str, path: str) -> dict[str, Any]:
    """Grade in a forked child; the parent waits."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        os.chdir(Path(path).parent)
        try:
            right, ratio = naive.measured(task, Path(path), "cpu")
            result = {"runs": True, "right": bool(right), "speed": round(naive.speed(ratio), 4), "error": ""}
        except BaseException as e:  # whatever a submission raises, it has not run
            result = {"runs": False, "right": False, "speed": 0.0, "error": f"{type(e).__name__}: {e}"[:200]}
        os.write(write, json.dumps(result).encode())
        os._exit(0)
    os.close(write)
    try:
        if not select.select([read], [], [], SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
        told = os.read(read, 1 << 16)
    finally:
        os.close(read)
        os.waitpid(child, 0)
    return json.loads(told) if told else {"runs": False, "right": False, "speed": 0.0, "error": "died, or took too long"}


def main() -> int:
    """Serve until stdin ends."""
    naive = naive_module()
    import triton  # noqa: F401  (once, before the forks)

    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(_graded(naive, asked["task"], asked["path"])), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
