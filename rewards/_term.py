"""A reward term: a function from an Outcome to a number, or ``None`` where it cannot be known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kbx_env.outcome import Outcome

TermFunction = Callable[[Outcome], float | None]


@dataclass(frozen=True)
class Term:
    """A named term with its range [``low``, ``high``]; ``pays`` is the first line of the function's docstring."""

    name: str
    low: float
    high: float
    pays: str
    function: TermFunction
    backends: tuple[str, ...] = ("cpu", "cuda")
    """Backends on which the term can be known."""

    def __call__(self, outcome: Outcome) -> float | None:
        value = self.function(outcome)
        if value is not None and not self.low <= value <= self.high:
            raise ValueError(f"term {self.name} gave {value}, outside its range [{self.low}, {self.high}]")
        return value


def term(low: float, high: float, backends: tuple[str, ...] = ("cpu", "cuda")) -> Callable[[TermFunction], Term]:
    """Declare a reward term. It is named after the decorated function, and ``pays`` is the first line of its docstring.

    Args:
        low: smallest value of the term; a smaller result raises ``ValueError``.
        high: largest value of the term; a larger result raises ``ValueError``.
        backends: backends on which the term can be known.

    Returns:
        A decorator from the function to the term.
    """

    def declare(function: TermFunction) -> Term:
        pays = (function.__doc__ or "").strip().splitlines()[0]
        return Term(function.__name__, low, high, pays, function, backends)

    return declare
