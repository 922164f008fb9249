"""One timing at a time, alone, across threads and processes, whatever becomes of them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kbx_env.grading.timing import gpu_lock
from kbx_env.grading.timing.gpu_lock import PARTS, GpuHold, GpuLock

HOLD = """
import sys, time
from kbx_env.grading.timing.gpu_lock import PARTS, GpuHold, GpuLock
with getattr(GpuLock("g", sys.argv[1]), sys.argv[2])():
    print("held", flush=True)
    time.sleep(30)
"""


def _holder(folder: Path, how: str) -> subprocess.Popen:
    p = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), how], stdout=subprocess.PIPE, text=True)
    assert p.stdout and p.stdout.readline() == "held\n"
    return p


def _takes(lease: GpuLock, how: str) -> threading.Event:
    got = threading.Event()

    def take() -> None:
        with getattr(lease, how)():
            got.set()

    threading.Thread(target=take, daemon=True).start()
    return got


def test_gradings_share_and_timing_is_alone(tmp_path) -> None:
    lease = GpuLock("g", tmp_path)
    with lease.shared(), lease.shared():
        timing = _takes(lease, "alone")
        assert not timing.wait(0.1)
        # Who comes after it waits behind it: a stream of gradings must not keep timing out forever.
        late = _takes(lease, "shared")
        assert not late.wait(0.1)
    assert timing.wait(5) and late.wait(5)
    assert _takes(GpuLock("another", tmp_path), "alone").wait(5)


@pytest.mark.parametrize("how, other", [("alone", "alone"), ("alone", "shared"), ("shared", "alone")])
def test_it_holds_across_processes_and_ends_with_them(tmp_path, how: str, other: str) -> None:
    holder = _holder(tmp_path, how)
    got = _takes(GpuLock("g", tmp_path), other)
    assert not got.wait(0.1)
    holder.kill()
    holder.wait()
    assert got.wait(5)


def test_who_asks_first_is_alone_first(tmp_path) -> None:
    lease, order, threads = GpuLock("g", tmp_path), list[int](), []

    def wait(k: int) -> None:
        with lease.alone():
            order.append(k)

    dead = subprocess.Popen(["true"])
    dead.wait()
    with lease.shared():
        for k in range(5):
            threads.append(threading.Thread(target=wait, args=(k,)))
            threads[-1].start()
            time.sleep(0.03)
        (lease.folder / "line" / f"{0:020d}-{dead.pid}-1").touch()  # it died while it stood there
    for thread in threads:
        thread.join(5)
    assert order == [0, 1, 2, 3, 4] and not list((lease.folder / "line").iterdir())


def test_the_wait_is_told(tmp_path) -> None:
    lease = GpuLock("g", tmp_path)
    waits: list[float] = []

    def wait() -> None:
        with lease.alone() as waited:
            waits.append(waited)

    with lease.shared():
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
    thread.join(5)
    assert 0.15 < waits[0] < 5


def test_known_users_are_those_that_live_or_lived_a_moment_ago(tmp_path, monkeypatch) -> None:
    """The driver's samples of who computed reach back: what has just ended is no stranger."""
    lease = GpuLock("g", tmp_path)
    ended = subprocess.Popen(["true"])
    with lease.user(ended.pid):
        ended.wait()
    with lease.user(os.getppid()):
        assert lease.users() == {os.getpid(), os.getppid(), ended.pid}
    monkeypatch.setattr(gpu_lock, "ENDED_PROCESS_SECONDS", 0.0)
    assert ended.pid not in lease.users() and not (lease.folder / "users" / str(ended.pid)).exists()


def test_a_runner_that_ends_before_its_grading_stays_known(tmp_path, monkeypatch) -> None:
    """The driver tells for a while that it has computed: the grading that measures next took it for a stranger."""
    lease = GpuLock("g", tmp_path)
    process = subprocess.Popen(["sleep", "60"])
    with lease.user(process.pid):
        file = lease.folder / "users" / str(process.pid)
        os.utime(file, (0, 0))  # it was started long ago
        process.kill()
        process.wait()
        lease.register(process.pid)
        assert process.pid in lease.users()
    assert process.pid in lease.users()


def test_a_grading_may_ask_within_what_it_holds(tmp_path) -> None:
    hold, other = GpuHold(GpuLock("g", tmp_path)), GpuLock("g", tmp_path)
    with hold.using():
        timing = _takes(other, "alone")  # waits for us, and we must not wait for it
        assert not timing.wait(0.05)
        with hold.using():
            pass
        assert not timing.wait(0.05), "what was asked for within is not given back early"
    assert timing.wait(5)
    with hold.alone(), hold.using():
        assert not _takes(other, "shared").wait(0.05)
    with GpuHold(None).alone(), GpuHold(None).using():
        assert GpuHold(None).users() == frozenset()


def test_who_shares_never_gets_it_alone_by_asking_within(tmp_path) -> None:
    hold = GpuHold(GpuLock("g", tmp_path))
    with hold.using(), pytest.raises(RuntimeError, match="alone"), hold.alone():
        pass
    with hold.alone():
        pass


def test_memory_is_shared_out_in_order(tmp_path) -> None:
    lease, got = GpuLock("g", tmp_path), threading.Event()
    with lease.room(PARTS - 3), lease.room(2):

        def large() -> None:
            with lease.room(4):
                got.set()

        threading.Thread(target=large, daemon=True).start()
        assert not got.wait(0.1)
        small = threading.Event()

        def take() -> None:
            with lease.room(1):
                small.set()

        threading.Thread(target=take, daemon=True).start()
        assert not small.wait(0.1), "one part is free, but somebody waits for four"
    assert got.wait(5) and small.wait(5)
    with GpuHold(lease).room(7.0), GpuHold(None).room(1.0):  # more than all there is: all there is
        pass
    with lease.room(PARTS, "kept"), lease.room(PARTS):  # the pools are divided apart
        pass


def test_an_idle_gpu_in_a_shared_window_is_taken(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_lock, "EXCLUSIVE_BATCH", 1)
    monkeypatch.setattr(gpu_lock, "SHARED_WINDOW_SECONDS", 5.0)
    lease = GpuLock("g", tmp_path)
    with lease.alone():
        shares = _takes(lease, "shared")
        time.sleep(0.1)
        timing = _takes(lease, "alone")
        time.sleep(0.05)
    began = time.monotonic()
    assert shares.wait(2) and timing.wait(2) and time.monotonic() - began < 1.0
    with lease.shared():
        assert not _takes(lease, "alone").wait(0.3), "one that is shared is not"


def test_a_crowd_that_waits_to_measure_ends_a_shared_window(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_lock, "CROWD", 2)
    monkeypatch.setattr(gpu_lock, "LEAST_WINDOW_SECONDS", 0.4)
    lease = GpuLock("g", tmp_path)
    lease._write_state(0, time.monotonic() + 1.4)
    began = time.monotonic()
    with lease.shared():
        first, second = _takes(lease, "alone"), _takes(lease, "alone")
        time.sleep(0.1)
        assert not lease.wanted_alone(), "a window lasts for a moment in any case"
        time.sleep(0.4)
        assert lease.wanted_alone(), "most workers wait to measure: who shares gives way"
        assert not _takes(lease, "shared").wait(0.1)
    assert first.wait(1) and second.wait(1) and time.monotonic() - began < 1.3
    lease = GpuLock("another", tmp_path)
    lease._write_state(0, time.monotonic() + 1.4)
    with lease.shared():
        _takes(lease, "alone")
        time.sleep(0.5)
        assert not lease.wanted_alone(), "one is no crowd"


def test_small_memory_waits_for_nobody(tmp_path) -> None:
    lease = GpuLock("g", tmp_path)
    with lease.room(PARTS), GpuHold(lease).room(gpu_lock.UNRESERVED):
        pass


def test_those_who_wait_are_alone_one_after_the_other_and_then_it_is_everybodys(tmp_path, monkeypatch) -> None:
    """The GPU idles while the last who share it leave: once for several, not once for each."""
    monkeypatch.setattr(gpu_lock, "EXCLUSIVE_BATCH", 2)
    monkeypatch.setattr(gpu_lock, "SHARED_WINDOW_SECONDS", 0.3)
    lease, order, threads = GpuLock("g", tmp_path), list[str](), []

    def alone(k: int) -> None:
        with lease.alone():
            order.append("alone")
            time.sleep(0.1)

    def share() -> None:
        with lease.shared():
            order.append("shared")

    with lease.shared():
        for k in range(3):
            threads.append(threading.Thread(target=alone, args=(k,)))
            threads[-1].start()
        time.sleep(0.1)
        threads.append(threading.Thread(target=share))
        threads[-1].start()
        time.sleep(0.1)
        assert not order, "one who shares is there, and one who comes later stands behind those in line"
    for thread in threads:
        thread.join(5)
    assert order == ["alone", "alone", "shared", "alone"]
    began = time.monotonic()
    with lease.alone():
        pass
    with lease.alone():
        pass
    assert time.monotonic() - began < 0.25, "where nobody asks to share there is nothing to wait for"


def test_contexts_of_all_gpus_are_made_one_at_a_time(tmp_path) -> None:
    one, other = GpuLock("g", tmp_path), GpuLock("h", tmp_path)
    with one.starting():
        second = _takes(other, "starting")
        assert not second.wait(0.1)
        with other.alone(quiet=False):
            pass
    assert second.wait(5)
    # confinement.unhidden() hides what begins like this.
    assert all(f.name.startswith(f"kbx-gpu-{os.getuid()}-") for f in tmp_path.iterdir())


def test_a_context_is_made_beside_who_asks_for_no_quiet(tmp_path) -> None:
    lease = GpuLock("g", tmp_path)
    with lease.alone(quiet=False):
        assert _takes(lease, "starting").wait(5)
        quiet = _takes(lease, "alone")
        time.sleep(0.1)
        later = _takes(GpuLock("g", tmp_path), "starting")
        assert not later.wait(0.1) and not quiet.is_set(), "who waits in line has asked for quiet"
    assert quiet.wait(5) and later.wait(5)


def test_contexts_are_made_one_at_a_time_and_never_beside_who_asks_for_quiet(tmp_path) -> None:
    lease = GpuLock("g", tmp_path)
    with lease.alone():
        first = _takes(lease, "starting")
        assert not first.wait(0.1)
    assert first.wait(5)
    with lease.starting():
        assert _takes(lease, "shared").wait(5), "others share the GPU meanwhile"
        second, timing = _takes(GpuLock("g", tmp_path), "starting"), _takes(lease, "alone")
        assert not second.wait(0.1) and not timing.is_set()
    assert second.wait(5) and timing.wait(5)
