"""Accounts for the calls of a run: the usage so far, the budget, and the record of calls. All its policies share it."""

from __future__ import annotations

import collections
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from kbx_env.baselines.llm.chat import ChatRequest, Reply
from kbx_env.baselines.llm.log import CallId, CallLog, Usage, usage_of

from kbx_env.errors import BudgetSpent, UsageError


@dataclass(frozen=True)
class Budget:
    """Limits on the usage of a run; ``None`` for no limit.

    The usage of the whole run folder counts, with that of earlier runs that were resumed. Calls are counted before they
    are made. Tokens and dollars are known afterwards, so calls under way may exceed those limits.
    """

    calls: int | None = None
    tokens: int | None = None
    """Of prompts and completions together."""
    dollars: float | None = None
    prices: tuple[float, float] | None = None
    """Dollars for a million prompt tokens and a million completion tokens, for servers that do not report a cost."""


class Ledger:
    """Accounts for calls. Several threads may use one ledger."""

    def __init__(self, budget: Budget | None = None) -> None:
        """Begin with a record in memory; ``keep`` moves to a file.

        Args:
            budget: by default no limits.
        """
        self.budget = budget or Budget()
        self.log = CallLog(":memory:")
        self._lock = threading.Lock()
        self._spent, self._under_way = Usage(), 0
        self._by_answer: dict[tuple[str, str, int], Usage] = collections.defaultdict(Usage)

    def keep(self, path: Path) -> None:
        """Record calls in a file from now on, and answer calls that it already holds from it."""
        log = CallLog(path)
        self.log.close()
        self.log, self._spent = log, log.total()

    def close(self) -> None:
        """Close the record."""
        self.log.close()

    @property
    def spent(self) -> Usage:
        """Usage of all calls in the record."""
        with self._lock:
            return self._spent

    def usage_of(self, policy: str, task: str, sample: int) -> Usage:
        """Return the usage of one answer, with calls that were answered from the record.

        Args:
            policy: name of the policy.
            task: id of the task.
            sample: number of the answer, from 0.

        Returns:
            The sum over the answer's calls and scripts so far.
        """
        with self._lock:
            return self._by_answer[policy, task, sample]

    def begin(self) -> None:
        """Count a call that is about to be made; ``end`` must follow.

        Raises:
            BudgetSpent: the budget is used up.
        """
        with self._lock:
            most, now = self.budget, self._spent
            for name, limit, used in (
                ("calls", most.calls, now.calls + self._under_way), ("tokens", most.tokens, now.tokens),
                ("dollars", most.dollars, now.dollars or 0.0),
            ):  # fmt: skip
                if limit is not None and used >= limit:
                    spent = f"the budget of {limit:g} {name} is spent"
                    raise BudgetSpent(f"not asked: {spent}; raise --budget-{name} and --resume")
            self._under_way += 1

    def end(self) -> None:
        """Count a call as made, whether it failed or not."""
        with self._lock:
            self._under_way -= 1

    def keep_reply(
        self, key: str, call: CallId, model: str, request: ChatRequest, reply: Reply, attempts: int
    ) -> Reply:
        """Record a reply.

        Args:
            key: of the record (``log.key_of``).
            call: identifies the call within the run.
            model: name of the model that was asked.
            request: the request.
            reply: the reply.
            attempts: number of attempts, the successful one included.

        Returns:
            The reply, with its cost in dollars where the budget has prices.

        Raises:
            UsageError: the budget limits tokens or dollars, and the server does not report them.
        """
        if reply.dollars is None and self.budget.prices and None not in (reply.prompt_tokens, reply.completion_tokens):
            input_price, output_price = self.budget.prices
            cost = (reply.prompt_tokens or 0) * input_price + (reply.completion_tokens or 0) * output_price
            reply = replace(reply, dollars=cost / 1e6)
        self.log.keep(key, call, model, request, reply, attempts)
        with self._lock:
            self._spent += usage_of(reply)
        if self.budget.tokens is not None and None in (reply.prompt_tokens, reply.completion_tokens):
            raise UsageError("--budget-tokens cannot be held: this server reports no tokens; use --budget-calls")
        if self.budget.dollars is not None and reply.dollars is None:
            raise UsageError("--budget-dollars cannot be held: this server reports no cost; add --prices IN,OUT")
        return reply

    def count(self, call: CallId, usage: Usage) -> None:
        """Add a usage to that of the answer to which a call belongs.

        Args:
            call: the call; its label does not matter.
            usage: of a call that was just made, or that was answered from the record.
        """
        with self._lock:
            self._by_answer[call.policy, call.task, call.sample] += usage
