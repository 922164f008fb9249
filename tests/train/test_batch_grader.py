"""The grader of a training step: all at once, nothing twice, and a fault of the grader is never a reward."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kbx_env.errors import UsageError
from kbx_env.executor.pools import gpu
from kbx_env.outcome import Fault, Outcome, Verdict

pytest.importorskip("trl")
from kbx_env.train import batch_grader  # noqa: E402
from kbx_env.train.batch_grader import BatchGrader, check_trains_elsewhere, own_gpus, own_share, workers_here  # noqa: E402
from kbx_env.train.step_metrics import episode_stats, summary  # noqa: E402
from service_stand_in import by_word, right  # noqa: E402

TASK, OTHER = "random/logspace", "math/erfc_sqrt"


WRONG = 0.1 + 0.3 * 0.5
"""What the default preset pays for a kernel that compiles and passes half of the telling cases."""


def test_a_batch_is_graded_in_one_parallel_call() -> None:
    together = threading.Barrier(4, timeout=20)  # breaks unless four gradings run at the same time

    def grade(task: str, source: bytes, **options: Any) -> Outcome:
        together.wait()
        return by_word(task, source)

    with BatchGrader(workers=4, backend="cpu", grade=grade) as grader:
        graded = grader([(TASK, f"GOOD {i}" if i % 2 else f"bad {i}") for i in range(4)])
    assert [j.outcome.correct for j in graded] == [False, True, False, True] and grader.gradings == 4 and grader.seconds > 0
    assert [j.solved for j in graded] == [False, True, False, True] and "Verdict: incorrect" in graded[0].feedback


def test_what_the_grader_is_asked() -> None:
    seen = []

    def grade(task: str, source: bytes, **options: Any) -> Outcome:
        seen.append((task, source, options))
        return right(task)

    with BatchGrader("estimated", "cpu", workers=1, grade=grade) as grader:
        grader([(TASK, "Here it is:\n```python\nx = 1\n```\nDone.")])
    ((task, source, options),) = seen
    assert (task, source) == (TASK, b"x = 1\n") and options["seed"] is None and options["split"] == "train"
    assert options["estimate"] == "h200", "the preset needs it"


def test_a_fault_is_masked_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def grade(task: str, source: bytes, **options: Any) -> Outcome:
        if b"RAISE" in source:
            raise RuntimeError("the grader broke")
        if b"REFUSE" in source:
            raise UsageError("no such thing")
        return by_word(task, source)

    with BatchGrader(backend="cpu", workers=2, grade=grade) as grader:
        graded = grader([(TASK, t) for t in ("GOOD", "LOST", "RAISE", "REFUSE", "bad")] + [("math/nothing", "GOOD")])
    assert [j.reward for j in graded[1:4]] == [None] * 3 and graded[5].reward is None
    assert graded[0].reward == pytest.approx(1.0) and graded[4].reward == pytest.approx(WRONG)
    assert all(j.outcome.fault is Fault.INFRA and not j.solved for j in graded[1:4])
    assert capsys.readouterr().err.count("masked") == 1
    episodes = [episode_stats(TASK, [j], j.reward) for j in graded]
    told = summary(episodes)
    assert told["masked"] == 4 and told["correct_rate"] == 0.5 and told["speedup"] is None and told["turns"] == 1
    assert told["reward"] == pytest.approx((1.0 + WRONG) / 2)
    assert summary([])["reward"] is None and summary(episodes[1:2])["reward"] is None


def test_equal_sources_are_graded_once_and_kept(tmp_path: Path) -> None:
    calls = []

    def grade(task: str, source: bytes, **options: Any) -> Outcome:
        calls.append(source)
        return by_word(task, source)

    pairs = [(TASK, "GOOD"), (TASK, "```python\nGOOD```"), (TASK, "GOOD"), (OTHER, "GOOD")]
    for again in range(2):
        with BatchGrader(backend="cpu", workers=1, out=tmp_path, grade=grade) as grader:
            grader(pairs)
            assert all(j.outcome.correct for j in grader(pairs)) and grader.gradings == 8
        assert len(calls) == 2, f"run {again}: one for each task"


def test_runs_may_share_a_file_of_gradings(tmp_path: Path) -> None:
    calls = []

    def grade(task: str, source: bytes, **options: Any) -> Outcome:
        calls.append(source)
        return by_word(task, source)

    for run in "ab":
        with BatchGrader(backend="cpu", workers=1, out=tmp_path / run, store=tmp_path / "both/known.sqlite", grade=grade) as grader:
            assert grader([(TASK, "GOOD")])[0].outcome.correct
    assert len(calls) == 1 and not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write to store="):
        BatchGrader(backend="cpu", store=tmp_path / "file/known.sqlite", grade=grade)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"preset": "defualt"}, "default"), ({"backend": "tpu"}, "cpu"), ({"executor": "threads"}, "process"),
        ({"workers": 0}, "workers"), ({"ray_address": "auto"}, "executor=ray"),
        ({"per_gpu": 2}, "executor=ray"), ({"targets": ["sm_1"]}, "sm_90"),
        ({"sizes": "large"}, "held-out"), ({"wall": 0.0}, "wall"), ({"torch_ops": "no"}, "strict"),
    ],
)  # fmt: skip
def test_mistakes(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        BatchGrader(**options, grade=by_word)


def test_workers_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its lease gives timing the GPU alone, so that several gradings do no harm.
    found = []
    for cores, processes in ((16, "1"), (16, "4"), (2, "1"), (None, "1")):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        found.append((workers_here("cuda"), workers_here("cpu")))
    assert found == [(14, 16), (3, 4), (1, 2), (1, 1)]


@pytest.mark.parametrize(
    ("cores", "processes", "gpus", "each"),
    [(32, 1, [1], 16), (32, 1, [1, 2], 15), (192, 1, [7], 16), (192, 7, [7], 2), (128, 6, [6, 7], 5), (128, 2, [4, 5, 6, 7], 16)],
)
def test_a_gpu_has_no_more_workers_than_its_memory_holds(
    cores: int, processes: int, gpus: list[int], each: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    here = [0] * 8
    for rank in range(processes):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        mine = own_gpus(gpus)
        assert workers_here("cuda", gpus) == each * len(mine)
        for gpu_number in mine:
            here[int(gpu_number)] += each
    assert all(here[g] <= 16 for g in gpus)


def test_processes_of_a_run_share_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in "012":
        monkeypatch.setenv("RANK", rank)
        shares.append(own_share(8))
    assert shares == [3, 3, 2]
    with pytest.raises(UsageError, match="2 worker.* for 3 training processes"):
        own_share(2)


def test_on_ray_each_process_starts_its_own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    from kbx_env.executor.pools import ray_pool

    pool = SimpleNamespace(width=8, grade=None, close=lambda: None)
    monkeypatch.setattr(ray_pool, "open_ray", lambda *settings: (pool, "NVIDIA H200"))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with BatchGrader(backend="cuda", executor="ray", ray_address="auto") as grader:
        assert pool.width == 2 and grader.backend == "cuda" and grader.timed and not grader.shares_gpu


@pytest.mark.parametrize(
    ("gpus", "says"), [([6, 6], "each once"), ([-1], "nvidia-smi"), ([1, 5], "trains on GPU 5")]
)
def test_a_gpu_that_trains_does_not_only_grade(gpus: list[int], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(UsageError, match=says):
        check_trains_elsewhere(gpus)
    check_trains_elsewhere([6, 7])


@pytest.mark.parametrize(
    ("count", "found"),
    [
        (0, {"CUDA_VISIBLE_DEVICES": "5"}),
        (2, {"CUDA_VISIBLE_DEVICES": "GPU-1", "KBX_CLOSED": "/dev/nvidia4:/dev/nvidia6"}),
    ],
)  # fmt: skip
def test_gradings_beside_a_training_process_open_its_gpu_only(
    count: int, found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(gpu, "uuid_of", lambda device: f"GPU-{device}")
    monkeypatch.setattr(gpu.gpu_files, "others", lambda uuid: ["/dev/nvidia4", "/dev/nvidia6"])
    assert batch_grader._own_gpu() == found


def test_gpus_that_only_grade_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = []
    for rank, gpus in (("0", [4, 5, 6]), ("1", [4, 5, 6]), ("1", [7])):
        monkeypatch.setenv("LOCAL_RANK", rank)
        found.append(own_gpus(gpus))
    assert found == [[4, 6], [5], [7]]


def test_an_answer_is_graded_before_the_batch_has_ended() -> None:
    graded, go_on = threading.Event(), threading.Event()
    calls: list[bytes] = []

    def grade(task: str, source: bytes, **options: Any) -> Outcome:
        calls.append(source)
        graded.set()
        assert go_on.wait(20)
        return by_word(task, source)

    with BatchGrader(workers=2, backend="cpu", grade=grade) as grader:
        grader.begin(TASK, "```python\nGOOD\n```")
        assert graded.wait(20), "while others are generated"
        grader.begin(TASK, "```python\nGOOD\n```")
        go_on.set()
        found = grader([(TASK, "```python\nGOOD\n```"), (TASK, "bad")])
        assert [j.outcome.correct for j in found] == [True, False] and sorted(calls) == [b"GOOD\n", b"bad"]
        assert grader.gradings == 2 and not grader._ahead


def test_only_proofs_begin_early_on_the_gpu_that_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_grader, "resolve_backend", lambda backend: "cuda")
    monkeypatch.setattr(batch_grader.versions, "environment", lambda backend: {"device": backend})
    proven, calls = threading.Event(), list[tuple[str, bytes]]()

    def grade(task: str, source: bytes, **options: Any) -> Outcome:
        calls.append((options["backend"], source))
        if options["backend"] == "cpu":
            proven.set()
        return by_word(task, source)

    with BatchGrader(workers=2, grade=grade, out=tmp_path) as grader:
        grader.begin("no/such", "bad")
        grader.begin(TASK, "bad")
        assert proven.wait(20) and calls == [("cpu", b"bad")], "while others are generated"
        found = grader([(TASK, "bad"), (TASK, "GOOD")])
        assert [j.outcome.correct for j in found] == [False, True] and found[0].outcome.backend == "cuda"
        assert sorted(calls) == [("cpu", b"bad"), ("cuda", b"GOOD")], "a wrong answer needs no GPU"
        grader.begin(TASK, "bad")
        assert not grader([(TASK, "bad")])[0].outcome.correct and len(calls) == 2, "it is in the file of gradings"


@pytest.mark.parametrize("broken", [False, True])
def test_no_early_proof_with_fixed_inputs_or_a_broken_store(
    broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(batch_grader, "resolve_backend", lambda backend: "cuda")
    monkeypatch.setattr(batch_grader.versions, "environment", lambda backend: {"device": backend})
    backends: list[str] = []

    def grade(task: str, source: bytes, **options: Any) -> Outcome:
        backends.append(options["backend"])
        return by_word(task, source)

    def get(*args: Any) -> Any:
        raise sqlite3.OperationalError("database is locked")

    with BatchGrader(workers=1, grade=grade, grading_seed=None if broken else 3, out=tmp_path) as grader:
        with monkeypatch.context() as failing:
            if broken:
                failing.setattr(batch_grader.Store, "get", get)
            grader.begin(TASK, "bad")
        assert not grader([(TASK, "bad")])[0].outcome.correct and backends == ["cuda"]


def test_reasoning_is_not_graded() -> None:
    drafted = "<think>\n```python\nGOOD\n```\n</think>\n```python\n# a longer one\n```\n"
    for tags, found in ((("<think>", "</think>"), "# a longer one\n"), (("<x>", "</x>"), "# a longer one\n"), ((), "")):
        seen: list[bytes] = []

        def grade(task: str, source: bytes, **options: Any) -> Outcome:
            seen.append(source)
            return by_word(task, source)

        with BatchGrader(workers=1, backend="cpu", grade=grade, reasoning=tags) as grader:
            draft = drafted if found else "<think>\n```python\nGOOD\n```\n"
            graded = grader([(TASK, draft)])
        assert graded[0].outcome.correct is (not found) and (not found or seen == [found.encode()])
    with BatchGrader(workers=1, backend="cpu", grade=by_word) as grader:
        assert not grader([(TASK, "<think>\n```python\nGOOD\n```\n")])[0].outcome.correct, "reasoning that never ended"


def test_evaluation_takes_the_held_out_shapes() -> None:
    seen = []

    def grade(task: str, source: bytes, **options: Any) -> Outcome:
        seen.append(options["split"])
        return right(task)

    with BatchGrader(backend="cpu", workers=1, split="eval", grade=grade) as grader:
        grader([(TASK, "GOOD")])
    assert seen == ["eval"]


def test_held_out_sizes_are_asked_for_by_name_alone() -> None:
    seen = []

    def grade(task: str, source: bytes, **options: Any) -> Outcome:
        seen.append(options.get("sizes"))
        return right(task)

    for sizes in ("published", "held-out"):
        with BatchGrader(backend="cpu", workers=1, sizes=sizes, grade=grade) as grader:
            grader([(TASK, "GOOD")])
    assert seen == [None, "held-out"], "stored gradings of published sizes keep their keys"


def test_a_real_grading() -> None:
    from kbx_env.spec.catalog import expert_source

    with BatchGrader(backend="cpu", workers=1, targets=()) as grader:
        deep = f"```python\nx = {'-' * 9000}1\n```"  # more than Python's parser takes: MemoryError
        good, empty, nested = grader([(TASK, f"```python\n{expert_source(TASK)}\n```"), (TASK, ""), (TASK, deep)])
    assert good.outcome.correct and good.compiled and good.reward == pytest.approx(1.0)
    assert empty.outcome.verdict is Verdict.MALFORMED and empty.reward == 0.0
    assert nested.outcome.verdict is Verdict.MALFORMED and nested.reward == 0.0
