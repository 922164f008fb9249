"""The policy ``geak`` (AMD's GEAK): three rounds of four candidates.

In every round the model generates candidates and evaluates them itself, the grader grades them, and the model reflects
on the verdicts; the next round repairs or optimises. The verdicts are feedback that the single-shot methods and
KernelAgent do not have. docs/methods.md lists the differences from the published code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kbx_env.baselines import _geak_prompts as prompts
from kbx_env.baselines.llm.access import Access
from kbx_env.baselines.llm.caller import CallSession
from kbx_env.baselines.llm.chat import ChatRequest, Reply
from kbx_env.baselines.llm.extract import kernel_in, object_in
from kbx_env.baselines.llm.method import Method, Sampling
from kbx_env.baselines.llm.retrieve import nearest
from kbx_env.baselines.policy import Needs

from kbx_env.envs.episode import Episode, Trajectory
from kbx_env.errors import NoAnswer
from kbx_env.outcome import Outcome, Verdict
from kbx_env.spec.catalog import expert_source
from kbx_env.spec.task import Task

NAME = "geak"
SAMPLING = Sampling(max_tokens=16000, temperature=1.0)
ROUNDS, SLOTS = 3, 4
"""Rounds, and candidates in each."""
POOL = 5
"""Most correct kernels that the prompts of later rounds show."""
HISTORY = 5
"""Most failed attempts that a slot keeps."""
DEBUGS = 5
"""Most rounds of repair in a row; then a round begins without the failed attempts."""


@dataclass
class Attempt:
    """One candidate.

    Attributes:
        code: the source.
        score: the model's own evaluation, the sum of nine numbers from 0 to 1.
        outcome: of its grading; ``None`` before it.
        result: the verdict as text.
        reflection: the model's analysis of the result.
    """

    code: str
    score: float = 0.0
    outcome: Outcome | None = None
    result: str = ""
    reflection: str = ""

    @property
    def correct(self) -> bool:
        """Whether the grader found it correct."""
        return self.outcome is not None and self.outcome.correct

    @property
    def runs(self) -> bool:
        """Whether it compiled and ran without an error."""
        return self.outcome is not None and self.outcome.verdict in (Verdict.CORRECT, Verdict.INCORRECT)

    @property
    def worth(self) -> tuple[float, float, float]:
        """Key that orders correct kernels, larger is better.

        Returns:
            The speedup over eager; the estimated share of the roofline; the share of the needed bytes in the moved
            bytes. An unknown number counts as 0. On the CPU backend there is no speedup, and an estimate only where the
            run asks for it.
        """
        outcome = self.outcome
        if outcome is None:
            return (0.0, 0.0, 0.0)
        e, estimate = outcome.evidence, outcome.estimate
        needed_share = e.ideal_bytes / e.moved_bytes if e and e.ideal_bytes and e.moved_bytes else 0.0
        return (outcome.speedup or 0.0, estimate.estimated_share if estimate else 0.0, needed_share)


@dataclass
class Memory:
    """The state of the search on one task.

    Attributes:
        slots: the latest candidate of each slot.
        histories: failed attempts of each slot, those with the best score first.
        pool: correct attempts, the best first.
        last_correct: the latest correct attempt.
        last_running: the latest attempt that ran without an error.
        debugs: rounds of repair in a row so far.
    """

    slots: list[Attempt | None] = field(default_factory=lambda: [None] * SLOTS)
    histories: list[list[Attempt]] = field(default_factory=lambda: [[] for _ in range(SLOTS)])
    pool: list[Attempt] = field(default_factory=list)
    last_correct: Attempt | None = None
    last_running: Attempt | None = None
    debugs: int = 0

    def best(self) -> Attempt | None:
        """Return the attempt that would be handed in now; ``None`` if there is none."""
        candidates = (*self.pool[:1], self.last_correct, self.last_running, *self.slots)
        return next((a for a in candidates if a is not None), None)


class Geak(Method):
    """Generates, evaluates, submits and reflects in rounds, and hands in the best kernel."""

    needs = Needs(grader_feedback=True)

    def run(self, task: Task, env: Episode) -> Trajectory:
        """Solve a task in three rounds, with at most 36 calls and 12 gradings.

        Args:
            task: the task.
            env: grades sources.

        Returns:
            The best kernel.
        """
        session = self.caller.session(self.name, task.id, env.sample)
        memory, modes = Memory(), []
        for number in range(ROUNDS):
            debug = number > 0 and not any(a and a.correct for a in memory.slots) and memory.debugs < DEBUGS
            memory.debugs = memory.debugs + 1 if debug else 0
            modes.append("debug" if debug else "fresh")
            self._generate(session, task, env, memory, number, debug)
            self._evaluate(session, env, memory, number)
            self._grade(env, memory, number)
            self._reflect(session, env, memory, number)
        best = memory.best()
        reason = "" if best else "none of the answers held code"
        return Trajectory(best.code if best else None, reason, tuple(env.turns), {"modes": modes})

    def _request(self, text: str) -> ChatRequest:
        return self.sampling.request(({"role": "user", "content": text},))

    def _generate(
        self, session: CallSession, task: Task, env: Episode, memory: Memory, number: int, debug: bool
    ) -> None:
        requests = []
        for slot, context in enumerate(self._contexts(task, env, memory, debug)):
            text = prompts.generate(env.prompt, task.entry, str(task.signature), context)
            requests.append((f"round {number}, slot {slot}, generate", self._request(text)))
        for slot, reply in enumerate(session.ask_all(requests)):
            code = code_in(reply, task.entry)
            if code is not None:
                memory.slots[slot] = Attempt(code)
            elif not debug:
                memory.slots[slot] = None  # in a round of repair the slot keeps its candidate

    def _contexts(self, task: Task, env: Episode, memory: Memory, debug: bool) -> Sequence[str]:
        """Return the part of the prompt that differs between slots: an example, failed attempts, or kernels to beat."""
        if not debug and memory.pool:
            return [prompts.attempts([(a.code, a.result, a.reflection) for a in memory.pool], failed=False)] * SLOTS
        first = memory.slots[0]
        if debug and first:
            near = nearest(first.code, by="code", without=task.id)
        else:
            near = nearest(env.prompt, by="text", without=task.id)
        example = prompts.example(near, expert_source(near) or "") if near else ""
        if not debug:
            return [example] * SLOTS
        kept = [[(a.code, a.result, a.reflection) for a in h] for h in memory.histories]
        return [example + (prompts.attempts(rows, failed=True) if rows else "") for rows in kept]

    def _evaluate(self, session: CallSession, env: Episode, memory: Memory, number: int) -> None:
        ungraded = self._ungraded(memory)
        requests = [
            (f"round {number}, slot {slot}, evaluate", self._request(prompts.evaluate(env.prompt, a.code)))
            for slot, a in ungraded
        ]
        for (_, attempt), reply in zip(ungraded, session.ask_all(requests), strict=True):
            marks = object_in(reply.text) or {}
            numbers = [marks.get(name) for name in prompts.CRITERIA]
            attempt.score = sum(min(1.0, max(0.0, float(n))) for n in numbers if isinstance(n, int | float))

    @staticmethod
    def _ungraded(memory: Memory) -> list[tuple[int, Attempt]]:
        return [(slot, a) for slot, a in enumerate(memory.slots) if a is not None and a.outcome is None]

    def _grade(self, env: Episode, memory: Memory, number: int) -> None:
        ungraded = self._ungraded(memory)
        labels = [f"round {number}, slot {slot}" for slot, _ in ungraded]
        outcomes = env.grade([a.code for _, a in ungraded], round=number, labels=labels)
        for (_, attempt), outcome in zip(ungraded, outcomes, strict=True):
            attempt.outcome, attempt.result = outcome, env.feedback(outcome)

    def _reflect(self, session: CallSession, env: Episode, memory: Memory, number: int) -> None:
        graded = [(slot, a) for slot, a in enumerate(memory.slots) if a is not None and not a.reflection]
        requests = []
        for slot, attempt in graded:
            text = prompts.reflect(env.prompt, attempt.code, attempt.result, correct=attempt.correct)
            requests.append((f"round {number}, slot {slot}, reflect", self._request(text)))
        for (slot, attempt), reply in zip(graded, session.ask_all(requests), strict=True):
            attempt.reflection = reply.text.strip()
            if attempt.runs:
                memory.last_running = attempt
            if attempt.correct:
                memory.last_correct = attempt
                memory.pool = sorted([*memory.pool, attempt], key=lambda a: a.worth, reverse=True)[:POOL]
                memory.histories[slot] = []
            else:
                history = sorted([*memory.histories[slot], attempt], key=lambda a: a.score, reverse=True)
                memory.histories[slot] = history[:HISTORY]


def code_in(reply: Reply, entry: str) -> str | None:
    """Return the code of an answer.

    Args:
        reply: JSON ``{"strategy", "code"}``, or an answer with a fenced block where the JSON is invalid.
        entry: name of the entry function.

    Returns:
        The source; ``None`` if there is none.
    """
    found = object_in(reply.text)
    code = found.get("code") if found else None
    try:
        text = code if isinstance(code, str) and code.strip() else reply.text
        return kernel_in(Reply(text, reply.finish), entry)
    except NoAnswer:
        return None


def build(argument: str | None, access: Access) -> Geak:
    """Make the policy.

    Args:
        argument: the model's name, in place of ``access.model``.
        access: how to reach the model.

    Returns:
        The policy.
    """
    return Geak(NAME, access, argument, SAMPLING)
