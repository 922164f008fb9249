"""Of every masked fault: can a submission cause it at will? docs/threat_model.md lists the answers, the zoo has the attempts."""

from __future__ import annotations

from pathlib import Path

import pytest
from kbx_env.eval.zoo import graded, specimens

from kbx_env.outcome import Fault, FaultKind

PAGE = Path(__file__).parents[2] / "docs" / "threat_model.md"
ATTEMPTS = {
    FaultKind.UNSUPPORTED: ("o_made_up_symbol", "o_wrong_arity", "o_wrong_then_assembly", "o_denied_then_assembly"),
    FaultKind.SANDBOX: ("o_cpu_limit", "o_raised_signal", "o_stopped_by_memory", "o_full_disk"),
    FaultKind.GRADER_FAILED: ("d_masked_by_nonsense", "d_deep_reply"),
    FaultKind.WORKER_LOST: ("hang", "d_print_and_leave"),
    FaultKind.DEADLINE: ("hang",),
}
"""Attacks of the zoo that try to cause each fault. A fault without an attempt fails the test below."""
OPEN = {FaultKind.UNSUPPORTED: "inline assembly"}
"""Faults that a submission can cause at will, and by what: the page must name it."""
ASSEMBLY = '''
import torch
import triton
import triton.language as tl


@triton.jit
def _k(x, y, n, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + o, mask=o < n, other=0.0)
    v = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [v], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y + o, v, mask=o < n)


def sigmoid(input, out=None):
    x, y = input.contiguous(), torch.empty(input.shape, dtype=input.dtype, device=input.device)
    if y.numel():
        _k[(triton.cdiv(y.numel(), 1024),)](x, y, y.numel(), B=1024)
    return y if out is None else out.copy_(y)
'''


def test_every_masked_fault_has_attempts_and_an_answer_on_the_page() -> None:
    assert set(ATTEMPTS) == set(FaultKind)
    page = PAGE.read_text().partition("## Faults that are not the submission's")[2].partition("\n## ")[0]
    for kind in (*FaultKind, "void"):
        assert f"| `{kind}` |" in page, kind
    for kind, how in OPEN.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{kind}` |")]
        assert "yes" in row and how in row


@pytest.mark.parametrize("name", sorted({n for names in ATTEMPTS.values() for n in names}))
def test_attempt_to_be_masked_is_the_submissions_fault(grader, name: str) -> None:
    (s,) = specimens(name)
    outcome = graded(grader, s, "cpu", wall=3.0)
    assert outcome.fault is Fault.POLICY, (outcome.verdict, outcome.message)


def test_what_can_still_be_caused_at_will_is_what_the_page_says(grader) -> None:
    outcome = grader.grade("activation/sigmoid", ASSEMBLY, backend="cpu", targets=())
    assert outcome.fault_kind is FaultKind.UNSUPPORTED, outcome.message
