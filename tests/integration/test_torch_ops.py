"""``torch_ops="allow"``: the wrapper may compute in torch, but a launch must matter; never mixed with strict gradings."""

from __future__ import annotations

import pytest
from kbx_env.baselines.policy import make_policy

from kbx_env.errors import UnknownName
from kbx_env.executor import Request
from kbx_env.outcome import Verdict
from kbx_env.spec.catalog import expert_source

TASK = "math/softmax"
HEAD = """
import torch
import triton
import triton.language as tl


@triton.jit
def _exp(x, y, n, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + o, tl.exp(tl.load(x + o, mask=o < n)), mask=o < n)

"""
MIXED = (
    HEAD
    + """
def softmax(input, dim, dtype=None):
    x = input.to(torch.float64)
    x = (x - x.amax(dim, keepdim=True)).contiguous() if x.numel() else x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        _exp[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), B=256)
    return (y / y.sum(dim, keepdim=True)).to(dtype or input.dtype)
"""
)
DECOY = (
    HEAD
    + """
def softmax(input, dim, dtype=None):
    y = torch.empty(1, device=input.device)
    _exp[(1,)](y, y, 0, B=16)
    return torch.softmax(input, dim, dtype=dtype)
"""
)


def test_a_mixed_wrapper_is_right_where_torch_is_allowed_and_says_so(grader) -> None:
    allowed = grader.grade(TASK, MIXED, backend="cpu", targets=(), torch_ops="allow")
    assert allowed.correct, allowed.message
    assert allowed.manifest["torch_ops"] == "allow" and allowed.evidence.ablation is True
    strict = grader.grade(TASK, MIXED, backend="cpu", targets=())
    assert strict.verdict is Verdict.REJECTED and strict.manifest["torch_ops"] == "strict"


@pytest.mark.parametrize(("name", "rule"), [("eager", "no_launch"), ("decoy", "ablation")])
def test_torch_alone_is_not_paid_where_torch_is_allowed(grader, name: str, rule: str) -> None:
    source = DECOY if name == "decoy" else make_policy("eager").act({"task": TASK})
    outcome = grader.grade(TASK, source, backend="cpu", targets=(), torch_ops="allow")
    assert outcome.verdict is Verdict.REJECTED and rule in {v.rule for v in outcome.violations}


@pytest.mark.parametrize("task", ["math/softmax", "quantization/matmul_w8a8", "linearalgebra/qr", "index/scatter"])
def test_experts_are_paid_under_both(grader, task: str) -> None:
    outcome = grader.grade(task, expert_source(task), backend="cpu", targets=(), torch_ops="allow")
    assert outcome.correct, outcome.message


def test_the_two_are_kept_apart() -> None:
    one, other = (Request(TASK, MIXED.encode(), {"torch_ops": v}) for v in ("strict", "allow"))
    assert one.key != other.key


def test_another_policy_is_refused(grader) -> None:
    with pytest.raises(UnknownName, match="strict"):
        grader.grade(TASK, MIXED, backend="cpu", torch_ops="some")
