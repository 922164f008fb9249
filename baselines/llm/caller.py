"""Asks a model on behalf of policies: retries with back-off, limits, budgets, and a record of every call."""

from __future__ import annotations

import collections
import hashlib
import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kbx_env.baselines.llm.chat import Ask, CallFailed, Reply, Server
from kbx_env.baselines.llm.ledger import Ledger
from kbx_env.baselines.llm.log import Place, Spent, key_of, spent_on

from kbx_env.errors import ModelError, UsageError
from kbx_env.grading.runtime.policy_script import ScriptResult

if TYPE_CHECKING:
    from tenacity import RetryCallState


@dataclass(frozen=True)
class Limits:
    """How hard a server is asked."""

    concurrency: int = 8
    """Calls at a time."""
    attempts: int = 6
    """Of one call, before the server is said to have failed."""
    patience: float = 2.0
    """Seconds before the second attempt; doubled for each further one, at most 60, half of it random."""
    per_minute: int | None = None
    """Attempts a minute; ``None``: no limit."""


class Caller:
    """One model for all threads of a run."""

    def __init__(
        self, server: Server, limits: Limits | None = None, ledger: Ledger | None = None, secrets: Sequence[str] = (), seed: int = 0
    ) -> None:
        """A caller.

        Args:
            server: answers.
            limits: see `Limits`.
            ledger: records the calls and holds the budget; one of its own if not given.
            secrets: texts that never reach the record, such as the key.
            seed: decides the seed of every call, which servers that sample by seed follow.
        """
        self.server, self.limits, self.ledger, self.seed = server, limits or Limits(), ledger or Ledger(), seed
        self._secrets = [s for s in secrets if s]
        self._turn = threading.Condition()
        self._room = threading.Semaphore(self.limits.concurrency)
        self._stopped = threading.Event()
        self._not_before = 0.0
        self._began: collections.deque[float] = collections.deque()

    @property
    def model(self) -> str:
        """The model's name."""
        return self.server.model

    def talk(self, policy: str, task: str, sample: int) -> Talk:
        """Calls on behalf of one answer to one task."""
        return Talk(self, policy, task, sample)

    def stop(self) -> None:
        """No further attempt begins; those that wait fail at once."""
        self._stopped.set()
        with self._turn:
            self._turn.notify_all()

    def close(self) -> None:
        """Stop, and let go of the server."""
        self.stop()
        self.server.close()

    def ask(self, place: Place, ask: Ask) -> Reply:
        """The answer: the recorded one, else the server's.

        Raises:
            BudgetSpent: asking would exceed a budget.
            ModelError: the server failed in every attempt.
            UsageError: no request can succeed: a wrong key, model or address.
        """
        key = key_of(place, self.model, ask)
        known = self.ledger.log.find(key)
        if known is None:
            with self._room:
                known = self._fresh(key, place, ask)
        self.ledger.count(place, spent_on(known))
        return known

    def submit(self, place: Place, ask: Ask) -> Future[Reply]:
        """``ask`` in a thread of its own, which does not keep an interrupted program from ending."""
        future: Future[Reply] = Future()

        def work() -> None:
            try:
                future.set_result(self.ask(place, ask))
            except BaseException as e:
                future.set_exception(e)

        threading.Thread(target=work, name=f"call {place.label}", daemon=True).start()
        return future

    def _fresh(self, key: str, place: Place, ask: Ask) -> Reply:
        self.ledger.begin()
        try:
            reply, attempts = self._persist(place, ask)
            return self.ledger.keep_reply(key, place, self.model, ask, reply, attempts)
        finally:
            self.ledger.end()

    def _persist(self, place: Place, ask: Ask) -> tuple[Reply, int]:
        number = 0

        def attempt() -> Reply:
            nonlocal number
            self._wait()
            number += 1
            start = time.monotonic()
            try:
                return self.server.complete(ask)
            except CallFailed as e:
                self.ledger.log.fail(place, number, e, self._clean(e.text), time.monotonic() - start)
                if e.kind in ("rate_limit", "overloaded"):
                    self._pause(e.after or self.limits.patience)
                raise

        import tenacity

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.limits.attempts),
            wait=self._back_off,
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, CallFailed) and e.again and not self._stopped.is_set()),
            sleep=lambda seconds: None if self._stopped.wait(seconds) else None,
            reraise=True,
        )
        try:
            return retrying(attempt), number
        except CallFailed as e:
            text = f"the model's server failed ({place.label}): {e.kind}: {self._clean(e.text)}"[:1000]
            if e.hopeless:
                raise UsageError(f"{text}; check --model {self.model!r}, --base-url and the key") from e
            raise ModelError(f"{text}; {number} {'attempt' if number == 1 else 'attempts'}") from e

    def _back_off(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, CallFailed) and error.after is not None:
            return error.after
        full = min(60.0, self.limits.patience * 2 ** (state.attempt_number - 1))
        return full * random.uniform(0.5, 1.0)

    def _pause(self, seconds: float) -> None:
        """A server that asks one thread for patience means all of them."""
        with self._turn:
            self._not_before = max(self._not_before, time.monotonic() + seconds)

    def _wait(self) -> None:
        """Until an attempt may begin."""
        most = self.limits.per_minute
        with self._turn:
            while not self._stopped.is_set():
                now = time.monotonic()
                while self._began and self._began[0] <= now - 60:
                    self._began.popleft()
                until = self._not_before
                if most is not None and len(self._began) >= most:
                    until = max(until, self._began[0] + 60)
                if until <= now:
                    if most is not None:
                        self._began.append(now)
                    return
                self._turn.wait(until - now)
        raise CallFailed("stopped", "the run was stopped", again=False)

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


@dataclass(frozen=True)
class Talk:
    """The calls of one answer to one task; labels within it must differ."""

    caller: Caller
    policy: str
    task: str
    sample: int

    def _seeded(self, label: str, ask: Ask) -> tuple[Place, Ask]:
        # Not hash(): it differs between processes. Two samples, or two slots of one round, must not draw alike.
        seed = random.Random(f"{self.caller.seed}/{self.task}/{self.sample}/{label}").getrandbits(31)
        return Place(self.policy, self.task, self.sample, label), replace(ask, seed=seed)

    def ask(self, label: str, ask: Ask) -> Reply:
        """One answer; raises as `Caller.ask`."""
        return self.caller.ask(*self._seeded(label, ask))

    def ask_all(self, asks: Sequence[tuple[str, Ask]]) -> list[Reply]:
        """Some answers at once, in order. When one fails, the others are waited for and kept before its error is raised."""
        jobs = [self.caller.submit(*self._seeded(label, ask)) for label, ask in asks]
        errors = [e for j in jobs if (e := j.exception()) is not None]
        if errors:
            raise errors[0]
        return [j.result() for j in jobs]

    def script(self, label: str, files: Mapping[str, str], run: Callable[[], ScriptResult]) -> ScriptResult:
        """How a script of the policy's own ended: as recorded, else by running it."""
        place = Place(self.policy, self.task, self.sample, label)
        text = json.dumps([self.policy, self.task, self.sample, label, dict(files)], sort_keys=True)
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        ledger = self.caller.ledger
        known = ledger.log.find_script(key)
        if known is None:
            known = run()
            ledger.log.keep_script(key, place, files, known)
        ledger.count(place, Spent(scripts=1))
        return known

    @property
    def spent(self) -> Spent:
        """What was spent on this answer so far."""
        return self.caller.ledger.spent_on(self.policy, self.task, self.sample)
