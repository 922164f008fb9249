"""Renders a conversation of several turns with a checkpoint as tokens; no text is tokenised a second time.

Training over several turns and the policy ``hf:FOLDER,turns=N`` share this code, so that a model is asked as it was
trained.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kbx_env.errors import UsageError

_ANSWER = "KBX-ANSWER-0"
_QUESTION = "KBX-QUESTION-0"
"""Stand-ins for an answer and a question, to find out which text a template writes around them."""


def follow_up(feedback: str) -> str:
    """Return the user's message after a verdict."""
    return f"{feedback}\n\nAnswer with the whole corrected module."


class Conversation:
    """Renders turns with a tokenizer's own chat template.

    Attributes:
        ends: ids of the tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, ends: Iterable[int | None] = ()) -> None:
        """Prepare for a tokenizer.

        Args:
            tokenizer: of transformers, with a chat template.
            ends: ids of tokens that end an answer, besides the tokenizer's own; ``None`` is ignored.
        """
        self._tokenizer = tokenizer
        self.ends = {e for e in (*ends, tokenizer.eos_token_id) if e is not None}

    @functools.cached_property
    def _generation_prompt(self) -> int:
        """Number of characters that the template adds to mark the beginning of an answer."""
        messages = [{"role": "user", "content": _QUESTION}]
        return len(self._text(messages, True)) - len(self._text(messages, False))

    def opening(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of the prompt's tokens, up to where the model continues with its first answer."""
        return self._ids(self._text(messages, True))

    def begun(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the beginning of the answer that the template itself writes (a prefilled answer).

        The model continues from there, and the text belongs to its answer. With most templates it is empty. The
        templates of ``train/build_model.py answer=begun`` write the head of the requested function.
        """
        return self._text(messages, True)[len(self._text(messages, False)) + self._generation_prompt :]

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
        before = opening[: len(opening) - len(begun)] + _ANSWER
        text = self._text(messages, True)
        rest = self._ids(text[len(before) :]) if text.startswith(before) else []
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
        return str(self._tokenizer.apply_chat_template(plain, add_generation_prompt=generation_prompt, tokenize=False))

    def _ids(self, text: str) -> list[int]:
        # The template has written the special tokens already.
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
