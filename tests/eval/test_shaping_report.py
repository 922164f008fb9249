"""What `eval/shaping.py` calls wrongly paid."""

from __future__ import annotations

from typing import Any

from kbx_env.eval.shaping import misjudged


def row(name: str, verdict: str, default: float, shaped: float, group: str = "attacks", recognised: bool = False) -> dict[str, Any]:
    return {"name": name, "group": group, "verdict": verdict, "default": default, "shaped": shaped, "recognised": recognised}


RIGHT = row("expert", "correct", 1.0, 1.0, "experts")


def test_an_attack_must_not_gain() -> None:
    caught = row("caught", "rejected", 0.0, 0.01, recognised=True)
    wrong = row("by heart", "incorrect", 0.36, 0.46)
    assert misjudged([RIGHT, caught, wrong]) == [
        ("recognised, and paid more", caught), ("not recognised, and paid more", wrong),
    ]  # fmt: skip
    assert not misjudged([RIGHT, caught | {"shaped": 0.0}, wrong | {"shaped": 0.36}])


def test_an_honest_wrong_kernel_may_be_given_a_hint() -> None:
    assert not misjudged([RIGHT, row("broken", "incorrect", 0.36, 0.46, "broken experts")])


def test_nothing_wrong_may_earn_what_a_right_kernel_does() -> None:
    high = row("by heart", "incorrect", 0.36, 1.0)
    honest = row("broken", "incorrect", 0.5, 1.2, "broken experts")
    assert misjudged([RIGHT, high, honest]) == [("as much as a right kernel", high), ("as much as a right kernel", honest)]


def test_what_is_masked_is_not_paid() -> None:
    masked: dict[str, Any] = row("lost", "infra_fault", 0.0, 0.0) | {"default": None, "shaped": None}
    assert not misjudged([RIGHT, masked])
