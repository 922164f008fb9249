"""Potential-based shaping (Ng, Harada, Russell 1999): F = gamma * Phi(s') - Phi(s) keeps optimal policies optimal.

The state is the last graded outcome; Phi is a preset's ``SHAPING`` terms, weighted (``Reward.potential``). Phi is 0
before the first submission and, by convention, in the state after the last one (Grzes, 2017): the last step takes back
the shaping of the steps before it, so that the discounted sum over an episode, gamma^T Phi_T - Phi_0, is 0 for every
sequence of submissions.

An episode of one submission is one step from Phi = 0 to Phi = 0, so its shaping is 0. That is why ``Reward`` itself
pays the terms to wrong kernels only, and less than the difference to any right kernel.
"""

from __future__ import annotations

from collections.abc import Iterable


class Shaping:
    """Computes the shaping of one episode, step by step."""

    def __init__(self, gamma: float = 1.0) -> None:
        """Begin an episode, before its first submission.

        Args:
            gamma: the discount that the learner uses; with another one the sum does not telescope.

        Raises:
            ValueError: gamma is outside [0, 1].
        """
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma is {gamma}; a discount lies in [0, 1]")
        self.gamma, self.last = gamma, 0.0

    def step(self, potential: float | None, over: bool) -> float | None:
        """Return the shaping of the next submission.

        Args:
            potential: Phi of the submission's outcome; ``None`` for a masked outcome, which is no step and keeps the
                state.
            over: whether the episode ends with this submission.

        Returns:
            gamma * Phi(s') - Phi(s), where Phi(s') is 0 if the episode ends; ``None`` for a masked outcome.
        """
        if potential is None:
            return None
        now = 0.0 if over else potential
        difference, self.last = self.gamma * now - self.last, now
        return difference


def shaped(potentials: Iterable[float | None], gamma: float = 1.0) -> list[float | None]:
    """Return the shaping of every submission of a finished episode, in order.

    Args:
        potentials: Phi of each submission's outcome, in order; ``None`` for a masked outcome.
        gamma: the discount that the learner uses, in [0, 1].

    Returns:
        One number per submission, ``None`` where it was masked. The last unmasked submission counts as the end of the
        episode.
    """
    rows = list(potentials)
    last = max((i for i, p in enumerate(rows) if p is not None), default=-1)
    episode = Shaping(gamma)
    return [episode.step(p, i == last) for i, p in enumerate(rows)]
