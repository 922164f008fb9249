"""The simulated cluster: known schedules come out exactly, and no resource is ever used beyond what there is."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kbx_env.eval import simulate
from kbx_env.eval.simulate import (
    TURN_SECONDS,
    Job,
    Shape,
    bounds,
    check,
    dispatch_of,
    job_of,
    jobs_of,
    plan,
    play,
    repeated,
    shape_of,
)

from kbx_env.errors import UsageError
from kbx_env.grading.timing.gpu_lock import CROWD, EXCLUSIVE_BATCH

SECONDS = st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0])
JOBS = st.lists(st.builds(Job, SECONDS, SECONDS, SECONDS, SECONDS, st.booleans()), min_size=1, max_size=30)
SHAPES = st.builds(Shape, st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.sampled_from([0.0, 0.05, 1.0]))


@given(JOBS, st.sampled_from([0.0, 0.25]))
def test_one_worker_takes_the_sum_of_the_recorded_times(jobs: list[Job], dispatch: float) -> None:
    course = play(jobs, Shape(dispatch=dispatch))
    assert course.seconds == pytest.approx(sum(j.seconds + dispatch for j in jobs))
    waits = [e - t for t, e in zip(course.taken, course.ended, strict=True)]
    assert waits == pytest.approx([j.seconds + dispatch for j in jobs])


@settings(deadline=None)
@given(JOBS, SHAPES)
def test_no_resource_is_used_beyond_what_there_is(jobs: list[Job], shape: Shape) -> None:
    course = play(jobs, shape)
    if course.seconds:
        assert course.rate is not None
        for name, most in bounds(jobs, shape).items():
            assert course.rate <= most * (1 + 1e-9), name
    for j, taken, ended in zip(jobs, course.taken, course.ended, strict=True):
        assert ended - taken >= j.seconds + shape.dispatch - 1e-9, "a request lost some of its time"
    assert list(course.taken) == sorted(course.taken), "the queue is served in order"


@settings(deadline=None)
@given(JOBS, SHAPES)
def test_the_same_run_twice_is_the_same(jobs: list[Job], shape: Shape) -> None:
    assert play(jobs, shape) == play(jobs, shape)


@settings(deadline=None)
@given(JOBS, SHAPES)
def test_many_gpus_are_never_faster_than_as_many_times_one(jobs: list[Job], shape: Shape) -> None:
    one = play(jobs, Shape(1, 1, 1, shape.dispatch)).seconds
    many = play(jobs, Shape(shape.gpus, 1, shape.cores, shape.dispatch)).seconds
    assert many >= one / shape.gpus - 1e-9
    # With several workers a GPU, the order of arrival may favour either by a little; what one GPU can do at best, it never does.
    rate = play(jobs, shape).rate
    if rate:
        best = bounds(jobs, Shape(1, shape.workers, shape.cores, shape.dispatch))
        assert rate <= shape.gpus * min(best.values()) * (1 + 1e-9)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_timing_alone_bounds_the_rate(workers: int) -> None:
    jobs = [Job(core=0.2, alone=0.5 + 0.1 * (i % 3)) for i in range(60)]
    course = play(jobs, Shape(1, workers, workers))
    assert course.rate is not None and course.rate <= 60 / sum(j.alone for j in jobs)
    if workers > 1:  # another worker's CPU stages fill the waiting: the GPU is never idle but for the first of them
        assert course.seconds == pytest.approx(0.2 + sum(j.alone for j in jobs))


def test_correctness_shares_the_gpu_and_timing_does_not() -> None:
    assert play([Job(shared=1.0)] * 3, Shape(1, 3)).seconds == 1.0
    assert play([Job(alone=1.0)] * 3, Shape(1, 3)).seconds == 3.0
    mixed = play([Job(shared=1.0), Job(alone=1.0), Job(shared=1.0)], Shape(1, 3)).ended
    alone = TURN_SECONDS + 1.0
    assert mixed[1] == pytest.approx(alone), "a sharer gives way, and what waits to be alone is not overtaken"
    assert (mixed[0], mixed[2]) == pytest.approx((alone + 1.0 - TURN_SECONDS, alone + 1.0))
    assert play([Job(alone=1.0), Job(shared=1.0)], Shape(2, 1)).seconds == 1.0, "another GPU does not wait"


def test_sharers_get_a_window_after_a_batch_and_a_crowd_ends_it(monkeypatch) -> None:
    # One sharer, and gradings that are alone for a second each, one after the other or all at once.
    def shared_ends(alone: int) -> float:
        return play([Job(shared=2.0), *[Job(alone=1.0)] * alone], Shape(1, alone + 1)).ended[0]

    few = shared_ends(EXCLUSIVE_BATCH + 1)
    assert few == pytest.approx(EXCLUSIVE_BATCH + 1 + 2.0, abs=2 * TURN_SECONDS), "1.5 s in the window, the rest after it"
    crowd = shared_ends(2 * EXCLUSIVE_BATCH + CROWD)
    assert crowd > 2 * EXCLUSIVE_BATCH + CROWD + 1.0, "windows of 0.3 s as long as a crowd waits"
    mixed = [Job(core=0.5, shared=0.5, alone=0.4)] * 300
    early = play(mixed, Shape(1, 12, 64)).rate
    monkeypatch.setattr(simulate, "CROWD", 1000)
    late = play(mixed, Shape(1, 12, 64)).rate
    assert early is not None and late is not None and early > 1.1 * late, "the GPU measures for more of the time"


def test_cores_are_each_gpus_own() -> None:
    assert play([Job(core=1.0)] * 4, Shape(1, 4, 2)).seconds == 2.0
    assert play([Job(core=1.0)] * 4, Shape(2, 2, 2)).seconds == 1.0


def test_a_slow_dispatcher_bounds_a_large_cluster() -> None:
    course = play([Job(core=0.1)] * 500, Shape(64, 1, 1, dispatch=0.01))
    assert course.rate == pytest.approx(100, rel=0.05)


def test_a_faulty_request_takes_time_but_is_no_kernel() -> None:
    course = play([Job(core=1.0), Job(core=1.0, judged=False)], Shape())
    assert course.rate == pytest.approx(0.5)


ROW = {
    "task": "math/exp", "verdict": "correct", "begin": 10.0, "end": 16.0,
    "seconds": {"screen": 0.1, "proof": 1.0, "compile": 0.4, "correct": 0.5, "evidence": 0.5, "time": 2.0, "total": 5.0,
                "waited": 0.0, "shared": 1.0, "alone": 2.0},
}  # fmt: skip


def _result(**more: Any) -> dict[str, Any]:
    rate = {"kernels_per_second": 1 / 6}
    return {
        "backend": "cuda",
        "gpus": 1,
        "workers": 1,
        "cores": 4,
        "dispatch_ms": 2.0,
        "requests": [ROW],
        **rate,
        **more,
    }


def test_recorded_stages_become_needs() -> None:
    on_gpu = job_of(ROW, "cuda", 0.25)
    assert (on_gpu.core, on_gpu.shared, on_gpu.alone, on_gpu.slot) == pytest.approx((2.0, 1.0, 2.0, 0.75))
    on_cpu = job_of(ROW, "cpu", 0.0)
    assert (on_cpu.core, on_cpu.shared, on_cpu.alone, on_cpu.slot) == pytest.approx((5.0, 0, 0, 1.0))
    # A run waits for its own neighbours, not for those of the record.
    waited = job_of({**ROW, "end": 18.0, "seconds": {**ROW["seconds"], "waited": 2.0, "total": 7.0}}, "cuda", 0.25)
    assert waited == on_gpu
    lost = job_of({**ROW, "verdict": "infra_fault", "seconds": {}}, "cuda", 0.0)
    assert not lost.judged and lost.slot == lost.seconds == 6.0


def test_the_dispatcher_is_given_or_measured_or_one_millisecond() -> None:
    assert dispatch_of(_result(), 5) == 0.005 and dispatch_of(_result()) == 0.002 and dispatch_of({}) == 0.001


def test_a_run_is_checked_in_its_own_shape() -> None:
    result = _result()
    shape = shape_of(result, dispatch_of(result))
    assert (shape.gpus, shape.workers, shape.cores) == (1, 1, 4)
    told = check(result, jobs_of(result, shape.dispatch), True, shape)
    assert told["simulated"] == pytest.approx(1 / 6) and told["error"] == pytest.approx(0)
    assert check(_result(kernels_per_second=None), [Job(core=1)], False, shape)["error"] is None


@pytest.mark.parametrize(
    "broken", [{}, {"backend": "cpu"}, _result(requests=[{}]), _result(requests=5), _result(requests=[])]
)
def test_what_is_no_result_is_named(broken: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="result"):
        jobs_of(broken, 0.0)


def test_impossible_clusters_are_refused() -> None:
    for shape in (Shape(gpus=0), Shape(workers=0), Shape(cores=0), Shape(dispatch=-1)):
        with pytest.raises(UsageError, match="at least 1"):
            play([Job(1.0)], shape)


def test_a_plan_is_weak_scaling_and_names_what_binds() -> None:
    jobs = [Job(core=0.3, alone=1.0), Job(core=0.1, alone=3.0)]
    rows = plan(jobs, [1, 8, 32], Shape(workers=2, cores=2, dispatch=0.001))
    assert [r["gpus"] for r in rows] == [1, 8, 32] and rows[0]["efficiency"] == pytest.approx(1)
    assert all(r["bound"] == "gpu" and 0.9 < r["efficiency"] < 1.02 and r["p50"] <= r["p95"] for r in rows)
    late = plan(jobs, [1, 512], Shape(workers=2, cores=2, dispatch=0.05))[1]
    assert late["bound"] == "dispatch" and late["kernels_per_second"] == pytest.approx(20, rel=0.05)
    assert late["efficiency"] < 0.1


def test_a_thousand_gpus_and_a_hundred_thousand_requests_take_seconds() -> None:
    rng = random.Random(0)
    jobs = [Job(rng.random(), rng.random(), rng.random(), 0.01) for _ in range(60)]
    begun = time.process_time()
    course = play(repeated(jobs, 100_000), Shape(1024, 2, 4, 0.0001))
    assert len(course.ended) == 100_000 and time.process_time() - begun < 20
