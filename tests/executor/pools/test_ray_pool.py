"""The Ray lane: what dies, hangs or loses its node is lost once and graded again; nothing is lost or kept twice."""

from __future__ import annotations

import collections
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kbx_env.eval import report

import kbx_env
from kbx_env.errors import UsageError
from kbx_env.executor import Executor, ProcessPool, Request, WorkerLost
from kbx_env.executor.pools.ray_pool import RayPool, open_ray, share
from kbx_env.extras import install_hint
from kbx_env.outcome import Fault, Verdict
from kbx_env.spec.catalog import expert_source
from kbx_env.store import Store

ray = pytest.importorskip("ray")

FAKE = """
import os, pathlib, signal, time
import ray
from kbx_env.errors import UsageError
from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict

class Grader:
    def grade(self, task, source, **options):
        print("a library that prints")
        if source == b"die" or source == b"die once" and not pathlib.Path(options["mark"]).exists():
            pathlib.Path(options["mark"]).touch()
            os._exit(3)
        if source == b"segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if source == b"hang":
            time.sleep(60)
        if source == b"raise":
            raise RuntimeError("a bug of ours")
        if source == b"usage":
            raise UsageError("unknown task")
        if source == b"wrong":
            return Outcome(task, Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, "off by 3")
        if source.startswith(b"slow"):
            time.sleep(0.2)
        where = {"node": ray.get_runtime_context().get_node_id(), "pid": os.getpid()}
        return Outcome(task, Verdict.CORRECT, Stage.CORRECT, "cpu", "contract", cases=Cases(1, 1), manifest=where)
    def close(self):
        pass

class Broken:
    def __init__(self):
        raise ImportError("no driver on this node")
"""
SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False}


class Counted(Store):
    """Counts how often each key is written: an upsert would hide a second write."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.written: collections.Counter[str] = collections.Counter()

    def put(self, key: str, *args: Any) -> None:
        self.written[key] += 1
        super().put(key, *args)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head without cores and a node of two cores and a GPU (which nothing touches), that know the fake graders."""
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("fake")
    (folder / "fake_ray_grader.py").write_text(FAKE)
    with pytest.MonkeyPatch.context() as patch:
        root = str(Path(kbx_env.__file__).resolve().parent.parent)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), root]))
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL})
        made.add_node(num_cpus=2, num_gpus=1, resources={"accelerator_type:H200": 1}, **SMALL)
        yield made
        made.shutdown()


@pytest.fixture
def lane(cluster: Any) -> Iterator[RayPool]:
    made = RayPool(cluster.address, gpus=False, grader="fake_ray_grader:Grader", patience=100)
    yield made
    made.close()


def test_actors_judge_and_survive_what_dies(lane: RayPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert lane.width == 2 and not lane.gpus and lane.device() == "cpu"
    with Executor(lane, deadline=100) as executor:  # on a machine under load actors take long to start
        options = {"mark": str(tmp_path / "died"), "targets": ("sm_90",)}
        sources = [b"right", b"wrong", b"die once", b"die", b"segv", b"raise", b"usage"]
        jobs = [executor.submit(Request("t", s, options)) for s in sources]
        right, wrong, once, died, crashed, raised = (j.result(300) for j in jobs[:6])
        assert right.correct and once.correct
        assert wrong.verdict is Verdict.INCORRECT and wrong.fault is Fault.POLICY and wrong.message == "off by 3"
        for lost in (died, crashed):
            assert lost.fault is Fault.INFRA and "is lost" in lost.message and "node" in lost.message
            assert lost.manifest["attempt"] == 2
        assert raised.fault is Fault.INFRA and "a bug of ours" in raised.message
        with pytest.raises(UsageError, match="unknown task"):
            jobs[6].result(300)
    assert capfd.readouterr() == ("", ""), "Ray's paragraphs do not belong between the lines of a report"
    assert not ray.is_initialized(), "the lane connected, so it disconnects"


def test_a_hanging_actor_is_killed_at_the_deadline_and_replaced(lane: RayPool) -> None:
    with Executor(lane, attempts=1, deadline=2) as executor:
        start = time.monotonic()
        hung = executor.submit(Request("t", b"hang")).result(30)
        assert hung.fault is Fault.INFRA and "within 2 s" in hung.message and time.monotonic() - start < 30
        assert executor.submit(Request("t", b"right")).result(30).correct


def test_close_ends_busy_actors(lane: RayPool) -> None:
    executor = Executor(lane, deadline=60)
    job = executor.submit(Request("t", b"hang"))
    waiting = [executor.submit(Request("t", b"hang %d" % i)) for i in range(4)]
    while not lane._busy:
        time.sleep(0.02)
    start = time.monotonic()
    executor.close()
    assert time.monotonic() - start < 10
    assert job.result(1).fault is Fault.INFRA and all(w.done() for w in waiting)


def test_no_room_is_said_and_not_waited_for_forever(lane: RayPool) -> None:
    with Executor(lane, deadline=60) as executor:
        slow = [executor.submit(Request("t", b"slow %d" % i)) for i in range(2)]
        assert all(s.result(90).correct for s in slow), "now both cores are taken"
        other = RayPool("auto", per_gpu=6, grader="fake_ray_grader:Grader", patience=1)
        assert other.gpus and other.width == 2 and other.kinds() == ["H200"]
        with pytest.raises(WorkerLost, match=r"needs 1 CPU and 0.1666 GPU; the cluster has 2 CPU and 1 GPU on 2 node"):
            other.grade(Request("t", b"right"), 5)
        other.close()
        assert executor.submit(Request("t", b"right")).result(30).correct, "closing one lane leaves Ray to the other"


@pytest.mark.parametrize(
    ("sizes", "workers", "each"),
    [
        ([(0, 0), (16, 1)], None, 14), ([(32, 2)], None, 15), ([(64, 4), (16, 2)], None, 7), ([(2, 1)], None, 1),
        ([(8, 0)], None, 1), ([(32, 2)], 4, 2), ([(64, 4)], 5, 2), ([(16, 1)], 1, 1), ([(16, 1)], 99, 14), ([(4, 0)], 3, 1),
    ],
)  # fmt: skip
def test_what_shares_a_gpu(sizes: list[tuple[int, int]], workers: int | None, each: int) -> None:
    assert share(sizes, workers) == each


def test_a_gpu_that_torch_does_not_find_is_refused(cluster: Any) -> None:
    with pytest.raises(UsageError, match="torch finds no GPU in a Ray actor"):
        open_ray("auto", cluster.address)


def test_an_actor_that_cannot_start_says_why(cluster: Any) -> None:
    lane = RayPool(cluster.address, workers=1, grader="fake_ray_grader:Broken", patience=60)
    try:
        with pytest.raises(WorkerLost, match="no driver on this node"):
            lane.grade(Request("t", b"right"), 60)
    finally:
        lane.close()


def test_a_report_over_ray_judges_an_expert_as_a_process_does(cluster: Any, tmp_path: Path) -> None:
    source = expert_source("activation/relu")
    assert source is not None
    options = {"backend": "cpu", "targets": (), "seed": 3}
    with Executor(ProcessPool(1), deadline=90) as executor:  # both at a time: each spends seconds on importing torch
        other = executor.submit(Request("activation/relu", source.encode(), options))
        args = ["--policy", "expert", "--backend", "cpu", "--split", "all", "--tasks", "activation/relu", "--seed", "3"]
        args += ["--executor", "ray", "--ray-address", cluster.address, "--workers", "1", "--targets", "none"]
        out = report.run(report.parser().parse_args([*args, "--out", str(tmp_path / "out")]))
        there = json.loads(other.result(90).to_json())
    (here,) = json.loads((out / "report.json").read_text())["tasks"]
    assert here["verdict"] == "correct" and here["manifest"]["device"] == "cpu" and not ray.is_initialized()
    same = ("verdict", "stage", "cases", "source_sha256")
    assert [here[k] for k in same] == [there[k] for k in same]


def test_a_node_that_goes_and_one_that_comes(cluster: Any, tmp_path: Path) -> None:
    going = cluster.add_node(num_cpus=2, **SMALL)
    lane = RayPool(cluster.address, workers=4, gpus=False, grader="fake_ray_grader:Grader", patience=20)
    store, answered = Counted(tmp_path / "g.sqlite"), collections.Counter[int]()
    half = threading.Semaphore(0)
    with Executor(lane, store=store, deadline=20) as executor:
        jobs = []

        def submit(i: int) -> None:
            jobs.append(executor.submit(Request("t", b"slow %d" % i, policy="p", sample=i)))
            jobs[i].add_done_callback(lambda _: (answered.update([i]), half.release()))

        for i in range(30):
            submit(i)
        for _ in range(10):
            half.acquire(timeout=30)
        cluster.remove_node(going, allow_graceful=False)  # this takes a while, in which its actors go on
        for i in range(30, 40):
            submit(i)
        outcomes = [j.result(60) for j in jobs]
        assert all(o.correct for o in outcomes)
        assert answered == collections.Counter(range(40))
        assert len(store.written) == 40 and set(store.written.values()) == {1} and len(list(store.rows())) == 40
        assert going.node_id in {o.manifest["node"] for o in outcomes[:20]}
        assert going.node_id not in {o.manifest["node"] for o in outcomes[30:]}

        new = cluster.add_node(num_cpus=2, **SMALL)
        seen, end, i = set[str](), time.monotonic() + 30, 0
        while new.node_id not in seen and time.monotonic() < end:
            more = [executor.submit(Request("t", b"slow again %d" % (i := i + 1))) for _ in range(8)]
            seen |= {j.result(60).manifest["node"] for j in more}
        assert new.node_id in seen, "a node that joins is used"
    store.close()


@pytest.mark.parametrize(
    ("address", "more", "says"),
    [
        ("127.0.0.1:1", {}, "nothing answers"), ("ray://head:10001", {}, "HOST:PORT"), ("6379", {}, "HOST:PORT"),
        ("local", {"workers": 0}, "workers is 0"), ("local", {"per_gpu": 0}, "per_gpu is 0"),
    ],
)  # fmt: skip
def test_bad_usage_names_the_fix(address: str, more: dict[str, Any], says: str) -> None:
    start = time.monotonic()
    with pytest.raises(UsageError, match=says):
        RayPool(address, **more)
    assert time.monotonic() - start < 10 and not ray.is_initialized()


def test_a_port_that_is_not_rays_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kbx_env.executor.pools.ray_session._PROBE_SECONDS", 2)
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(UsageError, match="nothing answers"):
        RayPool(f"127.0.0.1:{mute.getsockname()[1]}")


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=re.escape(install_hint("rllib"))):
        RayPool("local")


def test_a_local_ray_is_started_quiet_and_ended(tmp_path: Path) -> None:
    (tmp_path / "fake_ray_grader.py").write_text(FAKE)
    script = """
from kbx_env.executor import Executor, Request
from kbx_env.executor.pools.ray_pool import RayPool
with Executor(RayPool(workers=1, grader="fake_ray_grader:Grader"), attempts=1) as e:
    assert e.submit(Request("t", b"right")).result(60).correct
    assert not e.submit(Request("t", b"die", {"mark": "/dev/null"})).result(60).correct
import ray
assert not ray.is_initialized()
"""
    root = str(Path(kbx_env.__file__).resolve().parent.parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root]), "RAY_memory_monitor_refresh_ms": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
