"""Composes terms into a reward. A preset is a file in ``rewards/presets`` that names terms and weights.

``load_preset`` is the only place that looks presets up. It also takes ``python:module:attribute``, a preset of the
user's own.
"""

from __future__ import annotations

import importlib
import math
import os
import pathlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kbx_env.rewards._term import Term

from kbx_env.errors import UnknownName, UsageError
from kbx_env.outcome import Outcome

_HERE = pathlib.Path(__file__).parent
_NO_TERMS = ("compose", "shaping")
OUTSIDE = "python:"
"""Begins the name of a preset that is no file of ``rewards/presets``: ``python:module:attribute``."""


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
    """Load a preset: a file ``rewards/presets/<name>.py``, or one of the user's own.

    Args:
        name: the file's name, or ``python:module:attribute``. The module is on the path or in the working directory.
            The attribute is a ``Reward``, or a mapping, class or module with ``WEIGHTS`` and, if wanted, ``SHAPING``,
            ``ESTIMATE`` and ``COMPILED``, as the files have them. Keys are names of terms of this package; ``TERMS`` is a
            sequence of further ``Term`` objects.

    Returns:
        The reward, with its terms and shaping terms loaded. Its ``name`` is the argument.

    Raises:
        UnknownName: no such preset or term; names the nearest ones.
        UsageError: the module cannot be imported, or the attribute declares no preset.
    """
    if name.startswith(OUTSIDE):
        return _outside(name)
    if name not in presets():
        raise UnknownName("reward preset", name, (*presets(), f"{OUTSIDE}module:attribute"))
    return _composed(name, vars(importlib.import_module(f"kbx_env.rewards.presets.{name}")))


def _outside(name: str) -> Reward:
    """Load a preset of the user's own."""
    module, _, attribute = name.removeprefix(OUTSIDE).partition(":")
    if not module or not attribute:
        raise UsageError(f"reward {name!r}: expected python:module:attribute, such as python:my_rewards:preset")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # Python puts a script's folder on the path, not the working directory
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as e:  # the user's own module may fail in any way
        raise UsageError(f"reward {name!r}: {type(e).__name__}: {e}; expected python:module:attribute") from e
    if isinstance(found, Reward):
        return found
    declared = found if isinstance(found, Mapping) else dict(getattr(found, "__dict__", {}))
    if not isinstance(declared.get("WEIGHTS"), Mapping):
        raise UsageError(f"reward {name!r} is no preset; it must be a Reward, or have WEIGHTS, a dict of terms and weights")
    return _composed(name, declared)


def _composed(name: str, declared: Mapping[str, Any]) -> Reward:
    """Compose a preset from its declarations."""
    weights: Mapping[str, float] = declared["WEIGHTS"]
    shaping: Mapping[str, float] = declared.get("SHAPING", {})
    own = {t.name: t for t in declared.get("TERMS", ())}
    for key, weight in (*weights.items(), *shaping.items()):
        if not isinstance(weight, int | float) or not math.isfinite(weight):
            raise UsageError(f"reward {name!r}: the weight of {key!r} is {weight!r}; a finite number")
    for key, weight in shaping.items():
        if weight < 0:
            raise UsageError(f"reward {name!r}: the weight of {key!r} in SHAPING is {weight!r}; 0 or more")
    estimate = declared.get("ESTIMATE")
    if estimate is not None:
        from kbx_env.backends import cost

        cost.load(estimate)  # an unknown GPU is refused here, not by the first grading

    def terms(keys: Mapping[str, float]) -> tuple[Term, ...]:
        return tuple(own[key] if key in own else load_term(key) for key in keys)

    compiled = bool(declared.get("COMPILED", False))
    return Reward(name, weights, terms(weights), estimate, shaping, terms(shaping), compiled)
