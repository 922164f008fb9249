"""The wording of contracts: nothing that a case asks for has to be guessed, and equal things are said in equal words."""

from __future__ import annotations

import math
import re

import pytest
import torch

from kbx_env.grading import inputs
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
