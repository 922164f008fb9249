"""Potential-based shaping (Ng, Harada and Russell, 1999): F = gamma * Phi(s') - Phi(s) leaves every optimal policy optimal.

The state is the last graded outcome; Phi is a preset's ``SHAPING`` terms, weighted (``Reward.potential``). Phi is 0 before
the first submission and, by convention, in the state after the last one (Grzes, 2017): the last step takes back what the steps
before were given, so that the discounted sum over an episode, gamma^T Phi_T - Phi_0, is 0, whatever was submitted.

One submission is one step from Phi = 0 to Phi = 0: there shaping of this kind is nothing. That is why ``Reward`` itself pays the
terms to wrong kernels only, bounded below every right one.
"""

from __future__ import annotations

from collections.abc import Iterable


class Shaping:
    """The shaping of one episode, step by step."""

    def __init__(self, gamma: float = 1.0) -> None:
        """An episode before its first submission.

        Args:
            gamma: the discount that the learner uses; with another one the sum does not telescope.
        """
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma is {gamma}; a discount lies in [0, 1]")
        self.gamma, self.last = gamma, 0.0

    def step(self, potential: float | None, over: bool) -> float | None:
        """The shaping of one submission.

        Args:
            potential: of its outcome; ``None`` for a masked one, which is no step: ``None``, and the state stays.
            over: whether the episode ends with it.
        """
        if potential is None:
            return None
        now = 0.0 if over else potential
        found, self.last = self.gamma * now - self.last, now
        return found


def shaped(potentials: Iterable[float | None], gamma: float = 1.0) -> list[float | None]:
    """The shaping of every submission of a finished episode, in order; what ends it is the last unmasked one."""
    rows = list(potentials)
    last = max((i for i, p in enumerate(rows) if p is not None), default=-1)
    episode = Shaping(gamma)
    return [episode.step(p, i == last) for i, p in enumerate(rows)]
