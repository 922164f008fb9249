"""The wording of contracts: nothing that a case asks for has to be guessed, and equal things are said in equal words."""

from __future__ import annotations

import math
import re

import pytest
import torch

from kbx_env.envs.prompt import RULES
from kbx_env.grading import derived_cases, inputs
from kbx_env.spec.catalog import load_task, task_ids
from kbx_env.spec.task import Task

OUT = re.compile(
    r"\bout(?:_tensor)?: None \(the default: (?:a new tensor|new tensors)\), or,? "
    r"(?:.{0,40}, )?(?:for dim None )?"
    r"(?:a contiguous tensor of (?:the (?:result|loss)|[APQ])'s shape and dtype with any contents"
    r"|a tensor of the result's shape and dtype with any strides and any contents"
    r"|a 0-d fp32 tensor with any contents), "
    r"which is filled (?:with \w+ )?and returned"
)
"""The one way to describe ``out``: its default, shape, dtype, layout and contents, and what happens to it."""
NAMES = {
    torch.float32: "fp32|float32", torch.float16: "fp16|float16", torch.bfloat16: "bf16|bfloat16",
    torch.float64: "fp64|float64",
}  # fmt: skip
"""What a contract may call a dtype, where that is not torch's own name."""


def _text(task: Task) -> str:
    return " ".join(task.spec.split())


@pytest.mark.parametrize("name", task_ids())
def test_out_is_described_in_the_same_words_everywhere(name: str) -> None:
    task = load_task(name)
    if {"out", "out_tensor"} & set(task.signature.parameters):
        assert OUT.search(_text(task)), "see OUT for the wording"


@pytest.mark.parametrize("name", task_ids())
def test_strides_are_those_of_something(name: str) -> None:
    text = _text(load_task(name))
    for found in re.finditer(r"[^.;:]*\bstrides\b[^.;]*", text):
        owned = r"(?:(?:may )?(?:each )?have|of|with|whatever its) (?:any )?strides"
        assert re.search(owned, found.group(0)), f"whose strides? {found.group(0)!r}"


@pytest.mark.parametrize("name", task_ids())
def test_every_default_of_none_is_explained(name: str) -> None:
    task = load_task(name)
    text = _text(task)
    for parameter, p in task.signature.parameters.items():
        assert re.search(rf"\b{parameter}\b", text), f"the contract does not name {parameter}"
        if p.default is None:
            near = rf"\b{parameter}\b[^.;]*\bNone\b|\bNone\b[^.;]*\b{parameter}\b"
            assert re.search(near, text), f"the contract does not say what {parameter}=None means"


@pytest.mark.parametrize("name", task_ids())
def test_whatever_a_case_passes_is_in_the_contract(name: str) -> None:
    task = load_task(name)
    text = _text(task)
    for index, case in enumerate(task.cases):
        for parameter, value in inputs.draw(task, case, 5 + index).items():
            where = f"{case.label()}: {parameter}"
            if isinstance(value, float) and math.isnan(value):
                assert "NaN" in text, f"{where} is NaN"
            if not isinstance(value, torch.Tensor):
                continue
            dtype = NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))
            assert re.search(rf"\b(?:{dtype})\b", text), f"{where} is {value.dtype}"
            if value.is_floating_point():
                assert "NaN" in text or not torch.isnan(value).any(), f"{where} holds NaN"
                assert re.search(r"infinit|inf\b", text) or not torch.isinf(value).any(), f"{where} holds infinities"
            if value.numel() == 0:
                assert re.search(r"empty|may be 0|rows may|none at all|k may be|can be 0", text), f"{where} is empty"
            if value.dim() == 0:
                assert "0-d" in text, f"{where} is 0-d"
            if not value.is_contiguous():
                assert re.search(r"strides|non-contiguous", text), f"{where} is not contiguous"


LARGE = 1 << 20
"""Timed cases with more elements are not drawn here; their distributions are those of smaller ones."""
SPECIAL = {"NaN": r"\bNaN\b|\bnan\b", "+inf": r"(?<![-\w])inf\b|\binfinit", "-inf": r"-inf\b|\+-inf\b|\binfinit"}
"""Words of a contract for the values that are no finite numbers."""


def _kinds(value: object) -> set[str]:
    """Return which values of ``SPECIAL`` an argument holds."""
    if isinstance(value, list | tuple):
        return set().union(*map(_kinds, value))
    if isinstance(value, torch.Tensor) and value.is_complex():
        return _kinds(torch.view_as_real(value.resolve_conj()))
    if isinstance(value, float) or (isinstance(value, torch.Tensor) and value.is_floating_point()):
        x = torch.as_tensor(value)
        found = {"NaN": x.isnan(), "+inf": x.isposinf(), "-inf": x.isneginf()}
        return {kind for kind, where in found.items() if bool(where.any())}
    return set()


def _allowed(task: Task) -> set[str]:
    """Return the values of ``SPECIAL`` that some sentence of a contract names, other than to say that it is not tested."""
    sentences = re.split(r"(?<=[.;])\s+", _text(task))
    said = [s for s in sentences if not re.search(r"\bnot (tested|occur)|\bare not\.|neither", s)]
    return {kind for kind, words in SPECIAL.items() if any(re.search(words, s) for s in said)}


@pytest.mark.parametrize("name", task_ids())
def test_nan_and_infinities_come_only_where_the_contract_names_them(name: str) -> None:
    """103 contracts do not mention them: the prompt says for all tasks that then they do not occur."""
    assert "NaN, infinities, empty and 0-d tensors occur only where the contract mentions them" in " ".join(RULES.split())
    task = load_task(name)
    drawn = [*task.cases, *(c for k in range(2) for c in derived_cases.derive(task, b"special %d" % k, "eval"))]
    drawn += [c for c in (*task.timed, *task.held_timed) if c.elements() <= LARGE]
    allowed = _allowed(task)
    for index, case in enumerate(drawn):
        for parameter, value in inputs.draw(task, case, 11 + index).items():
            if parameter not in task.written(case.args) or "any contents" not in _text(task):
                assert _kinds(value) <= allowed, f"{case.label()}: {parameter} holds {_kinds(value) - allowed}"
