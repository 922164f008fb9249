"""Every floor is a lower bound: held against what results depend on. Our own kernels: ``tests/integration/test_experts.py``."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kbx_env.errors import DeclarationError
from kbx_env.grading import compulsory_work, inputs, reference
from kbx_env.grading.reference import Expected
from kbx_env.grading.timing import input_windows
from kbx_env.grading.work_counts import MARGIN, Sizes, Values, changes, landing, pooled, touched
from kbx_env.spec.catalog import load_task, task_ids
from kbx_env.spec.task import CATEGORIES, Case, Choice, Cost, Ints, Shuffled, T, Task
from kbx_env.spec.task import task as declare

SMALL = 4 << 20
"""Bytes of the inputs of a timed case that is small enough to be probed."""
PROBED, FULL = 8, 2
"""Elements of every tensor that are changed, one after the other, where the task declares what is read of it, and where all is; all
of a tensor that has no more than ``ALL``."""
ALL = 12
SIGMAS = 5.0
"""Standard deviations by which a share of so few elements may miss the true one. Seeds are fixed: what passes, passes always."""
FEW = 16
"""Of a law with so few integers all are tried: equality is seldom met by chance."""


def _same(one: Expected, other: Expected) -> bool:
    pairs = zip(
        (*one.native, *one.native_written.values()), (*other.native, *other.native_written.values()), strict=True
    )
    return all(a.shape == b.shape and (torch.equal(a, b) or not changes(a, b)) for a, b in pairs)


def _result(task: Task, case: Case, args: dict[str, Any]) -> Expected:
    # The same random numbers in every run, and no element dropped that need not be: a kernel draws before it reads.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return reference.expect(task, case, args, exact=False, keep=True)


def _changed(
    task: Task, case: Case, args: dict[str, Any], name: str, at: int, rng: random.Random
) -> Iterator[torch.Tensor]:  # fmt: skip
    """The tensor with other values in one place of its memory."""
    law = case.draws.get(name) or task.takes[name].draw or case.draw
    value = args[name]
    old = input_windows.flat(value)[at]
    integer = not (value.dtype.is_floating_point or value.dtype.is_complex or value.dtype is torch.bool)
    tried: list[Any] = [not bool(old)] if value.dtype is torch.bool else []
    if isinstance(law, Ints):
        high = inputs._bound(law.high, case)
        tried += range(law.low, high) if high - law.low <= FEW else [rng.randrange(law.low, high) for _ in range(3)]
        # An index that is ignored is one more valid value.
        tried += [int(case.args.get("ignore_index", -100))] if name.startswith("target") else []
    if integer:
        most = torch.iinfo(value.dtype)
        tried += [int(old) + 1, int(old) - 1, int(old) + 100, int(old) - 100, 0, -int(old), most.min, most.max]
    elif value.dtype is not torch.bool:
        tried += [1e4, -1e4, -old.item(), 0.37, old.item() + 1, 0.0, math.inf, math.nan]
    # Whoever compares wants to be met exactly.
    tried += law.values if isinstance(law, Choice) else []
    tried += [v for v in args.values() if isinstance(v, int | float) and not isinstance(v, bool)]
    for other in args.values():
        if (
            isinstance(other, torch.Tensor)
            and other.dtype == value.dtype
            and other.numel() <= FEW
            and not other.is_complex()
        ):
            tried += other.reshape(-1).tolist()
    if integer:
        tried = [int(v) for v in tried if math.isfinite(v) and most.min <= v <= most.max]
    for new in tried:
        flat = input_windows.flat(value).clone()
        flat[at] = new
        yield flat.as_strided(value.shape, value.stride())
    if isinstance(law, Shuffled):
        for other in range(value.numel()):  # no value by itself may change: the sum is published
            flat = input_windows.flat(value).clone()
            flat[at], flat[other] = flat[other].clone(), flat[at].clone()
            yield flat.as_strided(value.shape, value.stride())


def _depends(
    task: Task, case: Case, args: dict[str, Any], name: str, at: int, rng: random.Random, base: Expected
) -> bool:
    """Whether a result depends on the element of a tensor in one place of its memory."""
    for new in _changed(task, case, args, name, at, rng):
        try:
            if not _same(base, _result(task, case, args | {name: new})):
                return True
        except (RuntimeError, IndexError, ValueError):
            continue  # torch refuses: no valid input
    return False


def _needed(task: Task, case: Case, args: dict[str, Any], base: Expected, rng: random.Random) -> tuple[float, float]:
    """Bytes that a call must move as the probe sees it: (estimate, variance of the estimate).

    Elements count, not sectors: a floor in elements must not be above that.
    """
    outputs = [o for o, a in zip(base.native, base.aliases, strict=True) if a not in base.native_written]
    written = sum(o.numel() * o.element_size() for o in outputs)
    written += sum(changes(args[n], v) * v.element_size() for n, v in base.native_written.items())
    total, variance = float(written), 0.0
    for name, value in args.items():
        if not isinstance(value, torch.Tensor) or not value.numel():
            continue
        places = torch.arange(len(input_windows.flat(value))).as_strided(value.shape, value.stride()).reshape(-1).tolist()
        told = name in (task.cost.reads or ()) or task.cost.bytes is not None
        picked = places if len(places) <= ALL else rng.sample(places, PROBED if told else FULL)
        hits = sum(_depends(task, case, args, name, at, rng, base) for at in picked)
        size = value.numel() * value.element_size()
        total += size * hits / len(picked)
        if hits < len(picked) < len(places):
            share = (hits + 1) / (len(picked) + 2)
            variance += size**2 * share * (1 - share) / len(picked)
    return total, variance


def _held(task: Task, seed: int = 5) -> Iterator[tuple[str, int, float, float]]:
    """Every small case and the smallest timed one: label, floor, bytes needed, variance."""
    rng = random.Random(task.id)
    small = [c for c in task.timed if compulsory_work.input_bytes(task, c) < SMALL][:1]
    for case in (*task.cases, *small):
        args = inputs.draw(task, case, seed)
        base = _result(task, case, args)
        least = compulsory_work.ideal_bytes(task, case, args, base, single_call=True)
        assert compulsory_work.ideal_bytes(task, case, args, base) <= least, "every call's bound is no higher than this call's"
        if least:
            yield case.label(), least, *_needed(task, case, args, base, rng)


def _too_high(task: Task) -> list[str]:
    """The cases whose floor is above what the probe says is needed, and the task where the sum of its cases is."""
    rows = list(_held(task))
    found = [r[0] for r in rows if r[1] > r[2] + SIGMAS * math.sqrt(r[3]) + 1]
    floors, needed, variance = (sum(r[i] for r in rows) for i in (1, 2, 3))
    if floors > needed + SIGMAS * math.sqrt(variance) + 1:
        found.append(f"all cases: {floors} > {needed}")
    return found


@pytest.mark.parametrize("category", CATEGORIES)
def test_no_floor_is_above_what_results_depend_on(category: str) -> None:
    names = [t for t in task_ids() if t.startswith(category + "/")]
    assert {n: found for n in names if (found := _too_high(load_task(n)))} == {}


@pytest.mark.parametrize(
    "name",
    [
        "index/index_select", "index/masked_select", "index/expand_where", "index/index_fill_",
        "fusion/fused_masked_select_add_gelu", "fusion/fused_index_select_eq", "linearalgebra/cholesky_solve",
        "spatialops/grid_sample", "loss/nll_loss",
    ],
)  # fmt: skip
def test_the_probe_finds_a_floor_that_reads_everything(name: str) -> None:
    whole = {t: f"numel({t})" for t in load_task(name).takes}
    assert _too_high(replace(load_task(name), cost=Cost(reads=whole)))


@pytest.mark.parametrize("name", task_ids())
def test_operations_that_are_needed_are_no_more_than_the_plain_algorithms(name: str) -> None:
    task = load_task(name)
    for case in task.timed:
        assert 0 <= compulsory_work.flops(task, case) <= compulsory_work.operations(task, case)
        declared = compulsory_work.declared_bytes(task, case)
        assert (declared is None) == (task.cost.bytes is None) and (declared is None or declared > 0)


def test_half_of_causal_attention_is_not_computed() -> None:
    task = load_task("fusion/attention")
    causal, whole = task.timed[:2]
    n = causal.axes["S"]
    assert compulsory_work.flops(task, causal) == compulsory_work.operations(task, causal) * (n + 1) // (2 * n)
    assert compulsory_work.flops(task, whole) == compulsory_work.operations(task, whole)


# --- the functions of expressions ---------------------------------------------------------------------


def _values(name: str, case: Case, single_call: bool = True, **args: Any) -> Values:
    task = load_task(name)
    return Values(task, case, args, reference.expect(task, case, args, exact=False), single_call)


def _asked(counts: Values | Sizes, expression: str, **names: float) -> float:
    return compulsory_work.evaluate(expression, names, {}, counts)


def test_counts_of_a_selection() -> None:
    x, mask = torch.arange(12.0).reshape(3, 4), torch.tensor([[True], [False], [True]])
    counts = _values("index/masked_select", Case({"*": (3, 4), "*m": (3, 1)}), input=x, mask=mask)
    assert _asked(counts, "numel(input) + 100 * numel(mask)") == 312
    assert _asked(counts, "bytes(input) + 100 * bytes(mask) + itemsize(input) * 1000") == 4348
    assert _asked(counts, "nonzero(mask)") == 2 and _asked(counts, "nonzero(input)") == 11
    assert _asked(counts, "under(input, mask)") == 8 and _asked(counts, "outside(input, mask)") == 4
    assert _asked(counts, "under(mask, input)") == 3 and _asked(counts, "outside(mask, input)") == 1
    assert _asked(counts, "numel(result)") == 8 == _asked(counts, "size(result, 0)")
    assert _asked(counts, "above(input, 8) + 10 * differing(input, 3)") == 3 + 110
    counts.args["input"][0, 0] = math.nan
    assert _asked(counts, "numbers(input)") == 11


def test_counts_of_indices() -> None:
    case = Case({"*a": (2,), "N": 5, "*b": (), "K": 4}, {"dim": 1})
    args = {"input": torch.randn(2, 5), "dim": 1, "index": torch.tensor([3, 3, 0, 1])}
    counts = _values("index/index_select", case, **args)
    assert _asked(counts, "distinct(index) * a", a=2) == 6 and _asked(counts, "distinct(index, 3)") == 2
    assert _asked(counts, "first(dim) + given(dim) + given(index)") == 3
    fill = {"x": torch.tensor([1.0, 7.0, math.nan, 7.0]), "dim": 0, "index": torch.tensor([0, 1, 1]), "value": 7}
    counts = _values("index/index_fill_", Case({"*a": (), "N": 4, "*b": (), "K": 3}, {"dim": 0, "value": 7}), **fill)
    assert _asked(counts, "changed(x)") == 1, "7 stays 7, and NaN that is left alone stays what it is"
    gather = {"input": torch.randn(3, 2), "dim": 0, "index": torch.tensor([[0, 1], [0, 2], [2, 2]]), "value": 0.0,
              "mask": torch.tensor([[False, True], [False, False], [True, False]])}  # fmt: skip
    case = Case({"*": (3, 2), "*i": (3, 2), "*m": (3, 2)}, {"dim": 0, "value": 0.0})
    counts = _values("fusion/fused_gather_masked_fill", case, **gather)
    assert _asked(counts, "picked(input, dim, index, mask)") == 2, "(0, 0) twice and (2, 1) twice"


def test_counts_by_gradient_and_by_windows() -> None:
    args = {"input": torch.randn(1, 1, 4, 4), "scale_factor": 0.5}
    counts = _values("spatialops/interpolate", Case({"N": 1, "C": 1, "H": 4, "W": 4}, {"scale_factor": 0.5}), **args)
    assert _asked(counts, "used(input)") == 4, "every second pixel of every second row"
    assert _asked(counts, "overlap(input, result)") == 4
    assert touched(10, 3, 5) == 6 and touched(10, 3, 5, 1) == 5 and touched(5, 3, 1, 0, 2) == 3
    assert touched(5, 2, 2) == 4 and touched(5, 2, 2, 0, 1, 1) == 5, "the last window reaches beyond"
    assert touched(2, 3, 1) == 0
    assert landing(5, 3, 2, 0, 1, 11) == 5, "no result is cut off"
    assert landing(7, 2, 1, 3, 1, 2) == 3, "positions 2 to 4 reach 3 and 4, all that is left"
    assert landing(4, 2, 1, 2, 3, 1) == 1, "position 2; a dilated tap reaches 2 from no other"
    assert pooled(16, 3, 1, 1, 1, 2, 2, 0, 1, 0) == 16 and pooled(16, 3, 1, 0, 1, 1, 4, 0, 1, 0) == 12


@pytest.mark.filterwarnings("error")
def test_counts_say_nothing_that_torch_warns_of() -> None:
    """Each process that graded this task once printed a warning about its reference."""
    task = load_task("spatialops/grid_sample_with_affine")
    case = next(c for c in task.cases if c.args.get("align_corners") and 1 in tuple(c.args["size"])[2:])
    args = inputs.draw(task, case, 1)
    expected = reference.expect(task, case, args, "cpu", exact=False)
    assert compulsory_work.ideal_bytes(task, case, args, expected, single_call=True) > 0


def test_pairs_and_arguments_left_out() -> None:
    task = load_task("fusion/fused_relu_max_pool2d_conv2d")
    counts = Sizes(task, Case({}, {"conv_stride": (2, 3), "pool_kernel_size": 4}))
    assert _asked(counts, "first(conv_stride) + 10 * second(conv_stride) + 100 * first(conv_padding)") == 32
    assert _asked(counts, "second(pool_stride, pool_kernel_size)") == 4 and _asked(counts, "given(pool_stride)") == 0
    with pytest.raises(DeclarationError, match="pool_stride"):
        _asked(counts, "first(pool_stride)")


def test_a_bound_for_every_call_is_lower_where_chance_decides() -> None:
    x, mask = torch.randn(10_000), torch.rand(10_000, generator=torch.Generator().manual_seed(1)) < 0.5
    case = Case({"*": (10_000,), "*m": (10_000,)})
    one, every = (_values("index/masked_select", case, single, input=x, mask=mask) for single in (True, False))
    count = int(mask.sum())
    assert _asked(one, "nonzero(mask)") == count and _asked(every, "nonzero(mask)") == count - MARGIN * 100
    assert _asked(every, "under(input, mask)") == count - MARGIN * 100
    sure = _values("index/masked_select", case, False, input=x, mask=torch.ones_like(mask))
    assert _asked(sure, "under(input, mask)") == 10_000, "where all count, chance has no part"


@pytest.mark.parametrize(
    "name",
    [
        "index/index_select", "index/masked_select", "index/expand_where", "index/index_fill_", "loss/nll_loss",
        "fusion/fused_masked_select_add_gelu", "fusion/fused_gather_masked_fill",
    ],
)  # fmt: skip
def test_one_calls_bound_for_every_call_holds_for_other_values(name: str) -> None:
    task = load_task(name)
    for case in task.cases:
        drawn = [inputs.draw(task, case, seed) for seed in range(8)]
        found = [(a, reference.expect(task, case, a, exact=False)) for a in drawn]
        every = [compulsory_work.ideal_bytes(task, case, a, e) for a, e in found]
        assert max(every) <= min(compulsory_work.ideal_bytes(task, case, a, e, single_call=True) for a, e in found)


def test_sizes_stand_in_where_nobody_has_values() -> None:
    task = load_task("index/index_fill_")
    case = task.timed[0]
    n = case.axes["N"] * 256
    assert compulsory_work.declared_bytes(task, case) == 8 * case.axes["K"] + 4 * min(n, 256 * case.axes["K"])
    assert compulsory_work.declared_bytes(load_task("math/cos"), load_task("math/cos").timed[0]) is None
    rand = load_task("random/rand")
    assert [compulsory_work.declared_bytes(rand, c) for c in rand.timed] == [4 << k for k in (23, 25, 27)]


def test_a_call_without_results_moves_nothing() -> None:
    task = load_task("matrixmultiply/matmul")
    case = Case({"*a": (0, 8), "*b": (8, 4), "N": 4})
    args = inputs.draw(task, case, 0)
    assert compulsory_work.ideal_bytes(task, case, args, reference.expect(task, case, args)) == 0


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("missing", "missing"), ("numel(missing)", "missing"), ("count(input)", "count"), ("distinct()", "distinct"),
        ("under(input)", "under"), ("numel(result[x])", "result"), ("numel(result[7])", "result"), ("distinct(dim)", "dim"),
        ("input", "input"), ("input.numel", "numel"), ("__import__('os')", "__import__"), ("1 / 0", "1 / 0"),
        ("distinct(index, but=3)", "distinct"),
    ],
)  # fmt: skip
def test_what_an_expression_does_not_know_is_said(expression: str, told: str) -> None:
    case = Case({"*a": (), "N": 3, "*b": (), "K": 2}, {"dim": 0})
    counts = _values("index/index_select", case, input=torch.randn(3), dim=0, index=torch.tensor([0, 2]))
    with pytest.raises(DeclarationError, match=told):
        _asked(counts, expression)


def test_results_are_asked_for_only_where_there_are_any() -> None:
    task = load_task("random/rand")
    with pytest.raises(DeclarationError, match="needs the results"):
        compulsory_work.ideal_bytes(task, task.cases[0], {}, None)
    with pytest.raises(DeclarationError, match="cost reads 'y'"):

        def reference_of(x: Any) -> Any:
            """Contract."""

        declare(
            difficulty=1, takes={"x": T("*")}, truth=task.truth, cost=Cost(reads={"y": "0"}), timed=(),
            cases=(Case({}), Case({}, held=True)),
        )(reference_of)  # fmt: skip


def test_an_expanded_input_is_read_once() -> None:
    task = load_task("math/ifftshift")
    case = next(c for c in task.cases if "steps 1 0 1" in c.layouts.get("input", ""))
    args = inputs.draw(task, case, 1)
    expected = reference.expect(task, case, args, "cpu", exact=False)
    assert args["input"].shape == (3, 5, 9)
    assert compulsory_work.ideal_bytes(task, case, args, expected) == 4 * (3 * 9 + 3 * 5 * 9)
