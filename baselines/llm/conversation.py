"""A conversation with a checkpoint over several turns, in tokens: what was shown or said once is never tokenised again.

Training over several turns and the policy ``hf:FOLDER,turns=N`` both use it, so that a model is asked as it was trained.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kbx_env.errors import UsageError

_ANSWER = "KBX-ANSWER-0"
_QUESTION = "KBX-QUESTION-0"


def follow_up(feedback: str) -> str:
    """What the user says after a verdict."""
    return f"{feedback}\n\nAnswer with the whole corrected module."


class Conversation:
    """Renders turns through a tokenizer's own chat template."""

    def __init__(self, tokenizer: Any, ends: Iterable[int | None] = ()) -> None:
        """Rendering for one tokenizer.

        Args:
            tokenizer: with a chat template.
            ends: tokens that end an answer, beside the tokenizer's own.
        """
        self._tokenizer = tokenizer
        self.ends = {e for e in (*ends, tokenizer.eos_token_id) if e is not None}

    @functools.cached_property
    def _turn(self) -> int:
        """Letters that a template writes before any answer, more than where none is asked for."""
        asked = [{"role": "user", "content": _QUESTION}]
        return len(self._text(asked, True)) - len(self._text(asked, False))

    def opening(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens up to where the model goes on with its first answer."""
        return self._ids(self._text(messages, True))

    def begun(self, messages: Sequence[Mapping[str, str]]) -> str:
        """What the template itself has begun an answer with: the model goes on from there, and this belongs to its answer.

        Nothing with most templates. Those of ``train/build_model.py answer=begun`` write down the function that is asked for.
        """
        return self._text(messages, True)[len(self._text(messages, False)) + self._turn :]

    def follow_up(self, feedback: str, question: str = _QUESTION) -> list[int]:
        """The tokens between the end of an answer and where the model goes on with the next one, which feedback comes between.

        Args:
            feedback: on the answer.
            question: what the conversation began with; a template may look at it.

        Raises:
            UsageError: the template shows an earlier answer in another way than it was generated.
        """
        told = {"role": "user", "content": follow_up(feedback)}
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": _ANSWER}, told]
        opening, begun = self._text(messages[:1], True), self.begun(messages[:1])
        before = opening[: len(opening) - len(begun)] + _ANSWER
        whole = self._text(messages, True)
        rest = self._ids(whole[len(before) :]) if whole.startswith(before) else []
        if not rest or rest[0] not in self.ends:
            raise UsageError(
                "the chat template does not keep what was said before: an earlier answer is shown in another way than it was "
                "generated, so several turns cannot be trained; use one of TRL's templates, or mode=single"
            )
        return rest[1:]

    def answered(self, text: str, ids: Sequence[int] | None, begun: str = "") -> list[int]:
        """The tokens that a model said of an answer that ended by itself, end included; from the text of the whole answer where
        nobody has kept them, less what the template had ``begun``."""
        kept = list(ids) if ids is not None else self._ids(text.removeprefix(begun))
        while kept and kept[-1] in self.ends:
            kept.pop()
        return [*kept, self._tokenizer.eos_token_id]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer, without its end."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _text(self, messages: Sequence[Mapping[str, str]], asks: bool) -> str:
        # Messages may have keys more, such as the task of a prompt.
        plain = [{"role": m["role"], "content": m["content"]} for m in messages]
        return str(self._tokenizer.apply_chat_template(plain, add_generation_prompt=asks, tokenize=False))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])  # the template writes them
