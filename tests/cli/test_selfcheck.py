"""The self-check: three verdicts, and a status that says whether they are the expected ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kbx_env.__main__ import main
from kbx_env.cli import selfcheck
from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict, Violation
from kbx_env.spec.catalog import expert_source


def _grade(task: str, source: str, **options: Any) -> Outcome:
    assert task == selfcheck.TASK and options == {"backend": "cpu", "targets": ("sm_90",), "timing": False}
    common = (Stage.CORRECT, "cpu", "contract")
    if source == expert_source(task):
        return Outcome(task, Verdict.CORRECT, *common, cases=Cases(1, 1))
    if source == selfcheck.WRONG:
        return Outcome(task, Verdict.INCORRECT, *common, Fault.POLICY, "off", Cases(0, 1))
    return Outcome(task, Verdict.REJECTED, *common, Fault.POLICY, "torch", violations=(Violation("torch_compute", "torch"),))


def test_a_line_each_and_status_0(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kbx_env.executor.direct.grade", _grade)
    assert main(["selfcheck", "--backend", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:3] for line in lines] == ["ok "] * 3
    assert "expected incorrect, found incorrect" in lines[1] and "expected rejected, found rejected" in lines[2]
    assert main(["selfcheck", "--backend", "gpu"]) == 2


def test_an_unexpected_verdict_is_told_with_its_reason(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(task: str, source: str, **options: Any) -> Outcome:
        return Outcome(task, Verdict.INFRA_FAULT, Stage.COMPILE, "cpu", "contract", Fault.INFRA, "no memory")

    monkeypatch.setattr("kbx_env.executor.direct.grade", broken)
    assert main(["selfcheck", "--backend", "cpu"]) == 1
    assert "NO  attack" in (said := capsys.readouterr().out) and "found infra_fault" in said and "no memory" in said
    assert main(["selfcheck", "--backend", "cpu", "--json"]) == 1
    assert [r["ok"] for r in json.loads(capsys.readouterr().out)] == [False] * 3


@pytest.mark.full
def test_the_real_grader_gives_the_expected_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selfcheck", "--backend", "cpu"]) == 0, capsys.readouterr().out
