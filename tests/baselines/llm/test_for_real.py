"""The five methods over the real grader and the real sandbox, with a model that writes a wrong kernel, then a right one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kbx_env.baselines._geak_prompts import CRITERIA
from kbx_env.eval import report
from scripted import Asked, Reply, ScriptedServer

from kbx_env.grading.grader import Grader

pytestmark = pytest.mark.usefixtures("no_figures")

RIGHT = """\
import torch
import triton
import triton.language as tl


@triton.jit
def _relu(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    tl.store(y + i, tl.where(v != v, v, tl.maximum(v, 0.0)), mask=i < n)


def relu(input, inplace=False, out=None):
    x = input.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        _relu[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
    if inplace:
        input.copy_(y)
        return input
    if out is not None:
        out.copy_(y)
        return out
    return y
"""
WRONG = RIGHT.replace("tl.maximum(v, 0.0)", "tl.minimum(v, 0.0)")
TEST = """\
import sys
import torch
from kernel import kernel_function

x = torch.linspace(-1, 1, 1000)
got, want = kernel_function(x), torch.relu(x)
if not torch.allclose(got, want):
    print("largest error", (got - want).abs().max().item())
    sys.exit(1)
"""


def _fenced(code: str) -> str:
    return f"```python\n{code}```"


def answer(asked: Asked) -> Reply:
    """A wrong kernel to whoever asks for the first time, a right one to whoever shows a failure."""
    text = asked.text
    if text.startswith("Write a test"):
        return Reply(_fenced(TEST))
    if "passes this test" in text or "does not pass its test" in text:
        code = RIGHT if "Standard output:\nlargest error" in text else WRONG
        return Reply(_fenced(code.replace("def relu", "def kernel_function")))
    if "with exactly these keys" in text:
        return Reply(json.dumps(dict.fromkeys(CRITERIA, 0.5)))
    if "Answer in a few sentences" in text:
        return Reply("The comparison is the wrong way round.")
    if "JSON object" in text:
        code = RIGHT if "Result: Verdict" in text else WRONG
        return Reply(json.dumps({"strategy": "one pass", "code": f"{code}\n# {asked.number}\n"}))
    return Reply(_fenced(WRONG))


@pytest.mark.parametrize(
    ("policy", "correct", "calls", "gradings", "scripts"),
    [
        ("autotriton", False, 1, 1, 0), ("claude", False, 1, 1, 0), ("deepseek-coder", False, 1, 1, 0),
        ("geak", True, 36, 12, 0), ("kernelagent", True, 7, 1, 6),
    ],
)  # fmt: skip
def test_what_each_method_makes_of_it(
    grader: Grader, policy: str, correct: bool, calls: int, gradings: int, scripts: int, tmp_path: Path
) -> None:
    with ScriptedServer(answer) as server:
        argv = ["--policy", policy, "--model", "m", "--base-url", server.base_url, "--backend", "cpu", "--split", "all"]
        argv += ["--tasks", "activation/relu", "--targets", "none", "--out", str(tmp_path / "out")]
        # Methods of one grading get a warm grader: a worker of their own, as in the other runs, takes seconds to start.
        if correct:
            assert report.main(argv) == 0
        else:
            report.run(report.parser().parse_args(argv), grade=grader.grade)
        assert len(server.asked) == calls
    (row,) = json.loads((tmp_path / "out/report.json").read_text())["tasks"]
    assert row["correct"] is correct, row["message"]
    spent = row["spent"]
    assert (spent["calls"], spent["gradings"], spent["scripts"]) == (calls, gradings, scripts)
    if policy == "geak":
        assert [t["correct"] for t in row["turns"]] == [False] * 4 + [True] * 8
    if policy == "kernelagent":
        assert "passed its own test in round 1" in row["notes"]["own_test"]
