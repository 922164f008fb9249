"""Base classes of the policies that ask a model: name, model, sampling, number of samples, and usage of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kbx_env.baselines.llm.access import LOCAL, Access
from kbx_env.baselines.llm.caller import PROBE
from kbx_env.baselines.llm.chat import ChatRequest, Message, Reply
from kbx_env.baselines.llm.conversation import follow_up
from kbx_env.baselines.llm.extract import kernel_in
from kbx_env.baselines.llm.log import Usage
from kbx_env.baselines.policy import Needs

from kbx_env.errors import UsageError
from kbx_env.spec.catalog import load_task


@dataclass(frozen=True)
class Sampling:
    """A method's sampling settings. The server decides on those that are ``None``; see ``ChatRequest``."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None

    def request(
        self, messages: Sequence[Message], *, stop: tuple[str, ...] = (), raw: str | None = None
    ) -> ChatRequest:
        """Make a request with these settings.

        Args:
            messages: the conversation so far.
            stop: texts that end the answer.
            raw: the prompt as text, for a server of plain completions.

        Returns:
            The request, without a seed.
        """
        return ChatRequest(tuple(messages), self.max_tokens, self.temperature, self.top_p, stop, raw=raw)


class Method:
    """Base class of a policy that asks one model.

    Attributes:
        name: the policy's name, with the model's name where the policy's argument names one.
        needs: the information that the policy uses besides the task.
        repeatable: true, because calls that were made before are answered from the record.
        sampling: the method's settings, with those of the access in their place where it has any.
        caller: calls the model.
        concurrency: number of answers that may be requested at the same time.
    """

    needs = Needs()
    repeatable = True

    def __init__(
        self, name: str, access: Access, argument: str | None, sampling: Sampling, api: str | None = None
    ) -> None:
        """Prepare to ask a model.

        Args:
            name: the policy's name.
            access: how to reach a model.
            argument: the model's name, in place of ``access.model``.
            sampling: the method's own settings, which ``access`` may replace.
            api: the API that ``--api auto`` means for this method.

        Raises:
            UsageError: no model is named, or several samples are wanted of greedy decoding.
        """
        self.name = f"{name}:{argument.removeprefix(LOCAL)}" if argument else name
        temperature = sampling.temperature if access.temperature is None else access.temperature
        # At temperature 0 all samples would be the same answer.
        if temperature == 0 and access.samples > 1:
            many = f"--samples {access.samples} would be the same answer"
            raise UsageError(f"policy {name!r} decodes greedily: {many}; add --temperature")
        self.sampling = replace(sampling, temperature=temperature, max_tokens=access.max_tokens or sampling.max_tokens)
        self.caller = access.caller(name, argument, api)
        self.concurrency = access.limits.concurrency
        self._samples = access.samples
        self.caller.expect(self.sampling.request(({"role": "user", "content": PROBE},), raw=PROBE))

    def probe(self) -> None:
        """Ask the model once, which otherwise happens before the first call.

        Raises:
            UsageError: no server answers, or it refuses the address, the key or the model.
        """
        self.caller.probe()

    def samples(self, task: str) -> int:
        """Return the number of independent answers to a task."""
        return self._samples

    def spent(self, task: str, sample: int) -> Usage:
        """Return the usage of an answer.

        Args:
            task: id of the task.
            sample: number of the answer, from 0.

        Returns:
            The sum over the answer's calls and scripts so far.
        """
        return self.caller.ledger.usage_of(self.name, task, sample)

    def about(self) -> dict[str, Any]:
        """Return the facts about this policy that a report shows, as plain JSON types."""
        return {
            "model": self.caller.model, "sampling": dict(vars(self.sampling)), "policy_seed": self.caller.seed,
            "needs": dict(vars(self.needs)),
        }  # fmt: skip

    def close(self) -> None:
        """Stop calls that are under way, and close connections."""
        self.caller.close()


class SingleShot(Method):
    """A policy of one call for each answer; later turns of an episode show the last answer and the feedback."""

    def __init__(
        self, name: str, access: Access, argument: str | None, sampling: Sampling,
        render: Callable[[str, str], Sequence[Message]], *, api: str | None = None,
        raw: Callable[[Sequence[Message]], str] | None = None, stop: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Prepare to ask a model.

        Args:
            name: the policy's name.
            access: how to reach a model.
            argument: the model's name, in place of ``access.model``.
            sampling: the method's own settings, which ``access`` may replace.
            render: makes messages from the task's instruction and the name of the entry function.
            api: the API that ``--api auto`` means for this method.
            raw: makes the prompt of a plain completion from messages, for models that are served without a chat
                template.
            stop: texts that end an answer.

        Raises:
            UsageError: no model is named, or several samples are wanted of greedy decoding.
        """
        super().__init__(name, access, argument, sampling, api)
        self._render, self._raw, self._stop = render, raw, stop
        self._last: dict[tuple[str, int], Reply] = {}

    def act(self, observation: Mapping[str, Any]) -> str | None:
        """Ask the model, and extract the kernel from its answer.

        Args:
            observation: ``task``, ``prompt``, and where they are not 0 ``turn`` and ``sample``; ``feedback`` from the
                second turn on.

        Returns:
            The source.

        Raises:
            NoAnswer: a refusal, no code, an empty answer, or one that was cut off before any code.
            ModelError: the server failed in every attempt.
        """
        task, sample, turn = observation["task"], int(observation.get("sample", 0)), int(observation.get("turn", 0))
        entry = load_task(task).entry
        messages = list(self._render(observation["prompt"], entry))
        if turn:
            last = self._last.get((task, sample))
            messages += [{"role": "assistant", "content": last.text}] if last else []
            messages.append({"role": "user", "content": follow_up(observation["feedback"])})
        raw = self._raw(messages) if self._raw else None
        session = self.caller.session(self.name, task, sample)
        reply = session.ask(f"turn {turn}", self.sampling.request(messages, stop=self._stop, raw=raw))
        self._last[task, sample] = reply
        return kernel_in(reply, entry)
