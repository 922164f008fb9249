"""TRL's trainer for GRPO with two additions: empty answers, and credit for each turn. All private calls of TRL are here."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from trl import GRPOTrainer

from kbx_env.errors import UsageError

SPANS = "turn_spans"
"""Column of a rollout with the spans of its turns."""
Span = tuple[int, int, float | None]
"""One turn: its first token, its last token + 1, and its return (``None``: masked)."""
BROKEN = 10
"""A run ends after so many updates in a row with gradients that are NaN or infinite."""


class KernelTrainer(GRPOTrainer):
    """GRPO over graded kernels."""

    per_turn = False
    """Whether each turn has an advantage of its own."""
    skip: SkipEmptySteps | None = None

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Make the optimizer of TRL's trainer and skip its steps without a gradient."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        self.skip = SkipEmptySteps()
        optimizer.register_step_pre_hook(self.skip)
        return optimizer

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as TRL's trainer; lines of training also have ``skipped_updates``.

        That counts the updates since the line before that had no finite gradient.

        Args:
            logs: the line, which is changed in place.
            *args: arguments of TRL's method.
            **kwargs: keyword arguments of TRL's method.
        """
        if self.skip is not None and "train_runtime" not in logs and not any(k.startswith("eval_") for k in logs):
            logs["skipped_updates"], self.skip.skipped = self.skip.skipped, 0  # in place, as TRL does
        super().log(logs, *args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        # An answer without any token would raise an IndexError in TRL; it becomes one end token.
        end = self.eos_token_ids[0]
        empty = [i for i, row in enumerate(ids) if not len(row)]
        for i in empty:
            ids[i] = [end]
            if logprobs is not None:
                logprobs[i] = [0.0]
        return ids, logprobs

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.per_turn:
            spans = [row[SPANS] for row in inputs]
            every = spans
            if self.accelerator.num_processes > 1:
                from accelerate.utils import gather_object

                every = gather_object(spans)
            start = self.accelerator.process_index * len(spans)
            values = turn_advantages(every, self.num_generations or 1, self.scale_rewards)[start : start + len(spans)]
            spread = torch.zeros(out["completion_ids"].shape, dtype=torch.float32)
            for row, (of, advantages) in enumerate(zip(spans, values, strict=True)):
                for (begin, end, _), advantage in zip(of, advantages, strict=True):
                    spread[row, begin:end] = advantage
            out["advantages"] = spread.to(out["advantages"].device)
        return out


class SkipEmptySteps:
    """An optimizer hook that removes all gradients before a step that must not change the weights.

    That is a step whose gradients are all 0, since no group had a difference: Adam would move on by its momentum, and its averages
    would shrink, so that the next gradient would move the weights further than a step should. And it is a step with a gradient
    that is NaN or infinite, which would make every weight NaN (docs/measurements/2026-11-23-h200-learning.md); ``skipped`` counts
    these.
    """

    def __init__(self) -> None:
        """A hook for one optimizer."""
        self.skipped = self._row = 0

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Remove the gradients if the step must not change the weights.

        Args:
            optimizer: the optimizer that is about to step.
            args: arguments of the step, not used.
            kwargs: keyword arguments of the step, not used.

        Raises:
            UsageError: ``BROKEN`` updates in a row had no finite gradient.
        """
        params = [p for group in optimizer.param_groups for p in group["params"]]
        every = [p.grad for p in params if p.grad is not None]
        broken, moves = _anywhere(every, params[0].device)
        self.skipped, self._row = self.skipped + broken, (self._row + 1) * broken
        if self._row >= BROKEN:
            raise UsageError(
                f"gradients of {BROKEN} updates in a row are no numbers; begin a new run from an earlier checkpoint "
                "(model=CHECKPOINT out=NEW) with a lower trainer.learning_rate"
            )
        if broken or not moves:
            for p in params:
                p.grad = None


def _anywhere(gradients: Sequence[torch.Tensor], device: torch.device) -> tuple[bool, bool]:
    """Return whether a gradient is not finite, and whether one is not 0; in any process, so that all processes do the same."""
    largest: Any = torch.nn.utils.get_total_norm(gradients, norm_type=math.inf) if gradients else torch.zeros((), device=device)
    largest = largest.full_tensor() if hasattr(largest, "full_tensor") else largest  # a sharded tensor
    flags = torch.stack((~largest.isfinite(), largest != 0)).to(torch.int32)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    broken, moves = flags.tolist()
    return bool(broken), bool(moves)


def turn_advantages(spans: Sequence[Sequence[Span]], group: int, scale: str) -> list[list[float]]:
    """Return the advantage of each turn: its return minus the mean over all unmasked turns of its group; 0 where it is masked.

    Args:
        spans: the turns of each row; the rows of a group follow each other.
        group: rows of a group.
        scale: ``none``, or divide by the standard deviation in the ``group`` or in the ``batch``.

    Returns:
        For each row the advantages of its turns.
    """

    def known(rows: Sequence[Sequence[Span]]) -> torch.Tensor:
        return torch.tensor([r for row in rows for _, _, r in row if r is not None], dtype=torch.float64)

    found = []
    for first in range(0, len(spans), group):
        rows = spans[first : first + group]
        values = known(rows)
        mean = float(values.mean()) if len(values) else 0.0
        over = values if scale == "group" else known(spans) if scale == "batch" else None
        unit = 1.0 if over is None else float(over.std()) + 1e-4 if len(over) > 1 else 1.0
        found += [[0.0 if r is None else (r - mean) / unit for _, _, r in row] for row in rows]
    return found


def generate(trainer: Any, prompts: list[list[int]], most: int) -> tuple[list[list[int]], list[list[float]] | None]:
    """Generate one answer to each prompt.

    Args:
        trainer: TRL's trainer.
        prompts: the prompts in tokens.
        most: longest answer, in tokens.

    Returns:
        The answers in tokens and, if vLLM generates, the log-probabilities of their tokens.
    """
    holder, name = (
        (trainer.vllm_generation, "max_completion_length") if trainer.use_vllm else (trainer.generation_config, "max_new_tokens")
    )
    before = getattr(holder, name)
    setattr(holder, name, most)
    try:
        ids, logprobs = trainer._generate_single_turn(prompts, None, {}, 1)
    finally:
        setattr(holder, name, before)
    return [list(map(int, row)) for row in ids], logprobs


def quiet() -> None:
    """Keep TRL from printing the whole row of each masked answer; the log counts them as ``masked``."""
    for name in ("trl.trainer.grpo_trainer", "trl"):
        logging.getLogger(name).addFilter(lambda r: "All reward functions returned None" not in str(r.msg))
