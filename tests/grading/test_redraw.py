"""The second values of a repeated call: mostly the old ones, always a draw of the same distribution."""

from __future__ import annotations

import pytest
import torch

from kbx_env.grading import inputs
from kbx_env.grading.context import REPEATED_SHARE, SAMPLED_ELEMENTS, GradingContext
from kbx_env.grading.record import OutcomeBuilder
from kbx_env.options import GradeOptions
from kbx_env.spec.catalog import load_task


def test_few_of_many_elements_change() -> None:
    task = load_task("activation/sigmoid")
    index, case = next((i, c) for i, c in enumerate(task.cases) if c.axes["*"] == (129, 257) and not c.layouts)
    args = inputs.draw(task, case, 11 + index)
    counts = set()
    for seed in range(40):
        again = inputs.redraw(task, case, args, 1000 + seed)
        changed = int((again["input"] != args["input"]).sum())
        assert 1 <= changed <= args["input"].numel() // 32 + 1
        counts.add(changed.bit_length())
    assert len(counts) >= 5, "of every order of magnitude"


def test_layouts_dtypes_and_other_arguments_stay() -> None:
    for name in ("index/scatter", "matrixmultiply/tril_mm_and_scale", "linearalgebra/det", "quantization/bmm_w8a8"):
        task = load_task(name)
        for k, case in enumerate(task.cases):
            args = inputs.draw(task, case, k)
            again = inputs.redraw(task, case, args, 1000 + k)
            assert again.keys() == args.keys()
            for key, old in args.items():
                new = again[key]
                if isinstance(old, torch.Tensor):
                    assert (new.shape, new.dtype, new.stride()) == (old.shape, old.dtype, old.stride())
                    assert not old.numel() or new.data_ptr() != old.data_ptr()
                else:
                    assert new == old


def test_an_expanded_tensor_stays_expanded() -> None:
    task = load_task("math/ifftshift")
    case = next(c for c in task.cases if "steps 1 0 1" in c.layouts.get("input", ""))
    old = inputs.draw(task, case, 3)["input"]
    for few in (0, 1):
        new = [inputs.redraw(task, case, {"input": old, "dim": 0}, seed, few)["input"] for seed in range(100, 120)]
        assert all(t.stride() == old.stride() and t.stride(1) == 0 for t in new)
        changed = [int((t[:, 0] != old[:, 0]).sum()) for t in new]
        assert set(changed) == {1}, "of 27 numbers in memory"


def test_structured_tensors_are_drawn_anew_as_a_whole() -> None:
    task = load_task("linearalgebra/cholesky")
    for k, case in enumerate(task.cases):
        args = inputs.draw(task, case, k)
        again = inputs.redraw(task, case, args, 99 + k)
        for key, old in args.items():
            if isinstance(old, torch.Tensor) and old.dim() > 1 and old.shape[-1] == old.shape[-2] and old.numel() > 1:
                assert torch.allclose(again[key], again[key].mH)


def test_a_single_element_of_one_tensor_changes() -> None:
    """Samples of the values hardly meet it."""
    task = load_task("matrixmultiply/tril_mm_and_scale")
    case = task.cases[2]
    args = inputs.draw(task, case, 3)
    places = set()
    for seed in range(30):
        again = inputs.redraw(task, case, args, 1000 + seed, few=1)
        changed = {n: (again[n] != args[n]).nonzero().tolist() for n in ("A", "B")}
        assert len(changed["A"]) + len(changed["B"]) == 1
        places.add(str(changed))
    assert len(places) >= 25


@pytest.mark.parametrize("name", ["math/reciprocal", "activation/relu", "optimizer/Lion", "linearalgebra/det"])
def test_one_of_the_cases_that_are_called_again_is_large_if_it_can_be(name: str) -> None:
    """A memo that compares eight samples of the values was paid where all of these cases were small."""
    task = load_task(name)
    for secret in range(40):
        builder = OutcomeBuilder(task, "cpu", "contract", "", {})
        context = GradingContext(task, b"", GradeOptions(backend="cpu"), b"%d" % secret, None, (), builder)  # type: ignore[arg-type]
        context.select_cases()
        sizes = [c.elements() for c in context.cases]
        left = REPEATED_SHARE * sum(sizes)
        fitting = [n for n, telling in zip(sizes, context.telling, strict=True) if telling and n <= left]
        assert context.repeated and max(sizes[i] for i in context.repeated) >= min(SAMPLED_ELEMENTS, max(fitting))
