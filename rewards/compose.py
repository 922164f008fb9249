"""Composes terms into a reward. A preset is a file in ``rewards/presets`` that names terms and weights."""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass

from kbx_env.rewards._term import Term

from kbx_env.errors import UnknownName
from kbx_env.outcome import Fault, Outcome

_HERE = pathlib.Path(__file__).parent


@dataclass(frozen=True)
class Reward:
    """A weighted sum of terms.

    An infrastructure fault has no reward (``None``): it must be masked in training, never counted as 0.
    A term that is ``None`` (speed, where there is no GPU) is left out of the sum, so rewards of the CPU and
    the CUDA backend have different ranges and must not be compared or mixed in one batch.
    """

    name: str
    weights: Mapping[str, float]
    parts: tuple[Term, ...]
    estimate: str | None = None
    """The GPU that gradings on the CPU backend should estimate for, if a term needs it."""

    def __call__(self, outcome: Outcome) -> float | None:
        """The reward, or ``None`` for an infrastructure fault and for a grading that left out a layer of defence."""
        if outcome.fault is Fault.INFRA or outcome.manifest.get("without"):
            return None
        values = self.terms(outcome)
        return float(sum(self.weights[k] * v for k, v in values.items() if v is not None))

    def terms(self, outcome: Outcome) -> dict[str, float | None]:
        """Every term, unweighted."""
        if outcome.fault is Fault.INFRA:
            return {t.name: None for t in self.parts}
        return {t.name: t(outcome) for t in self.parts}

    def range(self, backend: str) -> tuple[float, float]:
        """Smallest and largest reward on a backend (``cpu`` or ``cuda``)."""
        parts = [t for t in self.parts if backend in t.backends]
        low = sum(min(self.weights[t.name] * t.low, self.weights[t.name] * t.high) for t in parts)
        return low, sum(max(self.weights[t.name] * t.low, self.weights[t.name] * t.high) for t in parts)


def load_term(name: str) -> Term:
    """The term declared in ``rewards/<name>.py``.

    Raises:
        UnknownName: no such term.
    """
    known = [p.stem for p in _HERE.glob("*.py") if not p.stem.startswith("_") and p.stem != "compose"]
    if name not in known:
        raise UnknownName("reward term", name, known)
    found: Term = getattr(importlib.import_module(f"kbx_env.rewards.{name}"), name)
    return found


def presets() -> tuple[str, ...]:
    """Names of the presets, sorted."""
    return tuple(sorted(p.stem for p in (_HERE / "presets").glob("*.py") if not p.stem.startswith("_")))


def load_preset(name: str) -> Reward:
    """The preset declared in ``rewards/presets/<name>.py``.

    Raises:
        UnknownName: no such preset; names the nearest ones.
    """
    if name not in presets():
        raise UnknownName("reward preset", name, presets())
    preset = importlib.import_module(f"kbx_env.rewards.presets.{name}")
    weights: Mapping[str, float] = preset.WEIGHTS
    return Reward(name, weights, tuple(load_term(t) for t in weights), getattr(preset, "ESTIMATE", None))
