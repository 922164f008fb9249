"""Calls a model for policies: a probe, retries with exponential back-off, rate limits, budgets, a record of every call."""

from __future__ import annotations

import collections
import hashlib
import json
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kbx_env.baselines.llm.chat import CallFailed, ChatRequest, Reply, Server
from kbx_env.baselines.llm.ledger import Ledger
from kbx_env.baselines.llm.log import CallId, Usage, key_of, usage_of

from kbx_env.errors import ModelError, UsageError
from kbx_env.grading.runtime.policy_script import ScriptResult

if TYPE_CHECKING:
    from tenacity import RetryCallState

LONGEST_BACK_OFF = 60.0
"""Seconds; most between two attempts, unless the server asks for more."""
REFUSED = 8
"""The run stops when so many calls have failed and none was answered."""
PROBE = "Reply with the word ready."
"""The probe's message."""
PROBE_TOKENS = 16
"""The most tokens of the answer to a probe."""
_ALIVE = ("rate_limit", "overloaded", "server_error", "timeout", "too_long")
"""Failures of a probe after which calls may succeed: the server is there, and refuses neither the key nor the model."""
_TOO_FEW = re.compile(r"max_(completion_|output_)?tokens|output limit", re.IGNORECASE)
"""In a refusal of a probe because of its low limit of tokens: models that think before they answer need more."""


@dataclass(frozen=True)
class Limits:
    """Limits on the load that a server gets."""

    concurrency: int = 8
    """Calls at a time."""
    attempts: int = 6
    """Attempts at one call, after which the call has failed."""
    patience: float = 2.0
    """Seconds before the second attempt; doubled for each further one, at most 60, half of it random."""
    per_minute: int | None = None
    """Attempts a minute; ``None`` for no limit."""


class Caller:
    """Calls one model, from all threads of a run."""

    def __init__(
        self, server: Server, limits: Limits | None = None, ledger: Ledger | None = None, secrets: Sequence[str] = (),
        seed: int = 0,
    ) -> None:  # fmt: skip
        """Begin without calls.

        Args:
            server: the model.
            limits: by default those of ``Limits``.
            ledger: records the calls and enforces the budget; by default a new one.
            secrets: texts, such as the key, that are replaced by ``***`` in errors and in the record.
            seed: from which the seed of every call is derived; only some servers use seeds.
        """
        self.server, self.limits, self.ledger, self.seed = server, limits or Limits(), ledger or Ledger(), seed
        self._secrets = [s for s in secrets if s]
        self._rate = threading.Condition()
        """Protects ``_not_before`` and ``_started``."""
        self._probe: ChatRequest | None = None
        """The probe that has not been made."""
        self._useless: str | None = None
        """Why no call can succeed, from the probe."""
        self._probing = threading.Lock()
        self._counts = threading.Lock()
        """Protects the next four."""
        self._spent, self._answered, self._failed = Usage(), 0, 0
        self._last_error: str | None = None
        self._concurrent = threading.Semaphore(self.limits.concurrency)
        self._stopped = threading.Event()
        self._not_before = 0.0
        """Time (``time.monotonic``) before which no attempt begins."""
        self._started: collections.deque[float] = collections.deque()
        """Times at which the attempts of the last minute began."""

    @property
    def model(self) -> str:
        """The model's name."""
        return self.server.model

    def expect(self, probe: ChatRequest) -> None:
        """Ask once before the first call that the record does not answer; does nothing for a model on this machine.

        Args:
            probe: the request; its limit of tokens is lowered. The answer belongs to no sum and to no record.
        """
        if getattr(self.server, "address", None) is not None:
            self._probe = replace(probe, max_tokens=min(probe.max_tokens, PROBE_TOKENS))

    def probe(self) -> None:
        """Ask once, if the probe that is expected has not been made; threads that call meanwhile wait.

        Raises:
            UsageError: no server answers, or it refuses the address, the key or the model. The message holds the answer.
        """
        with self._probing:
            probe, self._probe = self._probe, None
            try:
                if probe is not None:
                    self.server.complete(probe)
            except CallFailed as e:
                text = f"{e.kind}: {self._clean(e.text)}"
                self._tell(text)
                if e.kind not in _ALIVE and not (e.kind == "bad_request" and _TOO_FEW.search(e.text)):
                    where = getattr(self.server, "address", None)
                    said = f"the model's server at {where} failed a first request: {text}"[:1000]
                    self._useless = f"{said}; {self._remedy()}"
            if self._useless is not None:
                raise UsageError(self._useless)

    @property
    def lost(self) -> str | None:
        """The last error, where calls failed and none was answered by the server; else ``None``."""
        with self._counts:
            return self._last_error if self._failed and not self._answered else None

    def status(self) -> str:
        """Describe the calls so far in one line, those that the record answered included.

        Returns:
            Calls, tokens, dollars where they are known, and the last error.
        """
        with self._counts:
            spent, failed, error = self._spent, self._failed, self._last_error
        parts = [f"{spent.calls:,} calls", f"{spent.tokens:,} tokens"]
        parts += [f"${spent.dollars:,.2f}"] if spent.dollars is not None else []
        parts += [f"{failed:,} failed"] if failed else []
        return ", ".join(parts) + (f"; last error: {' '.join(error.split())[:120]}" if error else "")

    def session(self, policy: str, task: str, sample: int) -> CallSession:
        """Return a session for the calls of one answer to one task.

        Args:
            policy: name of the policy.
            task: id of the task.
            sample: number of the answer, from 0.

        Returns:
            The session.
        """
        return CallSession(self, policy, task, sample)

    def stop(self) -> None:
        """Begin no further attempt; attempts that wait fail at once."""
        self._stopped.set()
        with self._rate:
            self._rate.notify_all()

    def close(self) -> None:
        """Stop, and close the server's connections."""
        self.stop()
        self.server.close()

    def ask(self, call: CallId, request: ChatRequest) -> Reply:
        """Return the reply to a request: the recorded one, else that of the server.

        Args:
            call: identifies the call within the run.
            request: the request.

        Returns:
            The reply.

        Raises:
            BudgetSpent: the budget is used up.
            ModelError: the server failed in every attempt.
            UsageError: no request can succeed, because the key, the model or the address is wrong.
        """
        key = key_of(call, self.model, request)
        reply = self.ledger.log.find(key)
        if reply is None:
            with self._concurrent:
                reply = self._call(key, call, request)
        self.ledger.count(call, usage_of(reply))
        with self._counts:
            self._spent += usage_of(reply)
        return reply

    def submit(self, call: CallId, request: ChatRequest) -> Future[Reply]:
        """Ask in a daemon thread, which does not keep an interrupted program from ending.

        Args:
            call: identifies the call within the run.
            request: the request.

        Returns:
            The future reply, or the exception of ``ask``.
        """
        future: Future[Reply] = Future()

        def work() -> None:
            try:
                future.set_result(self.ask(call, request))
            except BaseException as e:
                future.set_exception(e)

        threading.Thread(target=work, name=f"call {call.label}", daemon=True).start()
        return future

    def _call(self, key: str, call: CallId, request: ChatRequest) -> Reply:
        self.ledger.begin()
        try:
            self.probe()
            reply, attempts = self._retried(call, request)
            return self.ledger.keep_reply(key, call, self.model, request, reply, attempts)
        finally:
            self.ledger.end()

    def _retried(self, call: CallId, request: ChatRequest) -> tuple[Reply, int]:
        """Return the reply and the number of attempts."""
        number = 0

        def attempt() -> Reply:
            nonlocal number
            self._wait()
            number += 1
            start = time.monotonic()
            try:
                return self.server.complete(request)
            except CallFailed as e:
                self.ledger.log.fail(call, number, e, self._clean(e.text), time.monotonic() - start)
                self._tell(f"{e.kind}: {self._clean(e.text)}")
                if e.kind in ("rate_limit", "overloaded"):
                    self._pause(e.retry_after or self.limits.patience)
                raise

        import tenacity

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.limits.attempts),
            wait=self._back_off,
            retry=tenacity.retry_if_exception(
                lambda e: isinstance(e, CallFailed) and e.retryable and not self._stopped.is_set()
            ),
            sleep=lambda seconds: None if self._stopped.wait(seconds) else None,
            reraise=True,
        )
        try:
            reply = retrying(attempt)
        except CallFailed as e:
            text = f"the model's server failed ({call.label}): {e.kind}: {self._clean(e.text)}"[:1000]
            if e.fatal:
                raise UsageError(f"{text}; {self._remedy()}") from e
            refused = self._count_failure() if not self._stopped.is_set() else 0
            if refused >= REFUSED:
                raise UsageError(f"the first {refused} calls all failed; {text}; {self._remedy()}, and --resume") from e
            raise ModelError(f"{text}; {number} {'attempt' if number == 1 else 'attempts'}") from e
        with self._counts:
            self._answered += 1
        return reply, number

    def _count_failure(self) -> int:
        """Count a call that failed in every attempt.

        Returns:
            The number of such calls; 0 if a call was answered.
        """
        with self._counts:
            self._failed += 1
            return 0 if self._answered else self._failed

    def _tell(self, error: str) -> None:
        with self._counts:
            self._last_error = error

    def _remedy(self) -> str:
        return f"check --model {self.model!r}, --base-url and the key"

    def _back_off(self, state: RetryCallState) -> float:
        """Return the seconds before the next attempt."""
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, CallFailed) and error.retry_after is not None:
            return error.retry_after
        longest = min(LONGEST_BACK_OFF, self.limits.patience * 2 ** (state.attempt_number - 1))
        return longest * random.uniform(0.5, 1.0)

    def _pause(self, seconds: float) -> None:
        """Begin no attempt for some seconds, in any thread: a server limits the rate of all threads together."""
        with self._rate:
            self._not_before = max(self._not_before, time.monotonic() + seconds)

    def _wait(self) -> None:
        """Wait until an attempt may begin."""
        most = self.limits.per_minute
        with self._rate:
            while not self._stopped.is_set():
                now = time.monotonic()
                while self._started and self._started[0] <= now - 60:
                    self._started.popleft()
                until = self._not_before
                if most is not None and len(self._started) >= most:
                    until = max(until, self._started[0] + 60)
                if until <= now:
                    if most is not None:
                        self._started.append(now)
                    return
                self._rate.wait(until - now)
        raise CallFailed("stopped", "the run was stopped", retryable=False)

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


@dataclass(frozen=True)
class CallSession:
    """The calls of one answer to one task. Their labels must be unique within the session.

    Attributes:
        caller: calls the model.
        policy: name of the policy.
        task: id of the task.
        sample: number of the answer, from 0.
    """

    caller: Caller
    policy: str
    task: str
    sample: int

    def _seeded(self, label: str, request: ChatRequest) -> tuple[CallId, ChatRequest]:
        # Every call has another seed, so that two samples, or two slots of one round, do not get the same answer.
        # hash() would differ between processes.
        seed = random.Random(f"{self.caller.seed}/{self.task}/{self.sample}/{label}").getrandbits(31)
        return CallId(self.policy, self.task, self.sample, label), replace(request, seed=seed)

    def ask(self, label: str, request: ChatRequest) -> Reply:
        """Ask once, with a seed derived from the session and the label.

        Args:
            label: names the call.
            request: the request; its seed is replaced.

        Returns:
            The reply.

        Raises:
            BudgetSpent: the budget is used up.
            ModelError: the server failed in every attempt.
            UsageError: no request can succeed.
        """
        return self.caller.ask(*self._seeded(label, request))

    def ask_all(self, requests: Sequence[tuple[str, ChatRequest]]) -> list[Reply]:
        """Make several calls at the same time.

        Args:
            requests: label and request of each call.

        Returns:
            The replies, in the order of the requests.

        Raises:
            BaseException: the first error of a call, as ``ask`` raises it; it is raised after all other calls have
                ended and been recorded.
        """
        futures = [self.caller.submit(*self._seeded(label, request)) for label, request in requests]
        errors = [e for f in futures if (e := f.exception()) is not None]
        if errors:
            raise errors[0]
        return [f.result() for f in futures]

    def script(self, label: str, files: Mapping[str, str], run: Callable[[], ScriptResult]) -> ScriptResult:
        """Return the result of a script of the policy: the recorded one, else by running the script.

        Args:
            label: names the run of the script.
            files: the script's files, text by name.
            run: runs the script.

        Returns:
            Its exit status and output.
        """
        call = CallId(self.policy, self.task, self.sample, label)
        text = json.dumps([self.policy, self.task, self.sample, label, dict(files)], sort_keys=True)
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        ledger = self.caller.ledger
        result = ledger.log.find_script(key)
        if result is None:
            result = run()
            ledger.log.keep_script(key, call, files, result)
        ledger.count(call, Usage(scripts=1))
        return result

    @property
    def spent(self) -> Usage:
        """Usage of this answer so far."""
        return self.caller.ledger.usage_of(self.policy, self.task, self.sample)
