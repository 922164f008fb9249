"""A reward term and a preset of your own, beside two presets of the project.

    python examples/own_reward.py

The same preset goes to a trainer as KernelReward("python:own_reward:Lean"), and to commands as --reward.
"""

from pathlib import Path

from kbx_env.rewards._term import term
from kbx_env.rewards.compose import load_preset

import kbx_env
from kbx_env.outcome import Outcome

GOOD = (Path(__file__).parent / "kernels/exp_sqrt.py").read_text()
ANSWERS = {
    "correct": GOOD,
    "correct, launched twice": GOOD.replace("        _exp_sqrt[", "        for _ in range(2): _exp_sqrt["),
    "wrong": GOOD.replace("0.5", "0.25"),
    "no kernel": "x = 1",
}


@term(0, 1)
def lean(outcome: Outcome) -> float | None:
    """Share of the moved bytes that were needed, for a correct kernel; None where traffic is not known."""
    evidence = outcome.evidence
    if not outcome.correct:
        return 0.0
    return evidence.ideal_bytes / evidence.moved_bytes if evidence and evidence.moved_bytes and evidence.ideal_bytes else None


class Lean:
    """The preset: a correct kernel earns 0.5 to 1."""

    WEIGHTS = {"correct": 0.5, "lean": 0.5}
    TERMS = (lean,)


if __name__ == "__main__":
    presets = [load_preset(name) for name in ("default", "fusion", "python:own_reward:Lean")]
    print(f"{'':24}" + "".join(f"{p.name.split(':')[-1]:>9}" for p in presets))
    for what, source in ANSWERS.items():
        outcome = kbx_env.grade("math/exp_sqrt", source, backend="cpu", targets=())
        print(f"{what:24}" + "".join(f"{p(outcome):9.2f}" for p in presets))
