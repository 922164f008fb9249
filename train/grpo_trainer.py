"""TRL's trainer for GRPO, with what it leaves open: empty answers, and credit for each turn. All private calls of TRL are here."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from trl import GRPOTrainer

from kbx_env.errors import UsageError

SPANS = "turn_spans"
"""The column of a rollout: for every turn its first token, its last one + 1, and its return (``None``: masked)."""
Span = tuple[int, int, float | None]


BROKEN = 10
"""Updates in a row whose gradients are no numbers, before a run ends."""


class KernelTrainer(GRPOTrainer):
    """GRPO over graded kernels; ``per_turn`` gives every turn an advantage of its own."""

    per_turn = False
    still: StandStill | None = None

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As the trainer's; a step without a gradient is none."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        self.still = StandStill()
        optimizer.register_step_pre_hook(self.still)
        return optimizer

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the trainer's; lines of training have ``skipped_updates``: how many since the line before had no finite gradient."""
        if self.still is not None and "train_runtime" not in logs and not any(k.startswith("eval_") for k in logs):
            logs["skipped_updates"], self.still.skipped = self.still.skipped, 0  # in place, as TRL does
        super().log(logs, *args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        # An answer without any token would be an IndexError further on; one end token is what it means.
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


class StandStill:
    """Before a step of an optimizer: where there is nothing to learn, take the gradients away, so that nothing moves.

    All of them 0, since no group had a difference: Adam would go on by its momentum, and its averages would be those of gradients
    that were not there: the next one that comes moves the weights further than a step should. Or one of them no number: it would
    make every weight none (two runs died of cuDNN's: docs/measurements/2026-11-23-h200-learning.md). ``skipped`` counts these.
    """

    def __init__(self) -> None:
        self.skipped = self._row = 0

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The hook.

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
    """Whether a gradient is no number, and whether one is not 0: in any process, so that all of them do the same."""
    largest: Any = torch.nn.utils.get_total_norm(gradients, norm_type=math.inf) if gradients else torch.zeros((), device=device)
    largest = largest.full_tensor() if hasattr(largest, "full_tensor") else largest  # spread over processes
    flags = torch.stack((~largest.isfinite(), largest != 0)).to(torch.int32)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    broken, moves = flags.tolist()
    return bool(broken), bool(moves)


def turn_advantages(spans: Sequence[Sequence[Span]], group: int, scale: str) -> list[list[float]]:
    """The advantage of every turn: its return less the mean over all unmasked turns of its group; 0 where it is masked.

    Args:
        spans: of all rows, those of a group one after another.
        group: rows in each.
        scale: ``none``, or divide by the deviation in the ``group`` or in the ``batch``.
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
    """One answer to each prompt of tokens, at most ``most`` tokens long, with the log-probabilities that vLLM tells."""
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
    """TRL prints the whole row of a masked answer; ``masked`` in the log says it shorter."""
    for name in ("trl.trainer.grpo_trainer", "trl"):
        logging.getLogger(name).addFilter(lambda r: "All reward functions returned None" not in str(r.msg))
