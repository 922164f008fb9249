"""TRL's trainer for GRPO with two additions: empty answers, and credit for each turn. All private calls of TRL are here."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from kbx_env.train.answer_watch import AnswerWatch
from kbx_env.train.step_metrics import StepMetrics
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
    turn_baseline = "group"
    """What the return of a turn is compared with, see ``turn_advantages``."""
    skip: SkipEmptySteps | None = None
    watch: AnswerWatch | None = None
    """Begins to grade answers while others are generated."""
    step_metrics: StepMetrics | None = None
    """Told when episodes are those of an evaluation."""
    _half: Any = None

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

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as TRL's trainer; the episodes count in lines of evaluation alone.

        Args:
            *args: arguments of TRL's method.
            **kwargs: keyword arguments of TRL's method.

        Returns:
            The metrics.
        """
        with contextlib.nullcontext() if self.step_metrics is None else self.step_metrics.evaluating():
            return super().evaluate(*args, **kwargs)  # type: ignore[no-any-return]

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        found = super()._tokenize_prompts(prompts)
        if self.watch is not None:
            tasks = [p[-1]["task"] for p in prompts]
            self.watch.expect(zip(found[0], tasks, map(self.watch.conversation.reasoning, prompts), strict=True))
        return found

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.accelerator.unwrap_model(self.model_wrapped)
        if self.use_transformers_continuous_batching and not self.use_vllm and not self._shards_weights():
            ids, logprobs = self._generate_continuously(model, prompt_ids), None
        else:
            with self._watching(model):
                ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        # An answer without any token would raise an IndexError in TRL; it becomes one end token.
        end = self.eos_token_ids[0]
        empty = [i for i, row in enumerate(ids) if not len(row)]
        for i in empty:
            ids[i] = [end]
            if logprobs is not None:
                logprobs[i] = [0.0]
        return ids, logprobs

    def _watching(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context in which answers that end are handed in; a server's answers come all at once."""
        if self.watch is None:
            return contextlib.nullcontext()
        if not self.use_vllm:
            return self.watch.watching(model, self.eos_token_ids)
        if self.vllm_generation.mode == "colocate" and self.vllm_generation.tensor_parallel_size == 1:
            return self.watch.stepping(self.vllm_generation.llm.llm_engine)
        return contextlib.nullcontext()

    def _shards_weights(self) -> bool:
        """Return whether weights are divided among processes, so that TRL must gather them for generating."""
        return bool(self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def _generate_continuously(self, model: Any, prompts: list[list[int]]) -> list[list[int]]:
        """Generate with continuous batching of transformers, without changing the weights.

        TRL casts the whole model to half precision first and leaves it so: weights in float32 would be lost at the first step,
        and with them every update that is smaller than the last bit of a bfloat16. Here weights in float32 are copied to a second
        model in half precision, which takes half of their memory; other weights are used as they are.

        Args:
            model: the model, unwrapped.
            prompts: the prompts in tokens.

        Returns:
            The answers in tokens.

        Raises:
            UsageError: some prompts have no answer.
        """
        half = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        dtypes = {p.dtype for p in base.parameters() if p.is_floating_point()}
        if half is not None and dtypes == {torch.float32} and base is model:
            if self._half is None:
                # Made anew: in a copy, ``forward`` would be the one that accelerate and TRL have bound to this model, and ``to``
                # would round the frequencies of rotary embeddings.
                with torch.device(model.device):
                    self._half = type(model)._from_config(copy.deepcopy(model.config), dtype=half).requires_grad_(False)
                self._half.generation_config = model.generation_config
            with torch.no_grad():
                for own, other in zip(self._half.parameters(), model.parameters(), strict=True):
                    own.copy_(other)
            generator = self._half
        else:
            generator = model
        was, training = generator.config._attn_implementation, generator.training
        generator.eval()
        with torch.no_grad(), self._watching(generator):
            found = generator.generate_batch(
                prompts, generation_config=self.generation_config, continuous_batching_config=self.continuous_batching_config,
                progress_bar=False,
            )  # fmt: skip
        generator.train(training)
        if generator.config._attn_implementation != was:  # the paged one serves generation alone
            generator.set_attn_implementation(was)
        if len(found) < len(prompts):
            raise UsageError(
                f"continuous batching gave {len(found)} of {len(prompts)} answers (see the messages above); free GPU memory, or "
                "set trainer.use_transformers_continuous_batching=false"
            )
        return [list(map(int, output.generated_tokens)) for output in found.values()]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.per_turn:
            spans = [row[SPANS] for row in inputs]
            every = spans
            if self.accelerator.num_processes > 1:
                from accelerate.utils import gather_object

                every = gather_object(spans)
            start = self.accelerator.process_index * len(spans)
            model: Any = self.model
            group = (self.num_generations if model.training else self.num_generations_eval) or 1
            values = turn_advantages(every, group, self.scale_rewards, self.turn_baseline)[start : start + len(spans)]
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


def turn_advantages(
    spans: Sequence[Sequence[Span]], group: int, scale: str, baseline: str = "group"
) -> list[list[float]]:  # fmt: skip
    """Return the advantage of each turn: its return minus a baseline; 0 where it is masked.

    Args:
        spans: the turns of each row; the rows of a group follow each other.
        group: rows of a group.
        scale: ``none``, or divide by the standard deviation in the ``group`` or in the ``batch``.
        baseline: ``group``: the mean over all unmasked turns of the group, the turn itself included; ``leave-one-out``: the mean
            over the same turn of the other rows of the group, which does not depend on the row's own answers. Where no other row
            has that turn, the mean over all their turns; where they have none, the turn's own return.

    Returns:
        For each row the advantages of its turns.
    """

    def known(rows: Sequence[Sequence[Span]]) -> torch.Tensor:
        return torch.tensor([r for row in rows for _, _, r in row if r is not None], dtype=torch.float64)

    found: list[list[float]] = []
    for first in range(0, len(spans), group):
        rows = spans[first : first + group]
        values = known(rows)
        mean = float(values.mean()) if len(values) else 0.0
        over = values if scale == "group" else known(spans) if scale == "batch" else None
        unit = 1.0 if over is None else float(over.std()) + 1e-4 if len(over) > 1 else 1.0
        for index, row in enumerate(rows):
            others = [*rows[:index], *rows[index + 1 :]]
            found.append([])
            for turn, (_, _, value) in enumerate(row):
                if value is not None and baseline == "leave-one-out":
                    same = known([[r[turn]] for r in others if turn < len(r)])
                    beside = same if len(same) else known(others)
                    mean = float(beside.mean()) if len(beside) else value
                found[-1].append(0.0 if value is None else (value - mean) / unit)
    return found


def generate(trainer: Any, prompts: list[list[int]], most: int) -> tuple[list[list[int]], list[list[float]] | None]:
    """Generate one answer to each prompt. All processes of a run call this together, each with prompts of its own or none.

    Args:
        trainer: TRL's trainer.
        prompts: the prompts in tokens.
        most: longest answer, in tokens; where vLLM serves several processes, the largest number of any of them counts.

    Returns:
        The answers in tokens and, if vLLM generates, the log-probabilities of their tokens.
    """
    if _generates_together(trainer):
        return _generate_evenly(trainer, prompts, most)
    if prompts:
        return _generate(trainer, prompts, most)
    # Where weights are divided among processes, a process without prompts must take part all the same.
    _, logprobs = _generate(trainer, [[trainer.eos_token_ids[0]]], 1)
    return [], None if logprobs is None else []


def _generates_together(trainer: Any) -> bool:
    """Return whether one vLLM answers the prompts of several processes: a server, or tensor parallelism."""
    if not trainer.use_vllm or trainer.accelerator.num_processes == 1:
        return False
    vllm = trainer.vllm_generation
    return bool(vllm.mode == "server" or vllm.tensor_parallel_size > 1)


def _generate_evenly(trainer: Any, prompts: list[list[int]], most: int) -> tuple[list[list[int]], list[list[float]] | None]:
    """Generate with equally many prompts in every process, as TRL expects.

    TRL takes a process's answers from ``process_index * len(prompts)`` on. After the first turn the processes have different
    numbers of live episodes, and would get the answers to others' prompts. So the prompts of all processes are dealt out anew; at
    most one prompt for each process is added to make numbers equal, and its answer is dropped.

    Args:
        trainer: TRL's trainer.
        prompts: the prompts of this process, in tokens.
        most: longest answer, in tokens.

    Returns:
        As ``generate``, for the prompts of this process.
    """
    from accelerate.utils import gather_object

    world, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    sizes: list[tuple[int, int]] = gather_object([(len(prompts), most)])
    every: list[list[int]] = gather_object([list(p) for p in prompts])
    if not every:
        return [], None
    each = math.ceil(len(every) / world)
    mine = every[rank * each : (rank + 1) * each]
    ids, logprobs = _generate(trainer, mine + [every[0]] * (each - len(mine)), max(m for _, m in sizes))
    all_ids: list[list[int]] = gather_object(ids[: len(mine)])
    all_logprobs = None if logprobs is None else gather_object(logprobs[: len(mine)])
    start = sum(n for n, _ in sizes[:rank])
    own = slice(start, start + len(prompts))
    return all_ids[own], None if all_logprobs is None else all_logprobs[own]


def _generate(trainer: Any, prompts: list[list[int]], most: int) -> tuple[list[list[int]], list[list[float]] | None]:
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
    """Keep TRL from printing the whole row of each masked answer, which the log counts as ``masked``, and a wrong warning.

    It says that ``model_init_kwargs`` are ignored; ``models.load`` has used them.
    """
    unwanted = ("All reward functions returned None", "You passed `model_init_kwargs`")
    for name in ("trl.trainer.grpo_trainer", "trl.trainer.sft_trainer", "trl"):
        logging.getLogger(name).addFilter(lambda r: not any(text in str(r.msg) for text in unwanted))
