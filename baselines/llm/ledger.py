"""What a run has spent on models, what it may spend, and the record of its calls: shared by all its policies."""

from __future__ import annotations

import collections
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from kbx_env.baselines.llm.chat import Ask, Reply
from kbx_env.baselines.llm.log import CallLog, Place, Spent, spent_on

from kbx_env.errors import BudgetSpent, UsageError


@dataclass(frozen=True)
class Budget:
    """``None``: no limit.

    Counts what the run's folder has spent in all, earlier runs that were resumed included. Calls are counted before they
    are made; tokens and dollars are known afterwards, so that calls under way may exceed those.
    """

    calls: int | None = None
    tokens: int | None = None
    """Prompts and completions together."""
    dollars: float | None = None
    prices: tuple[float, float] | None = None
    """Dollars for a million prompt and completion tokens, for servers that do not tell the cost of a call."""


class Ledger:
    """Threads may share it."""

    def __init__(self, budget: Budget | None = None) -> None:
        """A ledger whose record lives as long as this process; see ``keep``."""
        self.budget = budget or Budget()
        self.log = CallLog(":memory:")
        self._lock = threading.Lock()
        self._spent, self._flying = Spent(), 0
        self._of: dict[tuple[str, str, int], Spent] = collections.defaultdict(Spent)

    def keep(self, path: Path) -> None:
        """Record in a file from now on, and answer from it what it holds already."""
        log = CallLog(path)
        self.log.close()
        self.log, self._spent = log, log.total()

    def close(self) -> None:
        """Close the record."""
        self.log.close()

    @property
    def spent(self) -> Spent:
        """All calls of the record."""
        with self._lock:
            return self._spent

    def spent_on(self, policy: str, task: str, sample: int) -> Spent:
        """What one answer has taken, calls that were answered from the record included."""
        with self._lock:
            return self._of[policy, task, sample]

    def begin(self) -> None:
        """Before a call; ``end`` must follow.

        Raises:
            BudgetSpent: there is nothing left for it.
        """
        with self._lock:
            most, now = self.budget, self._spent
            for name, limit, used in (
                ("calls", most.calls, now.calls + self._flying), ("tokens", most.tokens, now.tokens),
                ("dollars", most.dollars, now.dollars or 0.0),
            ):  # fmt: skip
                if limit is not None and used >= limit:
                    raise BudgetSpent(f"not asked: the budget of {limit:g} {name} is spent; raise --budget-{name} and --resume")
            self._flying += 1

    def end(self) -> None:
        """After a call, whatever became of it."""
        with self._lock:
            self._flying -= 1

    def keep_reply(self, key: str, place: Place, model: str, ask: Ask, reply: Reply, attempts: int) -> Reply:
        """Record an answer; returns it with its cost.

        Raises:
            UsageError: a budget is set in something of which this server tells nothing.
        """
        if reply.dollars is None and self.budget.prices and None not in (reply.prompt_tokens, reply.completion_tokens):
            into, out = self.budget.prices
            cost = ((reply.prompt_tokens or 0) * into + (reply.completion_tokens or 0) * out) / 1e6
            reply = replace(reply, dollars=cost)
        self.log.keep(key, place, model, ask, reply, attempts)
        with self._lock:
            self._spent += spent_on(reply)
        if self.budget.tokens is not None and None in (reply.prompt_tokens, reply.completion_tokens):
            raise UsageError("--budget-tokens cannot be held: this server does not tell its tokens; use --budget-calls")
        if self.budget.dollars is not None and reply.dollars is None:
            raise UsageError("--budget-dollars cannot be held: this server tells no cost; add --prices IN,OUT")
        return reply

    def count(self, place: Place, spent: Spent) -> None:
        """Book what something took, done now or long recorded, on who asked for it."""
        with self._lock:
            self._of[place.policy, place.task, place.sample] += spent
