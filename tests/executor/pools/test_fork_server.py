"""The fork server of a pool: workers and zygotes are forks, and a server that has died is replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kbx_env.executor.pools.process import ProcessPool, Request, WorkerLost
from kbx_env.grading.runtime.zygote_process import ForkedProcess, ZygoteForkServer, ZygoteProcess
from kbx_env.outcome import Outcome

TELLS = """
import os
import time

from kbx_env.outcome import Cases, Outcome, Stage, Verdict

IMPORTED_BY = os.getpid()


class Grader:
    def grade(self, task, source, **options):
        if source == b"end":
            os._exit(3)
        time.sleep(0.3)
        said = f"{os.getpid()} {os.getppid()} {IMPORTED_BY}"
        return Outcome(task, Verdict.CORRECT, Stage.CORRECT, "cpu", "contract", message=said, cases=Cases(1, 1))

    def close(self):
        pass
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tells.py").write_text(TELLS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = ProcessPool(2, "tells:Grader")
    yield made
    made.close()


def _told(pool: ProcessPool, count: int) -> set[tuple[int, int, int]]:
    """Return what workers tell that grade at the same time."""
    with ThreadPoolExecutor(count) as threads:
        return set(threads.map(lambda _: _said(pool.grade(Request("t", b""), 60.0)), range(count)))


def _said(outcome: Outcome) -> tuple[int, int, int]:
    own, parent, importer = map(int, outcome.message.split())
    return own, parent, importer


def test_workers_are_forks_of_the_process_that_imported_the_grader(pool: ProcessPool) -> None:
    told = _told(pool, 6)
    assert len(told) == 2, "each of the two workers answers"
    servers = {server for _, *both in told for server in both}
    assert len(servers) == 1 and not servers & {os.getpid(), *(own for own, *_ in told)}


def test_a_worker_that_ends_is_replaced_by_another_fork(pool: ProcessPool) -> None:
    _, server, _ = _said(pool.grade(Request("t", b""), 60.0))
    with pytest.raises(WorkerLost, match="exit 3"):
        pool.grade(Request("t", b"end"), 60.0)
    assert {server for _, server, _ in _told(pool, 4)} == {server}


def test_workers_outlive_their_server_and_get_a_new_one(pool: ProcessPool) -> None:
    told = _told(pool, 6)
    server = next(iter(told))[1]
    os.kill(server, signal.SIGKILL)
    while pool._server is not None and pool._server.alive:
        time.sleep(0.01)
    workers = {own for own, *_ in told}
    assert {own for own, *_ in _told(pool, 4)} <= workers, "it has forked them already"
    for _ in workers:
        with pytest.raises(WorkerLost):
            pool.grade(Request("t", b"end"), 60.0)
    own, again, _ = _said(pool.grade(Request("t", b""), 60.0))
    assert again != server and own not in workers


def test_a_server_that_ends_while_it_is_asked_is_a_lost_worker(pool: ProcessPool, monkeypatch: pytest.MonkeyPatch) -> None:
    server = pool._server
    assert server is not None
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched, pytest.raises(WorkerLost, match="no process"):
        server._control.close()
        patched.setattr(type(server), "alive", True)
        pool._start()
    assert len(os.listdir("/proc/self/fd")) <= before, "no pipe stays open"


def test_a_pool_that_is_closed_at_once_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = ProcessPool(2, "tells:Grader")
    server = pool._server
    began = time.monotonic()
    pool.close()
    assert server is not None and not server.alive and time.monotonic() - began < 5.0


def test_a_zygote_server_forks_zygotes_which_leave_no_folder() -> None:
    with contextlib.closing(ZygoteForkServer()) as zygote_server:
        zygotes = [zygote_server.fork() for _ in range(2)]
        for zygote in zygotes:
            zygote.wait()
            assert zygote.process is not None and zygote.process.poll() is None
        assert len({z.process.pid for z in zygotes if z.process}) == 2
        zygotes[0].close()
        zygotes[0].close()  # closing twice does no harm
        assert zygotes[0].process is not None and zygotes[0].process.poll() == 0
    assert zygotes[1].process is not None and zygotes[1].process.poll() is None, "it does not need the zygote server"
    zygotes[1].close()
    assert not any(Path(z.folder).exists() for z in zygotes)


def test_a_zygote_whose_grader_is_gone_before_it_is_warm_ends() -> None:
    with contextlib.closing(ZygoteForkServer()) as zygote_server:
        lost, kept = zygote_server.fork(), zygote_server.fork()
        lost.control.close()
        kept.wait()
        until = time.monotonic() + 10
        while Path(lost.folder).exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert not Path(lost.folder).exists()
        kept.close()


def test_a_process_that_has_ended_is_told_from_one_that_runs() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    process = ForkedProcess(pid)
    assert process.poll() is None
    process.kill()
    assert process.wait(5) == 0 and process.poll() == 0
    process.kill()  # nothing happens
    os.waitpid(pid, 0)
    assert ForkedProcess(pid).poll() == 0
    os.close(read)
    os.close(write)


def test_the_environment_of_zygotes_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    with contextlib.closing(ZygoteForkServer()) as zygote_server, contextlib.closing(zygote_server.fork()) as zygote:
        assert isinstance(zygote, ZygoteProcess)
        zygote.wait()
        assert zygote.process is not None
        assert b"SOME_API_KEY" not in Path(f"/proc/{zygote.process.pid}/environ").read_bytes()
