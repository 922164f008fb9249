"""Renders a conversation of several turns with a checkpoint as tokens; no text is tokenised a second time.

Training over several turns and the policy ``hf:FOLDER,turns=N`` share this code, so that a model is asked as it was
trained.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kbx_env.envs.answer import REASONING
from kbx_env.errors import UsageError

PROMPTING = "prompting.json"
"""File of a checkpoint that says how the model was asked in training."""

_ANSWER = "KBX-ANSWER-0"
_QUESTION = "KBX-QUESTION-0"
"""Stand-ins for an answer and a question, to find out which text a template writes around them."""


@dataclass(frozen=True)
class Prompting:
    """How a model is asked, beside its chat template. A trained checkpoint keeps it, so that reports ask as training did."""

    system: str | None = None
    """The system message; ``None`` for none, where the template may have one of its own."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, such as ``enable_thinking``."""
    reasoning: tuple[str, ...] = REASONING
    """The tags that begin and end reasoning, which is not graded; empty for none."""

    def messages(self, question: str) -> list[dict[str, str]]:
        """Return the first messages of a conversation."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": question}]

    def save(self, folder: str | Path) -> None:
        """Write ``prompting.json`` into a checkpoint's folder; no file where everything is as usual."""
        if self != Prompting():
            Path(folder, PROMPTING).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def of(cls, folder: str | Path) -> Prompting:
        """Read how a checkpoint was asked.

        Args:
            folder: the checkpoint.

        Returns:
            What its ``prompting.json`` says; the usual way where it has none.

        Raises:
            UsageError: the file cannot be read.
        """
        path = Path(folder, PROMPTING)
        if not path.is_file():
            return cls()
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(found["system"], found["template_kwargs"], tuple(found["reasoning"]))
        except (ValueError, KeyError, TypeError) as e:
            raise UsageError(f"{path} cannot be read ({type(e).__name__}); write it anew, or remove it") from e


def follow_up(feedback: str) -> str:
    """Return the user's message after a verdict."""
    return f"{feedback}\n\nAnswer with the whole corrected module."


class Conversation:
    """Renders turns with a tokenizer's own chat template.

    Attributes:
        ends: ids of the tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, ends: Iterable[int | None] = (), prompting: Prompting | None = None) -> None:
        """Prepare for a tokenizer.

        Args:
            tokenizer: of transformers, with a chat template.
            ends: ids of tokens that end an answer, besides the tokenizer's own; ``None`` is ignored.
            prompting: how the model is asked; by default without a system message.
        """
        self._tokenizer, self.prompting = tokenizer, prompting or Prompting()
        self.ends = {e for e in (*ends, tokenizer.eos_token_id) if e is not None}

    @functools.cached_property
    def _generation_prompt(self) -> int:
        """Number of characters that the template adds to mark the beginning of an answer; reasoning belongs to the answer."""
        messages = [{"role": "user", "content": _QUESTION}]
        added = self._text(messages, True)[len(self._text(messages, False)) :]
        tags = self.prompting.reasoning
        return added.find(tags[0]) if tags and tags[0] in added else len(added)

    def opening(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of the prompt's tokens, up to where the model continues with its first answer."""
        return self._ids(self._text(messages, True))

    def begun(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the beginning of the answer that the template itself writes (a prefilled answer).

        The model continues from there, and the text belongs to its answer. With most templates it is empty. The
        templates of ``train/build_model.py answer=begun`` write the head of the requested function, and those of some thinking
        models the tag that begins reasoning.
        """
        return self._text(messages, True)[len(self._text(messages, False)) + self._generation_prompt :]

    def reasoning(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return ``begun`` where it begins reasoning, else "": without it nobody could tell reasoning that never ends."""
        tags, begun = self.prompting.reasoning, self.begun(messages)
        return begun if tags and tags[0] in begun else ""

    def follow_up(self, feedback: str, question: str = _QUESTION) -> list[int]:
        """Render the text between two answers: the feedback, and the beginning of the next answer.

        Args:
            feedback: on the answer before.
            question: the first message of the conversation; a template may depend on it.

        Returns:
            The ids of the tokens after the end of an answer, up to where the model continues with the next one.

        Raises:
            UsageError: the template shows an earlier answer in another way than it was generated.
        """
        correction = {"role": "user", "content": follow_up(feedback)}
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": _ANSWER}, correction]
        opening, begun = self._text(messages[:1], True), self.begun(messages[:1])
        before, text = opening[: len(opening) - len(begun)], self._text(messages, True)
        # The template may show an earlier answer without its reasoning, or with an empty one: the tokens of the answer are kept
        # as they were generated, and only the text behind the answer is taken from here.
        tags = self.prompting.reasoning
        empty = rf"(?:{re.escape(tags[0])}\s*{re.escape(tags[1])}\s*)?" if tags else ""
        shown = re.match(rf"\s*{empty}{re.escape(_ANSWER)}" if tags else re.escape(_ANSWER), text[len(before) :])
        rest = self._ids(text[len(before) + shown.end() :]) if text.startswith(before) and shown else []
        if not rest or rest[0] not in self.ends:
            raise UsageError(
                "the chat template does not keep what was said before: an earlier answer is shown in another way than "
                "it was generated, so several turns cannot be trained; use one of TRL's templates, or mode=single"
            )
        return rest[1:]

    def answered(self, text: str, ids: Sequence[int] | None, begun: str = "") -> list[int]:
        """Return the tokens of an answer that the model generated and ended by itself.

        Args:
            text: the whole answer; used only where its tokens are not known.
            ids: ids of the generated tokens, or ``None``.
            begun: the beginning of the answer that the template wrote; it was not generated.

        Returns:
            Their ids, with exactly one token that ends the answer.
        """
        kept = list(ids) if ids is not None else self._ids(text.removeprefix(begun))
        while kept and kept[-1] in self.ends:
            kept.pop()
        return [*kept, self._tokenizer.eos_token_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of an answer's tokens, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _text(self, messages: Sequence[Mapping[str, str]], generation_prompt: bool) -> str:
        # Messages may have further keys, such as the task of a prompt.
        plain = [{"role": m["role"], "content": m["content"]} for m in messages]
        more = self.prompting.template_kwargs
        return str(self._tokenizer.apply_chat_template(plain, add_generation_prompt=generation_prompt, tokenize=False, **more))

    def _ids(self, text: str) -> list[int]:
        # The template has written the special tokens already.
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
