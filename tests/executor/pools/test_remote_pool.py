"""A service in place of local workers: the pool, the environment, a report and the batch grader of training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest
from grading_service import Grader, running
from kbx_env.eval import report
from kbx_env.train.batch_grader import BatchGrader

from kbx_env.errors import UsageError
from kbx_env.executor import Executor, Request, WorkerLost
from kbx_env.executor.pools.remote import RemotePool
from kbx_env.outcome import Verdict
from kbx_env.service.server import Server


@pytest.fixture(scope="module")
def grader() -> Grader:
    return Grader()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, grader: Grader) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("remote"), grader, width=4) as made:
        yield made


def test_a_pool(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RemotePool(server.url, width=3, same_code=True)
    with Executor(pool, attempts=1, capacity=50) as executor:
        requests = [Request("math/abs", b"%d wrong" % k if k % 2 else b"%d" % k, {"targets": ()}) for k in range(20)]
        outcomes = executor.grade_many(requests, progress=False)
        assert [o.correct for o in outcomes] == [k % 2 == 0 for k in range(20)]
        with pytest.raises(UsageError, match="unknown task"):
            executor.submit(Request("math/zzz", b"x")).result(10)
    with pytest.raises(WorkerLost):
        pool.grade(Request("math/abs", b"after the end"), 5)
    with pytest.raises(UsageError, match="grades on backend 'cpu'"):
        pool.backend("cuda")
    monkeypatch.setattr("kbx_env.versions.code_digest", lambda: "another")
    with pytest.raises(UsageError, match="other code"):
        RemotePool(server.url, same_code=True)


def test_an_environment(server: Server, grader: Grader) -> None:
    env = gymnasium.make("kbx/Kernel-v0", grader=server.url, task="math/abs", max_turns=2)
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step("wrong for the env")
    assert not terminated and info["outcome"].verdict is Verdict.INCORRECT and reward == 0
    _, reward, terminated, _, info = env.step("right for the env")
    assert terminated and reward > 0 and grader.calls[-1][2]["split"] == "train"
    env.close()
    with pytest.raises(UsageError, match="not on 'cuda'"):
        gymnasium.make("kbx/Kernel-v0", grader=server.url, backend="cuda")


def test_a_batch_of_training(server: Server) -> None:
    with BatchGrader(url=server.url) as grade:
        graded = grade([("math/abs", "right for training"), ("math/abs", "wrong for training")])
        assert [g.solved for g in graded] == [True, False] and graded[0].reward
        assert grade.backend == "cpu" and not grade.timed
    with pytest.raises(UsageError, match="give one of them"):
        BatchGrader(url=server.url, executor="ray")


@pytest.mark.full
def test_a_report(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ["--policy", "expert", "--tasks", "math/abs,math/cos", "--split", "all", "--grader", server.url]
    out = report.run(report.parser().parse_args([*common, "--out", str(tmp_path / "out")]))
    summary = json.loads((out / "report.json").read_text())["summary"]
    assert summary["n"] == 2 and summary["correct_rate"] == 1
    for more in (["--gpus", "2"], ["--executor", "ray"], ["--aa", "3"]):
        with pytest.raises(UsageError, match="the service has the machines"):
            report.run(report.parser().parse_args([*common, *more, "--out", str(tmp_path / "no")]))
    monkeypatch.setattr("kbx_env.client._ASK", 0.3)
    with pytest.raises(UsageError, match="start one with kbx serve"):
        RemotePool("http://127.0.0.1:1")
