"""GEAK (AMD), episodic: generate, judge oneself, be graded, reflect, repair or optimise; 3 rounds of 4 candidates.

It reads the grader's verdicts while it searches: an oracle that single-shot methods and KernelAgent do without. What
follows the published code and what does not is in docs/methods.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kbx_env.baselines import _geak_prompts as prompts
from kbx_env.baselines.llm.access import Access
from kbx_env.baselines.llm.caller import Talk
from kbx_env.baselines.llm.chat import Ask, Reply
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
POOL = 5
"""Correct kernels kept to be beaten."""
HISTORY = 5
"""Failed attempts kept by a slot."""
DEBUGS = 5
"""Rounds of repair in a row before it starts afresh."""


@dataclass
class Attempt:
    """One candidate and all that is known of it."""

    code: str
    score: float = 0.0
    outcome: Outcome | None = None
    result: str = ""
    reflection: str = ""

    @property
    def correct(self) -> bool:
        """Whether the grader found it right."""
        return self.outcome is not None and self.outcome.correct

    @property
    def runs(self) -> bool:
        """Whether it compiled and ran to its end."""
        return self.outcome is not None and self.outcome.verdict in (Verdict.CORRECT, Verdict.INCORRECT)

    @property
    def worth(self) -> tuple[float, float, float]:
        """For comparing correct kernels: measured speedup; on the CPU nearness to the roofline, where the run estimates it,
        then the share of needed in moved bytes."""
        o = self.outcome
        if o is None:
            return (0.0, 0.0, 0.0)
        e = o.evidence
        share = e.ideal_bytes / e.moved_bytes if e and e.ideal_bytes and e.moved_bytes else 0.0
        return (o.speedup or 0.0, o.estimate.estimated_share if o.estimate else 0.0, share)


@dataclass
class Memory:
    """What a task's search remembers."""

    slots: list[Attempt | None] = field(default_factory=lambda: [None] * SLOTS)
    histories: list[list[Attempt]] = field(default_factory=lambda: [[] for _ in range(SLOTS)])
    pool: list[Attempt] = field(default_factory=list)
    last_correct: Attempt | None = None
    last_running: Attempt | None = None
    debugs: int = 0

    def best(self) -> Attempt | None:
        """What would be handed in now."""
        return next((a for a in (*self.pool[:1], self.last_correct, self.last_running, *self.slots) if a is not None), None)


class Geak(Method):
    """See the module."""

    needs = Needs(grader_feedback=True)

    def run(self, task: Task, env: Episode) -> Trajectory:
        """Three rounds; at most 36 calls and 12 gradings."""
        talk = self.caller.talk(self.name, task.id, env.sample)
        memory, modes = Memory(), []
        for number in range(ROUNDS):
            debug = number > 0 and not any(a and a.correct for a in memory.slots) and memory.debugs < DEBUGS
            memory.debugs = memory.debugs + 1 if debug else 0
            modes.append("debug" if debug else "fresh")
            self._generate(talk, task, env, memory, number, debug)
            self._judge(talk, env, memory, number)
            self._grade(env, memory, number)
            self._reflect(talk, env, memory, number)
        best = memory.best()
        reason = "" if best else "none of the answers held code"
        return Trajectory(best.code if best else None, reason, tuple(env.turns), {"modes": modes})

    def _ask(self, text: str) -> Ask:
        return self.sampling.ask(({"role": "user", "content": text},))

    def _generate(self, talk: Talk, task: Task, env: Episode, memory: Memory, number: int, debug: bool) -> None:
        asks = []
        for slot, rest in enumerate(self._shown(task, env, memory, debug)):
            text = prompts.generate(env.prompt, task.entry, str(task.signature), rest)
            asks.append((f"round {number}, slot {slot}, generate", self._ask(text)))
        for slot, reply in enumerate(talk.ask_all(asks)):
            code = code_in(reply, task.entry)
            if code is not None:
                memory.slots[slot] = Attempt(code)
            elif not debug:
                memory.slots[slot] = None  # a slot that is repaired keeps what it has

    def _shown(self, task: Task, env: Episode, memory: Memory, debug: bool) -> Sequence[str]:
        if not debug and memory.pool:
            return [prompts.attempts([(a.code, a.result, a.reflection) for a in memory.pool], failed=False)] * SLOTS
        first = memory.slots[0]
        near = (
            nearest(first.code, by="code", without=task.id) if debug and first else nearest(env.prompt, by="text", without=task.id)
        )
        example = prompts.example(near, expert_source(near) or "") if near else ""
        if not debug:
            return [example] * SLOTS
        kept = [[(a.code, a.result, a.reflection) for a in h] for h in memory.histories]
        return [example + (prompts.attempts(rows, failed=True) if rows else "") for rows in kept]

    def _judge(self, talk: Talk, env: Episode, memory: Memory, number: int) -> None:
        fresh = self._new(memory)
        asks = [
            (f"round {number}, slot {slot}, evaluate", self._ask(prompts.evaluate(env.prompt, a.code))) for slot, a in fresh
        ]
        for (_, attempt), reply in zip(fresh, talk.ask_all(asks), strict=True):
            marks = object_in(reply.text) or {}
            numbers = [marks.get(name) for name in prompts.CRITERIA]
            attempt.score = sum(min(1.0, max(0.0, float(n))) for n in numbers if isinstance(n, int | float))

    @staticmethod
    def _new(memory: Memory) -> list[tuple[int, Attempt]]:
        return [(slot, a) for slot, a in enumerate(memory.slots) if a is not None and a.outcome is None]

    def _grade(self, env: Episode, memory: Memory, number: int) -> None:
        fresh = self._new(memory)
        labels = [f"round {number}, slot {slot}" for slot, _ in fresh]
        for (_, attempt), outcome in zip(fresh, env.grade([a.code for _, a in fresh], round=number, labels=labels), strict=True):
            attempt.outcome, attempt.result = outcome, env.feedback(outcome)

    def _reflect(self, talk: Talk, env: Episode, memory: Memory, number: int) -> None:
        done = [(slot, a) for slot, a in enumerate(memory.slots) if a is not None and not a.reflection]
        asks = [
            (f"round {number}, slot {slot}, reflect", self._ask(prompts.reflect(env.prompt, a.code, a.result, correct=a.correct)))
            for slot, a in done
        ]
        for (slot, attempt), reply in zip(done, talk.ask_all(asks), strict=True):
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
    """The code of an answer ``{"strategy", "code"}``, or of a fenced block where the JSON is broken; ``None`` without one."""
    found = object_in(reply.text)
    code = found.get("code") if found else None
    try:
        text = code if isinstance(code, str) and code.strip() else reply.text
        return kernel_in(Reply(text, reply.finish), entry)
    except NoAnswer:
        return None


def build(argument: str | None, access: Access) -> Geak:
    """``argument`` is the model's name."""
    return Geak(NAME, access, argument, SAMPLING)
