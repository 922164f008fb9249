"""Hands each answer to the grader as soon as it ends, while the other answers of a batch are still generated.

transformers and vLLM return a batch when its longest answer has ended. Until then graders would have nothing to do, and the
trainer would wait for them afterwards. The watch is told of each answer that ends: by a stopping criterion of transformers, by the
results of its continuous batching, or by the steps of a vLLM in this process. The reward function then finds gradings that have
begun or ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kbx_env.baselines.llm.conversation import Conversation
from kbx_env.train.batch_grader import BatchGrader

EVERY = 8
"""Tokens between two looks at which answers have ended: each look waits for the GPU."""


class AnswerWatch:
    """Knows the task of each prompt, and hands in answers that have ended.

    Attributes:
        conversation: decodes answers.
        begun: answers that were handed in early so far.
    """

    def __init__(self, grader: BatchGrader, conversation: Conversation) -> None:
        """A watch over the answers of a run.

        Args:
            grader: grades them.
            conversation: decodes them.
        """
        self._grader, self.conversation, self.begun = grader, conversation, 0
        self._expected: dict[tuple[int, ...], tuple[str, str]] = {}

    def expect(self, rows: Iterable[tuple[Sequence[int], str, str]]) -> None:
        """Note the prompts of the next batch.

        Args:
            rows: a prompt in tokens, the id of its task, and the beginning of reasoning that the template writes before the answer.
        """
        self._expected = {tuple(map(int, ids)): (task, begun) for ids, task, begun in rows}

    def ended(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Hand in an answer that has ended.

        Args:
            prompt: its prompt in tokens; unknown ones are passed over.
            answer: its tokens.
        """
        known = self._expected.get(tuple(map(int, prompt)))
        if known is not None:
            task, begun = known
            self._grader.begin(task, begun + self.conversation.decode(list(map(int, answer))))
            self.begun += 1

    @contextlib.contextmanager
    def watching(self, model: Any, ends: Sequence[int]) -> Iterator[None]:
        """Watch what a model generates in a ``with`` block.

        Args:
            model: a model of transformers, or of peft around one.
            ends: the tokens that end an answer.
        """
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        with contextlib.ExitStack() as stack:
            if hasattr(model, "generate"):
                stack.enter_context(_replaced(model, "generate", self._generate(model.generate, set(ends))))
            if hasattr(base, "continuous_batching_context_manager"):
                made = self._continuous(base.continuous_batching_context_manager)
                stack.enter_context(_replaced(base, "continuous_batching_context_manager", made))
            yield

    @contextlib.contextmanager
    def stepping(self, engine: Any) -> Iterator[None]:
        """Watch what a vLLM in this process generates in a ``with`` block.

        Args:
            engine: ``LLM.llm_engine``; its ``step`` returns the requests that moved on.
        """
        step = engine.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            outputs = step(*args, **kwargs)
            for output in outputs:
                if output.finished:
                    self.ended(output.prompt_token_ids, output.outputs[0].token_ids)
            return outputs

        with _replaced(engine, "step", watched):
            yield

    def _generate(self, generate: Callable[..., Any], ends: set[int]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            from transformers import StoppingCriteriaList

            prompts = kwargs.get("input_ids", args[0] if args else None)
            if prompts is None:
                return generate(*args, **kwargs)
            criterion = _Ended(self, prompts.shape[1], kwargs.get("attention_mask"), ends)
            kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), criterion])
            return generate(*args, **kwargs)

        return watched

    def _continuous(self, manager_of: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def watched(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with manager_of(*args, **kwargs) as manager:
                get = manager.get_result

                def get_result(*a: Any, **k: Any) -> Any:
                    result = get(*a, **k)
                    if result and result.is_finished():
                        self.ended(result.prompt_ids, result.generated_tokens)
                    return result

                with _replaced(manager, "get_result", get_result):
                    yield manager

        return watched


class _Ended:
    """A stopping criterion that stops nothing: it looks which answers have ended."""

    def __init__(self, watch: AnswerWatch, width: int, mask: Any, ends: set[int]) -> None:
        self._watch, self._width, self._mask, self._ends = watch, width, mask, ends
        self._seen: set[int] = set()

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        import torch

        new = input_ids.shape[1] - self._width
        if new % EVERY == 0:
            for row, tokens in enumerate(input_ids[:, self._width :].tolist()):
                end = next((i for i in range(max(0, new - EVERY), new) if tokens[i] in self._ends), None)
                if row not in self._seen and end is not None:
                    self._seen.add(row)
                    prompt = input_ids[row, : self._width]
                    prompt = prompt if self._mask is None else prompt[self._mask[row].bool()]
                    self._watch.ended(prompt.tolist(), tokens[: end + 1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@contextlib.contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object, not of its class, for a ``with`` block."""
    had, before = name in vars(holder), vars(holder).get(name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before) if had else delattr(holder, name)
