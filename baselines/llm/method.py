"""What the five methods share: a name, a model, sampling, samples, and the cost of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kbx_env.baselines.llm.access import LOCAL, Access
from kbx_env.baselines.llm.chat import Ask, Message, Reply
from kbx_env.baselines.llm.conversation import follow_up
from kbx_env.baselines.llm.extract import kernel_in
from kbx_env.baselines.llm.log import Spent
from kbx_env.baselines.policy import Needs

from kbx_env.errors import UsageError
from kbx_env.spec.catalog import load_task


@dataclass(frozen=True)
class Sampling:
    """A method's own settings; ``None`` leaves one to the server."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None

    def ask(self, messages: Sequence[Message], *, stop: tuple[str, ...] = (), raw: str | None = None) -> Ask:
        """A request with these settings."""
        return Ask(tuple(messages), self.max_tokens, self.temperature, self.top_p, stop, raw=raw)


class Method:
    """A policy over one model. ``repeatable``: it answers from the record of calls what was asked before."""

    needs = Needs()
    repeatable = True

    def __init__(self, name: str, access: Access, argument: str | None, sampling: Sampling, api: str | None = None) -> None:
        """A method.

        Args:
            name: of the policy.
            access: how to reach a model.
            argument: a model's name in place of ``access.model``.
            sampling: the method's own, which ``access`` may override.
            api: what ``--api auto`` means for this method.

        Raises:
            UsageError: no model, or several samples of a policy that always answers alike.
        """
        self.name = f"{name}:{argument.removeprefix(LOCAL)}" if argument else name
        temperature = sampling.temperature if access.temperature is None else access.temperature
        # Ten answers at temperature 0 are one answer, counted ten times.
        if temperature == 0 and access.samples > 1:
            many = f"--samples {access.samples} would be the same answer"
            raise UsageError(f"policy {name!r} decodes greedily: {many}; add --temperature")
        self.sampling = replace(sampling, temperature=temperature, max_tokens=access.max_tokens or sampling.max_tokens)
        self.caller = access.caller(name, argument, api)
        self.concurrency = access.limits.concurrency
        self._samples = access.samples

    def samples(self, task: str) -> int:
        """How many answers a report asks for."""
        return self._samples

    def spent(self, task: str, sample: int) -> Spent:
        """What the answer to a task has taken."""
        return self.caller.ledger.spent_on(self.name, task, sample)

    def about(self) -> dict[str, Any]:
        """What a report says of this policy."""
        return {
            "model": self.caller.model, "sampling": dict(vars(self.sampling)), "policy_seed": self.caller.seed,
            "needs": dict(vars(self.needs)),
        }  # fmt: skip

    def close(self) -> None:
        """Let go of the model."""
        self.caller.close()


class SingleShot(Method):
    """One question, one answer; in an episode of several turns, the feedback is shown and the question put again."""

    def __init__(
        self, name: str, access: Access, argument: str | None, sampling: Sampling,
        render: Callable[[str, str], Sequence[Message]], *, api: str | None = None,
        raw: Callable[[Sequence[Message]], str] | None = None, stop: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """A method of one call.

        Args:
            name: of the policy.
            access: how to reach a model.
            argument: a model's name.
            sampling: the method's own.
            render: from the task's instruction and the entry's name to messages.
            api: what ``--api auto`` means.
            raw: from messages to the prompt of a plain completion, for models served without a chat template.
            stop: texts that end an answer.
        """
        super().__init__(name, access, argument, sampling, api)
        self._render, self._raw, self._stop = render, raw, stop
        self._last: dict[tuple[str, int], Reply] = {}

    def act(self, observation: Mapping[str, Any]) -> str | None:
        """The kernel in the model's answer.

        Raises:
            NoAnswer: a refusal, an empty answer, one that was cut off, prose.
            ModelError: the server failed.
        """
        task, sample, turn = observation["task"], int(observation.get("sample", 0)), int(observation.get("turn", 0))
        entry = load_task(task).entry
        messages = list(self._render(observation["prompt"], entry))
        if turn:
            before = self._last.get((task, sample))
            messages += [{"role": "assistant", "content": before.text}] if before else []
            messages.append({"role": "user", "content": follow_up(observation["feedback"])})
        raw = self._raw(messages) if self._raw else None
        talk = self.caller.talk(self.name, task, sample)
        reply = talk.ask(f"turn {turn}", self.sampling.ask(messages, stop=self._stop, raw=raw))
        self._last[task, sample] = reply
        return kernel_in(reply, entry)
