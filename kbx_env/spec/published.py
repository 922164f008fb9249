"""The paper's cases of a task, and the task as ``grading="paper"`` judges it."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kbx_env.errors import DeclarationError
from kbx_env.spec.catalog import load_task, published_rows
from kbx_env.spec.criteria import Published
from kbx_env.spec.input_distributions import Expression
from kbx_env.spec.task import Case, DeviceArg, DtypeArg, GeneratorArg, T, Task


@functools.cache
def published_task(task_id: str) -> Task:
    """Return a task as the paper grades it: its published entry, reference, cases and comparison.

    Args:
        task_id: ``category/name``.

    Returns:
        A task that differs from the declared one in ``entry``, ``signature``, ``reference``, ``takes``, ``cases``, ``truth`` and
        ``writes``. Its cases are the published ones, each as often as the published test draws it.

    Raises:
        DeclarationError: the package has no published cases of this task.
    """
    from kbx_env.tasks._published import REFERENCES

    task = load_task(task_id)
    row = published_rows().get(task.id)
    if row is None:
        raise DeclarationError(f"{task.id}: no published cases; grading='paper' is for the tasks of the paper")
    cases = tuple(case for c in row["cases"] for case in [_case(c)] * int(c["repeat"]))
    reference: Callable[..., Any] = REFERENCES.get(task.id, task.reference)
    takes = {name: T("", dtype, optional=True) for c in row["cases"] for name, dtype in c["dtypes"].items()}
    return replace(
        task, entry=row.get("entry", task.entry), signature=inspect.signature(reference), reference=reference, takes=takes,
        cases=cases, truth=Published(), writes={}, moves=False, picks=False,
    )  # fmt: skip


def _case(row: Mapping[str, Any]) -> Case:
    return Case(
        {}, {k: _value(v) for k, v in row["args"].items()}, draws={k: Expression(v) for k, v in row["draws"].items()},
        dtypes=row["dtypes"], layouts=row.get("layouts", {}), given=tuple(row["shapes"]), out=bool(row.get("out")),
        shapes={k: tuple(v) for k, v in row["shapes"].items()}, raises=row.get("raises", ""), name=row["name"],
        unpassable=row.get("unpassable", ""), spread=row.get("spread", ""), attribute=row.get("attribute", ""),
    )  # fmt: skip


def _value(value: Any) -> Any:
    """Return an argument as the case declares it: tuples and markers are objects with one key in JSON."""
    if not isinstance(value, dict):
        return value
    ((kind, found),) = value.items()
    match kind:
        case "tuple":
            return tuple(_value(v) for v in found)
        case "dtype":
            return DtypeArg(found)
        case "generator":
            return GeneratorArg()
        case "device":
            return DeviceArg()
    raise DeclarationError(f"published.json: {json.dumps(value)}")
