"""Cores are shared out among GPUs: equal parts, near the GPU, threads of a core together."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbx_env.executor.pools import cpu_affinity
from kbx_env.executor.pools.process import ProcessPool, Request


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, Path]:
    """Two nodes of four cores with two threads each; the first GPU is on the second node."""
    for k in range(16):
        place = tmp_path / f"cpu/cpu{k}"
        (place / f"node{k % 8 // 4}").mkdir(parents=True)
        (place / "topology").mkdir()
        (place / "topology/thread_siblings_list").write_text(f"{k % 8},{k % 8 + 8}\n")
    for bus, uuid, node in (("0000:1A:00.0", "GPU-a", 1), ("0000:9b:00.0", "GPU-b", 0), ("0000:9c:00.0", "GPU-c", -1)):
        (tmp_path / f"driver/{bus}").mkdir(parents=True)
        (tmp_path / f"driver/{bus}/information").write_text(f"Model: H200\nGPU UUID: {uuid}\n")
        (tmp_path / f"pci/{bus.lower()}").mkdir(parents=True)
        (tmp_path / f"pci/{bus.lower()}/numa_node").write_text(f"{node}\n")
    return {"places": tmp_path / "cpu", "devices": tmp_path / "pci", "driver": tmp_path / "driver"}


def test_each_gpu_has_the_cores_beside_it(machine: dict[str, Path]) -> None:
    first, second = cpu_affinity.shares(["GPU-a", "GPU-b"], range(16), **machine)
    assert first == {4, 5, 6, 7, 12, 13, 14, 15} and second == {0, 1, 2, 3, 8, 9, 10, 11}


def test_threads_of_a_core_stay_together_where_nothing_is_known_of_the_gpus(machine: dict[str, Path]) -> None:
    for share in cpu_affinity.shares(["", "GPU-c", "no such", ""], range(16), **machine):
        assert len(share) == 4 and {k % 8 for k in share} == {k for k in share if k < 8}


def test_a_gpu_alone_and_gpus_without_enough_cores_have_all(machine: dict[str, Path]) -> None:
    assert cpu_affinity.shares(["GPU-a"], [1, 2, 3], **machine) == [{1, 2, 3}]
    assert cpu_affinity.shares(["GPU-a", "GPU-b"], [5], **machine) == [{5}, {5}]
    assert cpu_affinity.shares([], [5], **machine) == []


@given(st.integers(1, 9), st.sets(st.integers(0, 63), min_size=1))
def test_shares_are_equal_and_nobody_elses(gpus: int, mine: set[int]) -> None:
    found = cpu_affinity.shares([""] * gpus, mine)
    assert {len(s) for s in found} == {len(mine) // gpus or len(mine)} and set().union(*found) <= mine
    if gpus <= len(mine):
        assert sum(map(len, found)) == len(set().union(*found))


def test_by_default_what_this_process_may_use() -> None:
    assert cpu_affinity.shares([""]) == [os.sched_getaffinity(0)]


@pytest.mark.filterwarnings("error")
def test_a_lanes_workers_run_on_the_cores_that_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "where.py").write_text(
        "import os\nfrom kbx_env.outcome import Outcome, Stage, Verdict, Fault\nclass Grader:\n"
        "    def grade(self, task, source, **options):\n"
        "        where = f'{sorted(os.sched_getaffinity(0))} {os.environ.get(\"KBX_CORES\")}'\n"
        "        return Outcome(task, Verdict.INCORRECT, Stage.CORRECT, 'cpu', 'contract', Fault.POLICY, where)\n"
        "    def close(self): pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    mine = sorted(os.sched_getaffinity(0))[-1]
    lane = ProcessPool(1, "where:Grader", cores={mine})
    try:
        assert lane.grade(Request("t", b""), 60).message == f"[{mine}] None"
    finally:
        lane.close()
    del lane
    gc.collect()  # its pipes are closed: found open in another test, they were an error of that one
