"""Windows into draws: the device and the grader make the same values, and they are of the law that the case asks for."""

from __future__ import annotations

import random

import pytest
import torch
from fake_device import FakeDevice
from triton.runtime.autotuner import Autotuner

from kbx_env.device.ipc_runner import IpcSender
from kbx_env.device.stopwatch import Stopwatch
from kbx_env.grading import compulsory_work
from kbx_env.grading.sizes import timed
from kbx_env.grading.timing import input_windows
from kbx_env.spec import input_distributions as dists
from kbx_env.spec.catalog import load_task, task_ids
from kbx_env.spec.task import Case, T

SEEDS = list(range(input_windows.MAX_DRAWS))


@pytest.fixture(autouse=True)
def _tuners_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run", "_bench"):
        monkeypatch.setattr(Autotuner, name, getattr(Autotuner, name))


class _Task:
    """As much of a task as a ring asks for."""

    def __init__(self, written: tuple[str, ...] = (), **takes: T) -> None:
        import inspect

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.takes, self._written = takes, written
        self.signature = inspect.Signature([inspect.Parameter(n, kind) for n in takes])

    def written(self, args: object) -> tuple[str, ...]:
        return self._written


TASK = _Task(
    ("w",), x=T("n m", draw=dists.Normal()), i=T("n", "i64", draw=dists.Ints(0, "n")), a=T("b k k", draw=dists.SPD()),
    o=T("b m k", draw=dists.Spectrum(3.0, 1.0)), t=T("k k", draw=dists.Triangular()), p=T("n", "i32", draw=dists.Distinct()),
    w=T("n", draw=dists.Constant(1.0)), c=T("n", draw=dists.Constant(2.0)), h=T("n", "bf16", draw=dists.Uniform()),
)  # fmt: skip
CASE = Case({"n": 24, "m": 5, "b": 3, "k": 4}, layouts={"x": "transposed"})


def _ring() -> input_windows.InputWindows:
    return input_windows.InputWindows.draw(TASK, CASE, SEEDS)  # type: ignore[arg-type]


def test_values_stay_of_their_law() -> None:
    ring, rng = _ring(), random.Random(1)
    assert set(ring.rules) == {"x", "i", "a", "o", "t", "p", "w", "h"}, "what never changes needs no ring"
    for _ in range(40):
        args = ring.args(ring.pick(rng))
        assert sorted(args["p"].tolist()) == list(range(24))
        assert torch.equal(args["a"], args["a"].mT) and bool((torch.linalg.eigvalsh(args["a"].double()) > 0.2).all())
        assert torch.allclose(torch.linalg.svdvals(args["o"].double())[:, 0], torch.tensor(3.0).double(), atol=1e-5)
        assert torch.equal(args["t"], args["t"].triu()) and bool((args["w"] == 1).all())
        assert args["x"].stride() == ring.draws[0]["x"].stride()


def test_no_two_calls_see_the_same() -> None:
    ring, rng = _ring(), random.Random(2)
    for name, least in (("x", 60), ("a", 15), ("o", 25), ("h", 30), ("t", 6), ("p", 6)):
        seen = {str(ring.args(ring.pick(rng))[name].tolist()) for _ in range(120)}
        assert len(seen) >= least, name


def test_a_sum_over_everything_changes_too() -> None:
    """A rotation alone would leave it as it is: a remembered sum would be right."""
    ring, rng = _ring(), random.Random(3)
    assert len({float(ring.args(ring.pick(rng))["x"].double().sum()) for _ in range(50)}) > 30


def test_the_device_makes_what_the_grader_expects() -> None:
    ring, rng, device = _ring(), random.Random(4), FakeDevice()
    watch = Stopwatch("cpu", device, guards=True)
    mine = [{k: v.clone() if k != "x" else v.mT.clone().mT for k, v in d.items()} for d in ring.draws]
    watch.prepare(lambda slot: None, mine, slots=3, turning=ring.turning)
    for k in range(30):
        turn = ring.pick(rng)
        watch.load(k % 3, turn)
        device.sync()
        for name, value in ring.args(turn).items():
            assert torch.equal(watch._slots[k % 3][name], value), name


@pytest.mark.parametrize("name", task_ids())
def test_every_timed_input_has_a_track(name: str) -> None:
    """Small stand-ins would be other cases; the laws and layouts of the timed ones are what counts."""
    task = load_task(name)
    for case in task.timed:
        for tensor, size in compulsory_work.numels(task, case).items():
            law = case.draws.get(tensor) or task.takes[tensor].draw or case.draw
            whole = (dists.Distinct, dists.Places, dists.Shuffled)
            known = (*input_windows._ELEMENTWISE, *input_windows._ALIKE, *input_windows.inputs.MATRICES, *whole)
            assert not size or isinstance(law, known), f"{tensor}: {law}"


def test_pending_conjugations_are_carried_out() -> None:
    device = FakeDevice()
    watch = Stopwatch("cpu", device, guards=True)
    x = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    watch.prepare(lambda slot: slot["x"].conj().clone().conj(), [{"x": x}], slots=2, turning={"x": [0, 0]})
    right, kept = x.conj().resolve_conj(), x.conj()
    watch._keep_result(0, kept)
    (reply,), _, data = IpcSender(device, None).claims([(watch.result(0), True)], "cpu", False)
    got = torch.frombuffer(bytearray(data[reply["outputs"][0]["blob"]]), dtype=torch.complex64)
    assert torch.equal(got, right)


def test_windows_are_picked_without_the_values_too() -> None:
    task = load_task("math/add")
    ring = input_windows.InputWindows.draw(task, task.cases[0], SEEDS)
    bare = ring.without_values()
    assert not bare.draws
    assert bare.pick(random.Random(1)) == ring.pick(random.Random(1))


@pytest.mark.parametrize(
    "name, slow",
    [
        ("linearalgebra/solve", True), ("normalization/symmetric_matrix_vector_norm", False), ("linearalgebra/cholesky", False),
        ("activation/relu", False),
    ],
)  # fmt: skip
def test_matrices_that_are_factorised_are_slow_to_draw(name: str, slow: bool) -> None:
    """Two symmetric matrices of 1 GiB waited for the GPU in the host's memory: copying them took three seconds, drawing them takes
    milliseconds."""
    task = load_task(name)
    assert [input_windows.slow_to_draw(task, case) for case in timed(task, "published")] == [slow] * len(timed(task, "published"))
