"""What a kernel does to a GPU ends in the right verdict, in time, and the next grading finds the GPU as it was."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from kbx_env.grading.grader import Grader
from kbx_env.grading.runtime.session import FIRST_USE_SECONDS
from kbx_env.outcome import Fault, Outcome, Verdict
from kbx_env.spec.catalog import expert_source

pytestmark = pytest.mark.gpu
TASK = "activation/gelu_fp16"
EXPERT = expert_source(TASK)
WALL = 10.0
SLACK_BYTES = 1 << 30
"""A spare process and its piece of memory for large tensors."""
KERNELS = """

@triton.jit
def _spin(p):
    x = tl.load(p, volatile=True)
    while x == x:
        x = tl.load(p, volatile=True) * 0.0


@triton.jit
def _wild(p):
    tl.store(p + (1 << 44) + tl.arange(0, 128).to(tl.int64) * (1 << 33), 1.0)


@triton.jit
def _asserts(p):
    tl.device_assert(tl.load(p) != tl.load(p), "no")
"""
HARM = {
    "endless kernel": ("_spin[(132 * 8,)](torch.zeros(1, device=input.device))", Verdict.TIMEOUT),
    "illegal address": ("_wild[(1,)](torch.zeros(1, device=input.device))", Verdict.RUNTIME_ERROR),
    "device-side assert": ("_asserts[(1,)](torch.zeros(1, device=input.device), debug=True)", Verdict.RUNTIME_ERROR),
    "more memory than there is": ("x = torch.empty(1 << 45, device=input.device)", Verdict.RUNTIME_ERROR),
    "all memory, piece by piece": ("x = [torch.empty(1 << 30, device=input.device) for _ in range(1000)]", Verdict.RUNTIME_ERROR),
    "exit while it works": ("_spin[(8,)](torch.zeros(1, device=input.device))\n    raise SystemExit(0)", Verdict.RUNTIME_ERROR),
}  # fmt: skip


def _harmful(grader: Grader, body: str) -> Outcome:
    source = EXPERT.replace("def gelu_fp16(", "def _honest(") + KERNELS
    source += f"\n\ndef gelu_fp16(input, approximate='none'):\n    {body}\n    return _honest(input, approximate)\n"
    return grader.grade(TASK, source, backend="cuda", targets=(), timing=False, wall=WALL)


@pytest.fixture(scope="module")
def reaching() -> Iterator[Grader]:
    """Without the layers that send these away before they reach a GPU."""
    with Grader(without=["screen", "proof"]) as grader:
        assert grader.grade(TASK, EXPERT, backend="cuda", targets=(), timing=False).correct
        yield grader


@pytest.mark.parametrize("name", HARM)
def test_harm_to_a_gpu(reaching: Grader, name: str) -> None:
    body, verdict = HARM[name]
    free = torch.cuda.mem_get_info()[0]
    start = time.monotonic()
    outcome = _harmful(reaching, body)
    # Beside the submission's time: the first use of the GPU, compiling, and the end of the process.
    assert time.monotonic() - start < WALL + FIRST_USE_SECONDS + 10, outcome.message
    assert outcome.verdict is verdict and outcome.fault is Fault.POLICY, outcome.message
    after = reaching.grade(TASK, EXPERT, backend="cuda", targets=(), timing=False)
    assert after.correct, after.message
    # The memory of other processes on this GPU comes and goes; what a submission leaves behind stays.
    deadline = time.monotonic() + 30
    while torch.cuda.mem_get_info()[0] <= free - SLACK_BYTES and time.monotonic() < deadline:
        time.sleep(0.5)
    assert torch.cuda.mem_get_info()[0] > free - SLACK_BYTES
