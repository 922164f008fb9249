"""Processor time is told by what a process does: graders, runners, engines, compilers."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from kbx_env.eval import cpu_watch
from kbx_env.eval.cpu_watch import PROGRAMS, CpuWatch, Usage, role_of

BUSY = """
import ctypes, subprocess, sys, time
def busy(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
busy(0.3)
for program in sys.argv[2:]:
    subprocess.run([sys.executable, "-S", "-c", "import time\\nwhile time.process_time() < %s: pass" % program])
print(flush=True)
sys.stdin.read()
"""


def _computed(name: str, *programs: str, watch: CpuWatch | None = None) -> dict[str, float]:
    watch = watch or CpuWatch()
    watch.start()
    command = [sys.executable, "-S", "-c", BUSY, name, *programs]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        time.sleep(2 * cpu_watch.SAMPLE_SECONDS)
        watch.stop()
        child.kill()
    return watch.seconds()


def test_seconds_are_those_of_the_role() -> None:
    found = _computed("kbx-engine")
    assert 0.25 <= found["engine"] <= 1.0
    assert list(found) == sorted(found, key=lambda role: -found[role])


def test_time_in_the_system_and_page_faults_are_told_of_each_role() -> None:
    watch = CpuWatch()
    found = _computed("kbx-engine", watch=watch)
    assert 0 <= watch.system_seconds().get("engine", 0.0) < found["engine"]
    assert 100 < watch.page_faults()["engine"] < 100_000, "it has started Python"


def test_what_no_look_has_seen_is_told() -> None:
    watch = CpuWatch()
    watch.start()
    watch.stop()
    assert watch.seconds(100.0)["not seen"] > 99 and watch.own_seconds > 0
    assert "not seen" not in watch.seconds(-1.0)


def test_what_a_runner_starts_counts_once_and_by_itself() -> None:
    found = _computed("kbx-runner", "0.5", "0.3")
    assert 0.25 <= found["runner"] <= 0.7 and 0.75 <= found[PROGRAMS] <= 1.3
    assert found.get("other", 0.0) < 0.1


def test_what_was_computed_before_does_not_count() -> None:
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    watch = CpuWatch()
    watch.start()
    watch.stop()
    assert watch.seconds().get("parent", 0.0) < 0.2
    CpuWatch().stop()
    assert not CpuWatch().seconds()


@pytest.mark.parametrize(
    "name, command, role",
    [
        ("kbx-runner", "python -m kbx_env.sandbox.zygote 5", "runner"),
        ("kbx-compiler", "", "compiler to TTIR"),
        ("python", "python -m kbx_env.sandbox.zygote 5", "zygote"),
        ("python", "python -m kbx_env.executor.pools.fork_server_main 7 kbx_env.grading.grader:Grader", "grader"),
        ("nvidia-smi", "nvidia-smi", "other"),
    ],
)
def test_roles_are_read_from_name_and_command(name: str, command: str, role: str) -> None:
    assert role_of(1, name, command) == role
    assert role_of(os.getpid(), name, command) == "parent"


def test_a_name_may_hold_anything() -> None:
    text = "12 (a) b (c) S 3 12 12 0 -1 4194560 77 0 0 0 " + f"{150} {50} 20 10 20 0 1 0 777 0 0"
    tick = os.sysconf("SC_CLK_TCK")
    found = Usage.read(text)
    assert (found.name, found.parent, found.began, found.faults) == ("a) b (c", 3, 777, 77)
    assert found.system == pytest.approx(50 / tick)
    assert (found.own, found.programs) == (pytest.approx(200 / tick), pytest.approx(30 / tick))
