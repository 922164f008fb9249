"""Held-out timed sizes: every task has valid ones of about the same work, and the option reaches what is timed."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kbx_env.errors import DeclarationError, UnknownName
from kbx_env.executor import Request
from kbx_env.grading import compulsory_work, inputs, reference, sizes
from kbx_env.grading.grader import Grader
from kbx_env.grading.timing import task_timing
from kbx_env.options import SIZES
from kbx_env.protocol.wire import DTYPES, assembled
from kbx_env.spec.catalog import expert_source, load_task, task_ids
from kbx_env.spec.task import Case, DeviceArg, Places, Task, shape_of

DECLARED = {
    "fusion/fused_fractional_max_pool2d_with_relu", "fusion/fused_index_select_eq",
    "fusion/fused_repeat_interleave_log_softmax", "index/scatter", "math/fftn",
}  # fmt: skip
"""Their sizes depend on each other in ways of their own; those of a Fourier transform should have small factors."""


def results(task: Task, case: Case) -> tuple[torch.Tensor, ...]:
    """What the reference returns for tensors without memory."""
    args: dict[str, Any] = {k: v for k, v in case.args.items() if k != "out"}
    with FakeTensorMode(shape_env=ShapeEnv()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, t in task.takes.items():
            if name not in case.args and (not t.optional or name in case.given):
                args[name] = torch.empty(shape_of(t, case.axes), dtype=DTYPES[case.dtypes.get(name, t.dtype)])
        args = {k: torch.device("cpu") if isinstance(v, DeviceArg) else v for k, v in args.items()}
        made = task.reference(**assembled(args))
    return made if isinstance(made, tuple) else tuple(made) if isinstance(made, list) else (made,)


def moved(task: Task, case: Case, made: tuple[torch.Tensor, ...]) -> float:
    """Bytes of inputs and results; those of a result whose length only its values tell are left out."""
    if task.cost.bytes is not None:
        return sizes.work(task, case)[0]
    told = [o for o in made if all(isinstance(n, int) for n in o.shape)]
    return compulsory_work.input_bytes(task, case) + sum(math.prod(o.shape) * o.element_size() for o in told)


def said(case: Case) -> tuple[Any, ...]:
    return dict(case.axes), {k: str(v) for k, v in case.args.items()}


@pytest.mark.parametrize("name", task_ids())
def test_every_task_has_valid_held_out_sizes_of_about_the_same_work(name: str) -> None:
    task = load_task(name)
    found = sizes.held_out(task)
    assert len(found) == len(task.timed) and bool(task.held_timed) == (name in DECLARED)
    for published, case in zip(task.timed, found, strict=True):
        assert said(case) not in [said(c) for c in task.timed], f"{case.label()} is published"
        assert (case.dtypes, case.layouts, case.given, case.out) == (
            published.dtypes, published.layouts, published.given, published.out)  # fmt: skip
        assert sizes.similar(task, published, case), case.label()
        theirs, ours = results(task, published), results(task, case)
        assert [(o.dtype, o.dim()) for o in ours] == [(o.dtype, o.dim()) for o in theirs]
        assert all(n > 0 for o in ours for n in o.shape if isinstance(n, int))
        share = moved(task, case, ours) / moved(task, published, theirs)
        assert sizes.LEAST <= share <= sizes.MOST, (case.label(), share)
        assert compulsory_work.flops(task, case) >= 0 and compulsory_work.names(task, case)
    assert compulsory_work.fitting(task, 80 * 10**9, found) == found, "they fit wherever the published ones do"


def shrunk(task: Task, case: Case, most: int = 48) -> Case:
    """The case on a scale that any machine holds; its axes are as long beside one another as they were."""
    found = sizes._sizes(task, case)
    longest = max(found)
    return sizes.resized(task, case, {n: max(8, n * most // longest // 8 * 8) for n in found if n > 8 and longest > most})


@pytest.mark.parametrize("name", [t for t in task_ids() if t not in DECLARED])
def test_drawn_small_they_are_calls_with_finite_results(name: str) -> None:
    """Indices stay inside, matrices square, groups whole: what tensors without memory do not tell."""
    task = load_task(name)
    for case in map(lambda c: shrunk(task, c), sizes.held_out(task)):
        drawn = inputs.draw(task, case, 7)
        expected = reference.expect(task, case, drawn, exact=False)
        values = [v for v in (*expected.native, *expected.native_written.values()) if v.numel()]
        assert values and not any(v.isnan().all() for v in values), case.label()


def test_declared_ones_keep_what_their_axes_owe_each_other() -> None:
    task = load_task("index/scatter")
    for case in task.held_timed:
        law = case.draws["index"]
        dim = case.args["dim"]
        assert isinstance(law, Places) and (law.size, law.dim) == (case.axes["*x"][dim], dim)
        assert case.axes["*i"][dim] <= law.size
    last = load_task("fusion/fused_repeat_interleave_log_softmax").held_timed[-1]
    assert inputs.draw(load_task("fusion/fused_repeat_interleave_log_softmax"), replace(last, axes={"*": (6000, 1), "R": 6000}), 1)[
        "repeats"].sum() == last.args["output_size"]  # fmt: skip
    for case in load_task("fusion/fused_index_select_eq").held_timed:
        rows, columns = case.axes["*"]
        assert case.axes["V"] == rows >= case.axes["K"] and case.axes["chosen"] == case.axes["K"] * columns
    for case in load_task("fusion/fused_fractional_max_pool2d_with_relu").held_timed:
        assert (case.axes["H"] - 2) / (case.args["output_size"] - 1) == 2.5


def test_no_power_of_two_divides_half_of_them() -> None:
    """Of half of the tasks a block of 1024 leaves a rest on the longest axis; all keep away from powers of two."""
    ragged = 0
    for name in task_ids():
        task = load_task(name)
        pairs = [(max(sizes._sizes(task, a)), max(sizes._sizes(task, b)))
                 for a, b in zip(task.timed, sizes.held_out(task), strict=True)]  # fmt: skip
        assert all(b & (b - 1) for a, b in pairs if a != b), name
        ragged += any(b % 1024 for a, b in pairs if a >= sizes.ROUND and a != b)
    assert 70 <= ragged <= 130


def test_the_rule_ties_equal_sizes_and_refuses_to_guess() -> None:
    task = load_task("fusion/fused_bmm_rmsnorm_gelu_dropout")
    case = sizes.resized(task, task.timed[0], {256: 192})
    assert set(case.axes.values()) == {32, 192} and case.args["normalized_shape"] == 192
    pool = load_task("pooling/adaptive_avg_pool2d")
    assert sizes.resized(pool, pool.timed[0], {1024: 768}).args["output_size"] == (384, 384)
    for name in DECLARED - {"math/fftn"}:
        bare = replace(load_task(name), held_timed=())
        with pytest.raises(DeclarationError, match=r"cannot resize .*; declare held_timed="):
            sizes.held_out(bare)
    with pytest.raises(DeclarationError, match="2 held-out timed cases; 3, as many as published"):
        sizes.held_out(replace(task, held_timed=task.timed[:2]))
    short = replace(task, timed=(Case({"B": 2, "N": 2, "M": 2, "P": 2}, {"normalized_shape": 2}),))
    with pytest.raises(DeclarationError, match="no axis can be resized"):
        sizes.held_out(short)


def test_published_sizes_are_the_default_and_leave_keys_as_they_were() -> None:
    task = load_task("math/cos")
    assert sizes.timed(task) == task.timed != sizes.timed(task, "held-out") == sizes.held_out(task)
    assert sizes.held_out(task) is sizes.held_out(task)
    old, new, held = (Request("math/cos", b"x", {"seed": None} | more, {"fingerprint": "f"}) for more in (
        {}, {"sizes": "published"}, {"sizes": "held-out"}))  # fmt: skip
    assert (old.key, old.content, old.record) == (new.key, new.content, new.record)
    assert held.key != old.key and held.content != old.content and held.record["sizes"] == "held-out"


def test_the_clock_times_the_sizes_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    task, seen = load_task("math/cos"), []

    class Seen(Exception):
        pass

    def fitting(task: Task, memory: int, cases: Any) -> Any:
        seen.append(cases)
        raise Seen

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: type("P", (), {"total_memory": 1}))
    monkeypatch.setattr(compulsory_work, "fitting", fitting)
    for asked in ((), ("held-out",)):
        with pytest.raises(Seen):
            task_timing.time_task(task, None, *asked)  # type: ignore[arg-type]
    assert seen == [task.timed, sizes.held_out(task)]


def test_estimates_are_of_the_sizes_asked_for_and_the_outcome_says_which(grader: Grader) -> None:
    task, source = load_task("math/abs"), expert_source("math/abs") or ""
    made = {s: grader.grade(task.id, source, backend="cpu", targets=(), estimate="h200", sizes=s) for s in SIZES}
    with pytest.raises(UnknownName, match="unknown sizes 'all'; accepted: held-out, published"):
        grader.grade(task.id, source, backend="cpu", sizes="all")
    for asked, outcome in made.items():
        assert outcome.correct and outcome.manifest["sizes"] == asked, outcome.message
        assert [c.case for c in outcome.estimate.cases] == [c.label() for c in sizes.timed(task, asked)]
    low, high = (made[s].estimate.estimated_us for s in ("held-out", "published"))
    assert 0.5 * high < low < high
