"""The worker that times torch.compile: it compiles while it does not hold the GPU, and measures while nobody else does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from kbx_env.tasks import _schemes, _seams

from kbx_env.grading import reference
from kbx_env.grading.timing import compiled_worker as worker
from kbx_env.grading.timing.gpu_lock import GpuHold, GpuLock
from kbx_env.grading.timing.ratio import Paired
from kbx_env.protocol.wire import assembled
from kbx_env.spec.catalog import load_task

TASK = load_task("activation/gelu_fp16")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def _plain(graph: Any, examples: Any) -> Callable[..., Any]:
    return graph.forward  # type: ignore[no-any-return]


def _free(lease: GpuLock) -> bool:
    """Whether somebody else could have the GPU alone now."""
    got = threading.Event()

    def take() -> None:
        with lease.alone():
            got.set()

    threading.Thread(target=take, daemon=True).start()
    return got.wait(1.0)


def _asked(**more: Any) -> dict[str, Any]:
    return {"task": TASK.id, "cases": [0], "limit": 120.0, "gpu_lock": None, **more}


def _small(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    """A task whose baseline is ``function`` of one small tensor."""
    case = SimpleNamespace(args={}, label=lambda: "N=8")
    task = SimpleNamespace(id="test/small", timed=(case,), eager=None, reference=function, written=lambda args: ())
    monkeypatch.setattr("kbx_env.spec.catalog.load_task", lambda name: task)
    monkeypatch.setattr(worker.compulsory_work, "input_bytes", lambda task, case: 32)
    monkeypatch.setattr(worker.inputs, "draw", lambda *_: {"x": torch.arange(8.0)})
    monkeypatch.setattr(worker, "_windows", lambda *_: [{"x": torch.arange(8.0) + i} for i in range(3)])


def _paired(a: Any, b: Any, **_: Any) -> Paired:
    a.measure([0])
    b.measure([0])
    return Paired(10.0, 5.0, 0.6931471805599453, 0.68, 0.70, 24)


def test_it_compiles_outside_and_measures_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lease, seen, rows = GpuLock("g", tmp_path), list[tuple[str, bool]](), list[dict[str, Any]]()

    def compile_fx(graph: Any, examples: Any) -> Callable[..., Any]:
        seen.append(("compile", _free(lease)))
        return graph.forward  # type: ignore[no-any-return]

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    def pair(a: Any, b: Any, **more: Any) -> Paired:
        seen.append(("pair", _free(lease)))
        return _paired(a, b)

    _small(monkeypatch, function)
    monkeypatch.setattr(worker, "pair", pair)
    asked = _asked(gpu_lock=str(lease.folder))
    worker.measure(asked, rows.append, device="cpu", tools=FakeDevice(), compile_fx=compile_fx, memory=1 << 30)
    assert seen == [("compile", True), ("compile", True), ("pair", False)], (
        "two graphs: the second came up while it was alone"
    )
    last = rows[-1]
    assert last["ratio"] == pytest.approx(0.5) and last["low"] < 0.5 < last["high"] and last["graphs"] == 2
    states = [r["state"] for r in rows[:-1]]
    assert states[0] == "compiling" and states[-1] == "using" and states.index("waiting") > 0
    assert _free(lease), "it is given back"


def test_a_compiled_graph_runs_only_with_the_gpu_and_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = worker.Gate(GpuHold(None), lambda row: None)
    task = SimpleNamespace(eager=lambda x: x.sin() + 1, reference=None)
    function = worker.baseline(task, gate, _plain)  # type: ignore[arg-type]
    x = torch.arange(4.0)
    with pytest.raises(worker.NeedsGpu):
        function(x)
    with gate.alone():
        assert torch.equal(function(x), x.sin() + 1)
    assert gate.graphs == 1, "what was compiled without the GPU serves with it"
    with pytest.raises(worker.NeedsGpu):
        function(x)


def test_more_shapes_than_its_limit_of_recompilations_are_all_compiled() -> None:
    gate = worker.Gate(GpuHold(None), lambda row: None)
    task = SimpleNamespace(eager=lambda x: x + 1, reference=None)
    for n in range(1, 14):
        function = worker.baseline(task, gate, _plain)  # type: ignore[arg-type]
        with gate.alone():
            function(torch.ones(n, 3))
    assert gate.graphs == 13


@pytest.mark.parametrize(
    "error, again", [(ValueError("no kernel for this"), False), (torch.cuda.OutOfMemoryError("full"), True)]
)
def test_a_compile_that_fails_has_no_ratio(monkeypatch: pytest.MonkeyPatch, error: Exception, again: bool) -> None:
    def compile_fx(graph: Any, examples: Any) -> Callable[..., Any]:
        raise error

    rows: list[dict[str, Any]] = []
    _small(monkeypatch, lambda x: x + 1)
    worker.measure(_asked(), rows.append, device="cpu", tools=FakeDevice(), compile_fx=compile_fx)
    assert "ratio" not in rows[-1] and str(error) in rows[-1]["why"] and rows[-1]["again"] is again, rows[-1]


def test_compiling_for_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = []
    _small(monkeypatch, lambda x: x + 1)
    worker.measure(_asked(limit=-1.0), rows.append, device="cpu", tools=FakeDevice(), compile_fx=_plain)
    assert "took longer" in rows[-1]["why"] and not rows[-1]["again"]


def test_a_task_of_the_catalogue_goes_all_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own baseline, inputs and rings; only the clock's numbers are invented."""
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(worker, "pair", _paired)
    small = min(range(len(TASK.timed)), key=lambda i: worker.compulsory_work.input_bytes(TASK, TASK.timed[i]))
    worker.measure(_asked(cases=[small]), rows.append, device="cpu", tools=FakeDevice(), compile_fx=_plain)
    assert rows[-1].get("ratio") == pytest.approx(0.5), rows[-1]


def test_what_the_compiler_measures_it_measures_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime import benchmarking

    lease, told, seen = GpuLock("g", tmp_path), list[str](), list[bool]()

    class Benchmarker:
        def benchmark_gpu(self, call: Callable[[], None]) -> float:
            call()
            return 1.5

    monkeypatch.setattr(benchmarking, "benchmarker", Benchmarker())
    gate = worker.Gate(GpuHold(lease), lambda row: told.append(row["state"]), limit=1.0)
    worker._measures_inside(gate)
    with gate.outside():
        got = benchmarking.benchmarker.benchmark_gpu(lambda: seen.append(_free(lease)))
    assert (got, seen, gate.held) == (1.5, [False], False) and gate.compiling < 0.9, (
        "the wait is not the compiler's time"
    )
    assert told == ["compiling", "waiting", "using", "compiling"] and _free(lease)
    with gate.alone():
        benchmarking.benchmarker.benchmark_gpu(lambda: None)
        assert gate.held


@pytest.mark.parametrize("name", ["quantization/matmul_w8a8", "fusion/fused_bmm_dropout_gelu"])
def test_the_judges_hooks_break_no_graph(name: str) -> None:
    """With them the one is compiled again at every call, and the other in three parts."""
    task = load_task(name)
    gate = worker.Gate(GpuHold(None), lambda row: None)
    index = min(range(len(task.timed)), key=lambda i: worker.compulsory_work.input_bytes(task, task.timed[i]))
    hooks = dict(vars(_schemes)), dict(vars(_seams))
    with worker.unhooked():
        function = worker.baseline(task, gate, _plain)
        for repeat in range(3):
            args = reference.resolve(worker._draw(task, task.cases[0], index, repeat, "cpu"), "cpu")
            with gate.alone():
                function(**assembled(args))
    assert gate.graphs == 1
    assert hooks == (dict(vars(_schemes)), dict(vars(_seams)))


def test_the_lease_is_found_by_its_folder(tmp_path: Path) -> None:
    lease = GpuLock("GPU-1-2", tmp_path)
    assert worker._gpu_lock_in(lease.folder).folder == lease.folder
