"""The paper's cases: complete, consistent with the published signatures, and computable by the published references."""

from __future__ import annotations

import inspect
import json

import pytest
import torch

from kbx_env.grading import inputs, reference
from kbx_env.protocol.wire import DTYPES
from kbx_env.spec.catalog import load_task, published_rows, task_ids
from kbx_env.spec.published import published_task

CALLS = 1531
"""Calls of the 176 published tests."""
CASES = 1296
"""Of these, calls with other shapes, dtypes, arguments or distributions."""
NONE_ON_PURPOSE = ("random/logspace", "random/rand")
"""Tasks without tensor arguments."""


def test_every_task_has_its_published_cases() -> None:
    rows = published_rows()
    assert set(rows) == set(task_ids())
    assert sum(len(r["cases"]) for r in rows.values()) == CASES
    assert sum(len(published_task(t).cases) for t in task_ids()) == CALLS


@pytest.mark.parametrize("task", task_ids())
def test_cases_fit_the_published_signature(task: str) -> None:
    published, declared = published_task(task), load_task(task)
    parameters = published.signature.parameters
    tensors = set()
    for case in published.cases:
        names = {n.partition(".")[0] for n in case.shapes} | set(case.args)
        assert names <= set(parameters), case.label()
        required = {n for n, p in parameters.items() if p.default is inspect.Parameter.empty}
        assert required <= names, case.label()
        assert set(case.dtypes) == set(case.shapes) == set(case.draws), case.label()
        assert set(case.dtypes.values()) <= set(DTYPES), case.label()
        assert not case.out or "out" in parameters
        tensors |= {n.partition(".")[0] for n in case.shapes}
    assert tensors or task in NONE_ON_PURPOSE
    if task != "optimizer/Adam":  # published as a class that is built from a list of parameters
        assert set(parameters) == set(declared.signature.parameters)
        assert tensors <= {n.partition(".")[0] for n in declared.takes}, "a tensor that our task does not take"
        assert published.entry == declared.entry


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", task_ids())
def test_published_references_compute_every_case(task: str) -> None:
    published = published_task(task)
    for index, case in enumerate(published.cases):
        args = inputs.draw(published, case, index + 1)
        for name, shape in case.shapes.items():
            assert tuple(args[name].shape) == shape and args[name].dtype is DTYPES[case.dtypes[name]]
        if case.raises:
            with pytest.raises(Exception) as raised:  # noqa: PT011
                reference.published(published, case, args, "cpu", 1)
            assert case.raises in {c.__name__ for c in type(raised.value).__mro__}
            continue
        first, again = (reference.published(published, case, args, "cpu", 1) for _ in range(2))
        pairs = zip(first.native, again.native, strict=True)
        assert first.native and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def test_fresh_draws_differ_and_symmetric_matrices_are_symmetric() -> None:
    task = published_task("normalization/symmetric_matrix_vector_norm")
    case = task.cases[-1]
    one, other = (inputs.draw(task, case, seed)["A"] for seed in (1, 2))
    assert torch.equal(one, one.mT) and not torch.equal(one, other)


def test_the_fingerprint_covers_the_published_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    from kbx_env.spec import catalog

    before = load_task("math/cos").fingerprint
    rows = json.loads(json.dumps(dict(published_rows())))
    rows["math/cos"]["cases"][0]["repeat"] = 2
    monkeypatch.setattr(catalog, "published_rows", lambda: rows)
    assert catalog._load.__wrapped__("math/cos").fingerprint != before
