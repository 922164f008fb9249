"""Sources that nobody wrote on purpose: a verdict with a reason for each, and never an error of the grader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kbx_env.eval import fuzz

from kbx_env.grading.static.screen import screen
from kbx_env.outcome import Fault, FaultKind, Outcome, Stage, Verdict
from kbx_env.spec.catalog import load_task

TASK = load_task("activation/gelu_fp16")
_PIECES = st.one_of(
    st.text(max_size=20), st.sampled_from([w + " " for w in fuzz.WORDS] + ["def gelu_fp16(", "import os\n"])
)


@given(st.lists(_PIECES, max_size=30).map("".join))
@settings(max_examples=2000, deadline=None)
def test_the_screen_says_something_about_every_text(text: str) -> None:
    found = screen(TASK, text.encode("utf-8", "surrogatepass"))
    assert found.verdict in (None, Verdict.MALFORMED, Verdict.REJECTED)
    assert found.verdict is None or found.message.strip()


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_the_screen_says_something_about_every_bytes(data: bytes) -> None:
    found = screen(TASK, data)
    assert found.verdict is not None and found.message.strip()


def test_a_small_sample_is_graded(grader) -> None:
    rows = []
    for n in range(60):
        task, text, how = fuzz.source(7, n)
        outcome = grader.grade(task, fuzz.encoded(text), backend="cpu", targets=(), wall=0.5, split="train")
        rows.append((n, task, how, fuzz.problem(outcome), outcome.message))
        assert json.loads(outcome.to_json()), "a verdict that can be written down"
    assert not [r for r in rows if r[3] in ("crash", "silent")]
    assert not [r for r in rows if r[3] == "infra" and "inline_asm" not in r[4]]


def test_a_source_depends_on_seed_and_number_alone() -> None:
    assert fuzz.source(3, 14) == fuzz.source(3, 14) != fuzz.source(3, 15)


def _infra(kind: FaultKind | None) -> Outcome:
    return Outcome("t", Verdict.INFRA_FAULT, Stage.COMPILE, "cpu", "contract", Fault.INFRA, "why", fault_kind=kind)


@pytest.mark.parametrize(
    ("outcome", "found"),
    [(_infra(FaultKind.GRADER_FAILED), "crash"), (_infra(FaultKind.WORKER_LOST), "crash"),
     (_infra(FaultKind.UNSUPPORTED), "infra"), (_infra(FaultKind.SANDBOX), "infra"),
     (Outcome("t", Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, " "), "silent"),
     (Outcome("t", Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, "why"), "")],
)  # fmt: skip
def test_what_counts_as_a_problem(outcome: Outcome, found: str) -> None:
    assert fuzz.problem(outcome) == found


def test_an_interrupted_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [
        {"number": n, "seed": 1, "verdict": "incorrect", "problem": "", "message": "", "seconds": 1.0} for n in range(3)
    ]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"number": 3, "se')
    assert fuzz.main(["--count", "3", "--seed", "1", "--workers", "1", "--json", str(file)]) == 0
    told = capsys.readouterr().out
    assert json.loads(told[told.index("\n{") :])["sources"] == 3
