"""What a reward term is: a function from an Outcome to a number, or ``None`` where it cannot be known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kbx_env.outcome import Outcome

TermFunction = Callable[[Outcome], float | None]


@dataclass(frozen=True)
class Term:
    """A named term with its range; ``pays`` says in one line what it pays for."""

    name: str
    low: float
    high: float
    pays: str
    function: TermFunction
    backends: tuple[str, ...] = ("cpu", "cuda")
    """Where it can be known."""

    def __call__(self, outcome: Outcome) -> float | None:
        value = self.function(outcome)
        if value is not None and not self.low <= value <= self.high:
            raise ValueError(f"term {self.name} gave {value}, outside its range [{self.low}, {self.high}]")
        return value


def term(low: float, high: float, backends: tuple[str, ...] = ("cpu", "cuda")) -> Callable[[TermFunction], Term]:
    """Declare a reward term; its name is the function's, its first docstring line says what it pays for."""

    def declare(function: TermFunction) -> Term:
        pays = (function.__doc__ or "").strip().splitlines()[0]
        return Term(function.__name__, low, high, pays, function, backends)

    return declare
