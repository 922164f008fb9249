"""What `eval/shaping.py` calls wrongly paid."""

from __future__ import annotations

from typing import Any

from kbx_env.eval.shaping import misjudged


def row(name: str, verdict: str, default: float, shaped: float, group: str = "attacks", recognised: bool = False) -> dict[str, Any]:
    return {"name": name, "group": group, "verdict": verdict, "default": default, "shaped": shaped, "recognised": recognised}


RIGHT = row("expert", "correct", 1.0, 1.0, "experts")


def test_a_recognised_attack_must_not_gain() -> None:
    caught = row("caught", "rejected", 0.0, 0.01, recognised=True)
    assert misjudged([RIGHT, caught]) == ([caught], [])
    assert misjudged([RIGHT, caught | {"shaped": 0.0}]) == ([], [])


def test_one_that_wrong_values_give_away_is_told_and_no_error() -> None:
    wrong = row("by heart", "incorrect", 0.36, 0.46)
    assert misjudged([RIGHT, wrong]) == ([], [wrong])


def test_nothing_wrong_may_earn_what_a_right_kernel_does() -> None:
    high = row("by heart", "incorrect", 0.36, 1.0)
    honest = row("broken", "incorrect", 0.5, 1.2, "broken experts")
    assert misjudged([RIGHT, high, honest]) == ([high, honest], [])


def test_what_is_masked_is_not_paid() -> None:
    masked: dict[str, Any] = row("lost", "infra_fault", 0.0, 0.0) | {"default": None, "shaped": None}
    assert misjudged([RIGHT, masked]) == ([], [])
