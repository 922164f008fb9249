"""Each published contract against its own reference: examples, parameters, shapes, layouts, timed sizes."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import pytest
import torch
from kbx_env.eval.task_checks import call, examples

from kbx_env.grading import inputs, reference
from kbx_env.protocol.wire import DTYPES, assembled
from kbx_env.spec.catalog import load_task, task_ids
from kbx_env.spec.criteria import Sample
from kbx_env.spec.task import Case, DtypeArg, Task

NEVER = {
    "layout": "torch.strided is the only layout there is",
    "pin_memory": "a GPU tensor has no page-locked memory",
    "device": "a submission is graded on one device",
    "sparse_grad": "concerns gradients, which nobody asks for",
    "scale_grad_by_freq": "concerns gradients, which nobody asks for",
    "sparse": "concerns gradients, which nobody asks for",
}
"""Parameters of the published signatures that change nothing in a result."""
GIB = 1 << 30


@pytest.mark.parametrize("name", task_ids())
def test_the_examples_of_the_contract_are_true(name: str) -> None:
    task = load_task(name)
    found = examples(task.spec)
    assert found or isinstance(task.truth, Sample), f"{name}: the contract shows no 'Example: {task.entry}(...) = ...'"
    for text in found:
        got, shown = call(task, text)
        want = eval(shown, {"__builtins__": {}, "inf": math.inf, "nan": math.nan})
        got, want = (got, want) if isinstance(got, tuple | list) else ((got,), (want,))
        assert len(got) == len(want), text
        for g, w in zip(got, want, strict=True):
            expected = torch.tensor(w)
            assert g.shape == expected.shape, (text, g)
            kind = torch.complex128 if g.is_complex() or expected.is_complex() else torch.float64
            torch.testing.assert_close(g.to(kind), expected.to(kind), rtol=1e-3, atol=1e-5, equal_nan=True, msg=text)


def _value(value: Any) -> Any:
    return value.name if isinstance(value, DtypeArg) else value


@pytest.mark.parametrize("name", task_ids())
def test_every_parameter_is_described_and_used_away_from_its_default(name: str) -> None:
    task = load_task(name)
    for param, p in task.signature.parameters.items():
        assert re.search(rf"\b{re.escape(param)}\b", task.spec), f"{name}: the contract does not mention {param}"
        if param in NEVER:
            continue
        if param == "out":
            assert any(c.out for c in task.cases), f"{name}: no case passes out="
        elif param in task.takes:
            if task.takes[param].optional:
                assert any(param in c.given for c in task.cases), f"{name}: no case passes {param}"
                assert any(param not in c.given for c in task.cases), f"{name}: no case leaves {param} out"
        elif p.default is not inspect.Parameter.empty:
            used = [_value(c.args[param]) for c in task.cases if param in c.args]
            assert any(v != p.default or type(v) is not type(p.default) for v in used), (
                f"{name}: no case passes {param} away from its default {p.default!r}"
            )


@pytest.mark.parametrize("name", task_ids())
def test_cases_are_odd_strided_and_timed(name: str) -> None:
    task = load_task(name)
    if task.takes:
        assert any(c.layouts for c in task.cases), f"{name}: every input is contiguous"
    assert len(task.timed) >= 3, f"{name}: {len(task.timed)} timed sizes; at least 3"
    for case in task.timed:
        assert footprint(task, case) <= 16 * GIB, f"{name}: {case.label()} needs more than 16 GiB"


def footprint(task: Task, case: Case) -> int:
    """Bytes of the tensors of one call and of its results, from a run on tensors without memory."""
    from kbx_env.spec.task import shape_of

    total = 0
    for tensor, t in task.takes.items():
        if tensor not in case.args and (not t.optional or tensor in case.given):
            size = DTYPES[case.dtypes.get(tensor, t.dtype)].itemsize
            total += math.prod(shape_of(t, case.axes)) * size
    return 2 * total


@pytest.mark.parametrize("name", task_ids())
def test_the_reference_leaves_alone_what_the_contract_does_not_say(name: str) -> None:
    task = load_task(name)
    if isinstance(task.truth, Sample):
        return
    for index, case in enumerate(task.cases[:4]):
        args = inputs.draw(task, case, index)
        mine = reference.resolve(args, "cpu")
        with reference.exact_matmul():
            task.reference(**assembled(mine))
        for tensor, value in args.items():
            if isinstance(value, torch.Tensor) and tensor not in task.written(case.args):
                torch.testing.assert_close(mine[tensor], value, rtol=0, atol=0, equal_nan=True, msg=tensor)


@pytest.mark.parametrize("name", [t for t in task_ids() if load_task(t).writes])
def test_what_is_written_in_place_is_said_and_done(name: str) -> None:
    task = load_task(name)
    assert re.search(r"in place|written|filled|receives|becomes", " ".join(task.spec.split())), name
    changed = set()
    for index, case in enumerate(task.cases):
        args = inputs.draw(task, case, index)
        expected = reference.expect(task, case, args, keep=True, exact=False)
        for tensor, after in expected.native_written.items():
            if not torch.equal(after, args[tensor]):
                changed.add(tensor)
    assert changed == set(task.writes), f"{name}: no case changes {set(task.writes) - changed}"
    if "always" not in task.writes.values():
        assert any(not task.written(c.args) for c in task.cases), f"{name}: every case writes in place"


@pytest.mark.parametrize("name", ["reduce/min_gelu", "fusion/fused_gelu_min"])
@pytest.mark.parametrize("number", [-1.58, -2.05, -3.63])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_of_equal_elements_wins_wherever_it_lies(name: str, number: float, dtype: torch.dtype) -> None:
    """Torch's GELU in fp64 rounds these numbers differently at the end of a vector than before it."""
    equal = torch.full((37, 5), number, dtype=torch.float32).to(dtype)
    for approximate in ("none", "tanh"):
        for x, dim in ((equal, 0), (equal.t(), 1), (equal.flatten(), 0)):
            assert not load_task(name).reference(x, dim=dim, approximate=approximate)[1].any()
