"""Counting the verdicts of many gradings of one kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import verdict_chance


def _row(kind: str, name: str, correct: bool, rules: tuple[str, ...] = ()) -> dict:
    verdict = "correct" if correct else "incorrect"
    found = {"kind": kind, "name": name, "correct": correct, "verdict": verdict, "message": "why"}
    return found | {"rules": list(rules), "seconds": 1.0}


def test_a_refused_expert_and_a_paid_attack_are_unexpected() -> None:
    rows = [
        _row("expert", "reduce/sum", True), _row("expert", "reduce/sum", False), _row("attack", "a.py", False, ("host_traffic",)),
        _row("attack", "a.py", True), _row("honest", "h.py", True),
    ]  # fmt: skip
    table = {r["name"]: r for r in verdict_chance.summary(rows)}
    assert {name: (r["gradings"], r["unexpected"]) for name, r in table.items()} == {
        "reduce/sum": (2, 1), "a.py": (2, 1), "h.py": (1, 0),
    }  # fmt: skip
    assert table["a.py"]["ended"] == {"host_traffic": 1, "correct": 1}
    assert table["reduce/sum"]["messages"] == ["incorrect: why"] and not table["h.py"]["messages"]


def test_attacks_that_are_known_to_pass_are_left_out() -> None:
    names = [k.name for k in verdict_chance.kernels(("attack",), "*")]
    assert "exploits/m_memo_by_address.py" in names and all(n.startswith("exploits/") for n in names)
    assert len(names) < len(list(Path(verdict_chance.__file__).parent.parent.glob("tests/zoo/exploits/*.py")))


def test_no_kernel_of_that_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict_chance.main([str(tmp_path / "out.json"), "--only", "nothing"]) == 2
    assert "no kernel matches 'nothing'" in capsys.readouterr().err
