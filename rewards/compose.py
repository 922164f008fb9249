"""Composes terms into a reward. A preset is a file in ``rewards/presets`` that names terms and weights."""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from kbx_env.rewards._term import Term

from kbx_env.errors import UnknownName
from kbx_env.outcome import Outcome

_HERE = pathlib.Path(__file__).parent
_NO_TERMS = ("compose", "shaping")


@dataclass(frozen=True)
class Reward:
    """A weighted sum of terms, from which wrong kernels lose what their shaping terms lack.

    A wrong kernel loses the sum of the shaping weights, less what its shaping terms are worth. It never earns more than
    without shaping, and of two wrong kernels the one with the better terms loses less. Right kernels lose nothing: they
    earn more than wrong ones, and keep the order that they have without shaping.

    A masked outcome has no reward (``None``), which is not 0: an infrastructure fault, or a time that is faster than
    physically possible (``void``). A term that is ``None`` (speed, where there is no GPU) is left out of the sum, so
    rewards of the CPU and the CUDA backend have different ranges and must not be compared or mixed in one batch.
    """

    name: str
    weights: Mapping[str, float]
    parts: tuple[Term, ...]
    estimate: str | None = None
    """The GPU that gradings on the CPU backend should estimate for, if a term needs it."""
    shaping: Mapping[str, float] = field(default_factory=dict)
    hints: tuple[Term, ...] = ()
    """The shaping terms."""
    compiled: bool = False
    """Whether timed gradings should also measure torch.compile, since a term needs it."""

    def __call__(self, outcome: Outcome) -> float | None:
        """Return the reward, or ``None`` for a masked outcome and for a grading that left out a layer of defence."""
        base, hint = self.base(outcome), self.potential(outcome)
        if base is None or hint is None or outcome.correct:
            return base
        # The same loss for unknown terms as for terms of 0: nothing is gained by hiding a fact.
        return base - (sum(self.shaping.values()) - hint)

    def base(self, outcome: Outcome) -> float | None:
        """Return the reward without shaping; ``None`` as for a call of this object."""
        return self._sum(outcome, self.weights, self.parts)

    def potential(self, outcome: Outcome) -> float | None:
        """Return Phi of ``rewards/shaping.py``, the weighted shaping terms, also for right kernels; ``None`` as ``base``."""
        return self._sum(outcome, self.shaping, self.hints)

    @staticmethod
    def _sum(outcome: Outcome, weights: Mapping[str, float], parts: tuple[Term, ...]) -> float | None:
        if outcome.masked or outcome.manifest.get("without"):
            return None
        values = ((t.name, t(outcome)) for t in parts)
        return float(sum(weights[k] * v for k, v in values if v is not None))

    def terms(self, outcome: Outcome) -> dict[str, float | None]:
        """Return every term by name, unweighted, including the shaping terms; all ``None`` for a masked outcome."""
        if outcome.masked:
            return {t.name: None for t in (*self.parts, *self.hints)}
        return {t.name: t(outcome) for t in (*self.parts, *self.hints)}

    def range(self, backend: str) -> tuple[float, float]:
        """Return the smallest and largest reward on a backend.

        Args:
            backend: ``cpu`` or ``cuda``.

        Returns:
            (low, high). A wrong kernel may lose all that shaping terms are worth.
        """
        parts = [t for t in self.parts if backend in t.backends]
        low = -sum(self.shaping.values()) + sum(min(self.weights[t.name] * t.low, self.weights[t.name] * t.high) for t in parts)
        return low, sum(max(self.weights[t.name] * t.low, self.weights[t.name] * t.high) for t in parts)


def load_term(name: str) -> Term:
    """Load the term declared in ``rewards/<name>.py``.

    Args:
        name: the file's and the function's name.

    Returns:
        The term.

    Raises:
        UnknownName: no such term.
    """
    known = [p.stem for p in _HERE.glob("*.py") if not p.stem.startswith("_") and p.stem not in _NO_TERMS]
    if name not in known:
        raise UnknownName("reward term", name, known)
    found: Term = getattr(importlib.import_module(f"kbx_env.rewards.{name}"), name)
    return found


def presets() -> tuple[str, ...]:
    """List the names of the presets, sorted."""
    return tuple(sorted(p.stem for p in (_HERE / "presets").glob("*.py") if not p.stem.startswith("_")))


def load_preset(name: str) -> Reward:
    """Load the preset declared in ``rewards/presets/<name>.py``.

    Args:
        name: the file's name.

    Returns:
        The reward, with its terms and shaping terms loaded.

    Raises:
        UnknownName: no such preset; names the nearest ones.
    """
    if name not in presets():
        raise UnknownName("reward preset", name, presets())
    preset = importlib.import_module(f"kbx_env.rewards.presets.{name}")
    weights: Mapping[str, float] = preset.WEIGHTS
    shaping: Mapping[str, float] = getattr(preset, "SHAPING", {})
    return Reward(
        name, weights, tuple(map(load_term, weights)), getattr(preset, "ESTIMATE", None), shaping,
        tuple(map(load_term, shaping)), getattr(preset, "COMPILED", False),
    )  # fmt: skip
