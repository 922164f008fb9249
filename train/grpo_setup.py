"""Make a trainer from the settings of ``train/grpo.py``; all usage errors are raised here, before anything slow starts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbx_env.baselines.llm.conversation import Conversation, Prompting
from kbx_env.train import memory, models, rows
from kbx_env.train.batch_grader import BatchGrader, check_trains_elsewhere
from kbx_env.train.runs import adapter_of as adapter_of
from kbx_env.train.runs import check_hub, on_cpu, trainer_config, weights_dtype

from kbx_env.errors import UnknownName, UsageError
from kbx_env.extras import install_hint
from kbx_env.spec.catalog import load_tasks
from kbx_env.spec.task import CATEGORIES, Task

if TYPE_CHECKING:
    from datasets import Dataset
    from kbx_env.train.grpo_settings import Settings
    from kbx_env.train.step_metrics import StepMetrics

    from kbx_env.outcome import Outcome

BASELINES = ("group", "leave-one-out")
"""What the return of a turn is compared with."""
MODES = ("single", "multi", "tool")
"""How a model answers: once, over several turns, or by calling a tool."""
DEFAULTS: dict[str, Any] = {
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "max_completion_length": 4096,  # of all turns together; TRL's 256 cuts every kernel
    # Divides sums over tokens by a constant (Dr. GRPO): with a mean over each answer, long wrong answers would cost least. The
    # constant is max_completion_length, so the learning rate scales with it.
    "loss_type": "dr_grpo",
    # Divided by its deviation, a group whose rewards differ by timing noise only would move the model as much as any other.
    "scale_rewards": "none",
    "epsilon_high": 0.28,  # lets rare tokens become likely (DAPO, clip-higher)
    "beta": 0.0,  # no reference model, which would double the memory for weights
    # The tokens of an answer that was cut off are not learnt from. Its reward still counts in its group's mean.
    "mask_truncated_completions": True,
    "logging_steps": 1,
}
"""Defaults of the section ``trainer``, where they differ from TRL's."""
_VLLM = ((0, 22), (0, 31))
"""First and last minor version of vLLM that TRL 1.16 supports."""


def check(s: Settings) -> None:
    """Check the settings that can be checked without the model.

    Args:
        s: the settings.

    Raises:
        UsageError: a setting out of its range, or settings that exclude each other.
        UnknownName: no such mode, episode reward, category or preset.
    """
    from kbx_env.train.rollout import EPISODES

    if s.mode not in MODES:
        raise UnknownName("mode", s.mode, MODES)
    if s.episode not in EPISODES:
        raise UnknownName("episode", s.episode, EPISODES)
    if s.max_turns < 1 or s.samples < 0:
        raise UsageError(f"max_turns is {s.max_turns}, samples is {s.samples}; at least 1, and at least 0")
    _check_turns(s)
    _check_grading(s)
    _check_one_gpu(s)
    models.check_quantised(s.quantize, s.lora is not None, on_cpu(s.trainer))
    for name in s.categories or ():
        if name not in CATEGORIES:
            raise UnknownName("category", name, CATEGORIES)
    if s.categories and not s.curriculum:
        raise UsageError("categories is the order of a curriculum; add curriculum=true, or use category or tasks to choose")
    from kbx_env.rewards.compose import load_preset

    load_preset(s.reward)


def _check_one_gpu(s: Settings) -> None:
    """Check that one process sees one GPU: with several, transformers would spread the model over threads, which TRL refuses."""
    import torch

    seen = 0 if on_cpu(s.trainer) or "WORLD_SIZE" in os.environ else torch.cuda.device_count()
    if seen > 1:
        raise UsageError(
            f"this is one process, and it sees {seen} GPUs; set CUDA_VISIBLE_DEVICES=0 to train on the first one (the others can "
            "grade: grade_gpus=[1]), or start one process for each GPU with accelerate launch"
        )


def _check_turns(s: Settings) -> None:
    """Check the settings of episodes of several turns."""
    if not 0 <= s.gamma <= 1:
        raise UsageError(f"gamma is {s.gamma}; a discount, from 0 to 1")
    if s.per_turn_credit and s.mode != "multi":
        raise UsageError("per_turn_credit is for mode=multi: elsewhere TRL pays a whole answer")
    if s.turn_length is not None and (s.turn_length < 1 or s.mode != "multi"):
        raise UsageError(f"turn_length is {s.turn_length}, mode is {s.mode}; at least 1 token, and for mode=multi alone")
    if s.turn_baseline not in BASELINES:
        raise UnknownName("turn baseline", s.turn_baseline, BASELINES)
    if s.turn_baseline != BASELINES[0] and not s.per_turn_credit:
        raise UsageError(f"turn_baseline={s.turn_baseline} is for per_turn_credit=true")


def _check_grading(s: Settings) -> None:
    """Check the settings that say where and when answers are graded, and what of them."""
    if s.overlap.lower() not in ("auto", "true", "false"):
        raise UnknownName("setting overlap", s.overlap, ("auto", "true", "false"))
    if s.reasoning is not None and (len(s.reasoning) != 2 or not all(s.reasoning)):
        raise UsageError(f"reasoning is {s.reasoning}; two tags, such as ['<think>','</think>'], or null")
    if s.grader is not None and (s.executor == "ray" or s.grade_gpus):
        raise UsageError("grader=URL grades elsewhere: leave out grade_gpus, and executor=ray")
    if s.grade_gpus:
        if s.executor == "ray" or s.backend == "cpu":
            raise UsageError("grade_gpus is for backend=cuda on this machine; on a Ray cluster use per_gpu")
        check_trains_elsewhere(s.grade_gpus)


def tasks_of(s: Settings) -> list[Task]:
    """Return the tasks of a run, in the order of the curriculum if there is one.

    Args:
        s: the settings.

    Returns:
        The tasks.

    Raises:
        UsageError: the split is not train.
        UnknownName: no task matches.
    """
    if s.split != "train":
        raise UsageError(f"split={s.split}: evaluated tasks are never trained on, it would spoil every report; use split=train")
    tasks = load_tasks(category=s.category, split="train", pattern=s.tasks)
    if s.eval_tasks is not None:
        apart = {t.id for t in eval_tasks_of(s)}
        tasks = [t for t in tasks if t.id not in apart]
        if not tasks:
            raise UsageError(f"eval_tasks={s.eval_tasks} has all tasks of tasks={s.tasks}; none is left for training")
    if s.curriculum:
        order = {c: i for i, c in enumerate(s.categories or ())}
        tasks = sorted(tasks, key=lambda t: (order.get(t.category, len(order)), t.difficulty))
    return tasks


def eval_tasks_of(s: Settings) -> list[Task]:
    """Return the tasks that a run evaluates on; none without the setting.

    Args:
        s: the settings.

    Returns:
        Tasks of the train split.

    Raises:
        UnknownName: no task matches.
    """
    return [] if s.eval_tasks is None else load_tasks(split="train", pattern=s.eval_tasks)


def prompting_of(s: Settings) -> Prompting:
    """Return how the model of a run is asked."""
    return Prompting(s.system, s.trainer.get("chat_template_kwargs") or {}, tuple(s.reasoning or ()))


def overlaps(s: Settings, grader: BatchGrader) -> bool:
    """Return whether gradings begin while other answers are still generated.

    Args:
        s: the settings.
        grader: of the run.

    Returns:
        Whether they do. By default not where kernels are timed on the GPU that generates, for which only proofs can begin early.
    """
    disturbs = grader.timed and grader.shares_gpu
    return s.mode != "tool" and (s.overlap.lower() == "true" or (s.overlap.lower() == "auto" and not disturbs))


def uses_vllm(s: Settings) -> bool:
    """Return whether vLLM generates the answers.

    Args:
        s: the settings.

    Returns:
        Whether it does.

    Raises:
        UsageError: ``vllm=true``, and vLLM cannot be used.
    """
    wish = s.vllm.lower()
    if wish not in ("auto", "true", "false"):
        raise UnknownName("setting vllm", s.vllm, ("auto", "true", "false"))
    if wish == "false":
        return False
    why = None
    if on_cpu(s.trainer):
        why = "it needs a GPU"
    elif importlib.util.find_spec("vllm") is None:
        why = "it is not installed: pip install vllm"
    else:
        version = importlib.metadata.version("vllm")
        short = tuple(int(x) for x in version.split(".")[:2])
        if not _VLLM[0] <= short <= _VLLM[1]:
            low, high = (".".join(map(str, v)) for v in _VLLM)
            why = f"vLLM {version} is installed, TRL takes {low} to {high}"
    if why and wish == "true":
        raise UsageError(f"vllm=true: {why}; or vllm=auto")
    if why and "installed, TRL" in why:
        print(f"generating with transformers: {why}")
    return why is None


def config_of_run(s: Settings) -> Any:
    """Return the ``trl.GRPOConfig`` of a run.

    Args:
        s: the settings.

    Returns:
        The configuration.

    Raises:
        UsageError: TRL is not installed, or it refuses the section ``trainer``.
    """
    try:
        from trl import GRPOConfig
    except ImportError as e:
        raise UsageError(f"training needs TRL: {install_hint('trl')}") from e
    from kbx_env.train.logs import mirrors

    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    vllm = uses_vllm(s)
    ours: dict[str, Any] = {
        "output_dir": s.out, "report_to": mirrors(s.wandb, s.out), "seed": s.seed, "shuffle_dataset": not s.curriculum,
        "use_vllm": vllm,
    }  # fmt: skip
    if s.mode == "tool":
        ours["max_tool_calling_iterations"] = s.max_turns
    section = {**DEFAULTS, **s.trainer}
    if s.eval_tasks is not None:
        section = {"eval_strategy": "steps", "eval_steps": 20, "num_generations_eval": 1, **section}
        section.setdefault("per_device_eval_batch_size", section["per_device_train_batch_size"])
    elif section.get("eval_strategy", "no") != "no":
        raise UsageError("trainer.eval_strategy is set, and there is nothing to evaluate on; add eval_tasks=GLOB")
    if vllm:
        section.setdefault("vllm_mode", "colocate")
    config = trainer_config(GRPOConfig, section, **ours)
    check_hub(config)
    if cut := truncated(config):
        print(f"warning: answers are drawn with {cut} but learnt from as if from all tokens. What is cut off is never drawn, so")
        print("never punished, and may grow until answers fall apart (docs/training.md). Of trainer.temperature the loss knows.")
    return config


_SHARES = ("top_p", "typical_p")
"""Sampling settings that keep a share of the probability; 1 keeps all tokens."""


def truncated(config: Any) -> str:
    """Return the sampling settings of a ``trl.GRPOConfig`` that leave tokens out, as text; empty where there are none."""
    known = {n: getattr(config, n) for n in ("min_p", "top_k", "top_p")} | dict(config.generation_kwargs or {})
    least = {n: 0 for n in ("min_p", "top_k", "epsilon_cutoff", "eta_cutoff")}
    cut = [n for n in known if known[n] is not None and (known[n] > least[n] if n in least else n in _SHARES and known[n] < 1)]
    return ", ".join(f"{n}={known[n]}" for n in sorted(cut))


def check_model(s: Settings, config: Any) -> None:
    """Check that the checkpoint can be trained, before workers start and weights are read.

    Args:
        s: the settings.
        config: the ``trl.GRPOConfig`` of the run.

    Raises:
        UsageError: no such checkpoint, no chat template, a template that cannot do the mode, or a GPU that is too small.
    """
    _, dtype = models.init_of(config, s.dtype, weights_dtype(s))
    lora = s.lora is not None
    tokenizer = models.tokenizer_for(s.model, template=s.template, trust_remote_code=bool(config.trust_remote_code))
    if s.mode == "multi" and s.max_turns > 1:
        Conversation(tokenizer, ends_of(s.model), prompting_of(s)).follow_up("x")
    sharding = memory.sharding_of(config)
    if warning := memory.still(dtype, lora, float(config.learning_rate), sharding):
        print(f"warning: {warning}")
    if s.memory_check and not on_cpu(s.trainer):
        import torch

        free, _ = torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", "0")))
        colocated = config.use_vllm and config.vllm_mode == "colocate"
        memory.check(s.model, dtype, lora, colocated, free, optimizer=str(getattr(config.optim, "value", config.optim)),
                     sharding=sharding, quantize=s.quantize)  # fmt: skip


def load(s: Settings, config: Any) -> tuple[Any, Any]:
    """Load model and tokenizer, after ``check_model``.

    Args:
        s: the settings.
        config: the ``trl.GRPOConfig`` of the run.

    Returns:
        The model, on the CPU, and its tokenizer.

    Raises:
        UsageError: weights that cannot be read.
    """
    init, dtype = models.init_of(config, s.dtype, weights_dtype(s))
    return models.load(
        s.model, dtype=dtype, quantize=s.quantize, trust_remote_code=bool(config.trust_remote_code), template=s.template, init=init
    )


def ends_of(folder: str | Path) -> list[int]:
    """Return the tokens that end an answer, by the generation settings of the checkpoint; empty where it has none."""
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(str(folder), local_files_only=True).eos_token_id
    except OSError:
        return []
    return list(found) if isinstance(found, list) else [] if found is None else [found]


def grader_of(s: Settings, grade: Callable[..., Outcome] | None) -> BatchGrader:
    """Start the grader of a run. It keeps its gradings in ``store``, or else in ``out``.

    Args:
        s: the settings.
        grade: replaces the real grader in tests.

    Returns:
        The grader; the caller closes it.
    """
    targets = [t.strip() for t in s.targets.split(",") if t.strip() not in ("", "none")]
    return BatchGrader(
        s.reward, s.backend, workers=s.workers, executor=s.executor, ray_address=s.ray_address,
        per_gpu=s.per_gpu, timing=s.timing, precision=s.precision, torch_ops=s.torch_ops,
        targets=targets, target=s.target, wall=s.wall,
        grading_seed=s.grading_seed, out=s.out, store=s.store, grade=grade,
        gpus=s.grade_gpus or None, url=s.grader, reasoning=s.reasoning or (),
    )  # fmt: skip


def rows_of(s: Settings, tasks: Sequence[Task], backend: str, config: Any, model: Any, tokenizer: Any) -> Dataset:
    """Return the prompts of a run as rows. A task whose prompt leaves no room for an answer is dropped.

    Args:
        s: the settings.
        tasks: the tasks, in order.
        backend: ``cpu`` or ``cuda``: the instruction that is shown.
        config: the ``trl.GRPOConfig`` of the run.
        model: the model.
        tokenizer: its tokenizer.

    Returns:
        At least one row for each task that fits; some tasks have two, to fill the last batch.

    Raises:
        UsageError: no prompt fits.
    """
    fits = _fitting(s, tasks, backend, config, model, tokenizer)
    # The sampler drops an incomplete batch of prompts, so rows are repeated to fill it. An epoch is a whole number of updates, or
    # its last update would have fewer answers.
    parts, steps = config.gradient_accumulation_steps, config.steps_per_generation * config.num_iterations
    each = config.generation_batch_size // config.num_generations * (parts // math.gcd(parts, steps))
    lacking = -len(fits) % each
    more = (fits * (lacking // len(fits) + 1))[:lacking]
    data = rows.prompts([*fits, *more], backend, seed=s.seed, system=s.system)
    if s.curriculum and more:
        order = {t.id: i for i, t in enumerate(fits)}
        names = data["task"]
        data = data.select(sorted(range(len(data)), key=lambda i: order[names[i]]))
    return data


def _fitting(s: Settings, tasks: Sequence[Task], backend: str, config: Any, model: Any, tokenizer: Any) -> list[Task]:
    """Return the tasks whose prompts leave room for an answer."""
    context, conversation = models.context_of(model), Conversation(tokenizer, prompting=prompting_of(s))
    if context is None:
        return list(tasks)
    room = context - config.max_completion_length
    fits = [t for t in tasks if len(conversation.opening(rows.messages(t, backend, s.system))) <= room]
    if len(fits) < len(tasks):
        print(f"dropped {len(tasks) - len(fits)} of {len(tasks)} tasks: prompt and answer are longer than {context} tokens")
    if not fits:
        raise UsageError(
            f"{s.model} takes {context} tokens: no prompt fits beside an answer of {config.max_completion_length}; "
            "lower trainer.max_completion_length"
        )
    return fits


def eval_rows_of(s: Settings, backend: str, config: Any, model: Any, tokenizer: Any) -> Dataset | None:
    """Return the prompts that a run evaluates on, as rows; ``None`` without the setting ``eval_tasks``.

    Args:
        s: the settings.
        backend: ``cpu`` or ``cuda``: the instruction that is shown.
        config: the ``trl.GRPOConfig`` of the run.
        model: the model.
        tokenizer: its tokenizer.

    Returns:
        A row for each task that fits.

    Raises:
        UsageError: no prompt fits.
    """
    tasks = eval_tasks_of(s)
    if not tasks:
        return None
    return rows.prompts(_fitting(s, tasks, backend, config, model, tokenizer), backend, seed=s.seed, system=s.system)


def assemble(
    s: Settings, config: Any, model: Any, tokenizer: Any, adapter: Any, data: Dataset, grader: BatchGrader,
    metrics: StepMetrics | None = None, eval_data: Dataset | None = None,
) -> Any:  # fmt: skip
    """Return the trainer, with the reward function, log and callbacks of its mode.

    Args:
        s: the settings.
        config: the ``trl.GRPOConfig`` of the run.
        model: the model.
        tokenizer: its tokenizer.
        adapter: a ``peft.LoraConfig``, or ``None``.
        data: the prompts, as ``rows_of`` makes them.
        grader: grades the answers.
        metrics: records the episodes; by default into the run's folder.
        eval_data: the prompts to evaluate on, as ``eval_rows_of`` makes them.

    Returns:
        A ``KernelTrainer``.

    Raises:
        UsageError: TRL refuses the settings.
    """
    from kbx_env.train import grpo_trainer
    from kbx_env.train.answer_watch import AnswerWatch
    from kbx_env.train.logs import JsonlLog
    from kbx_env.train.step_metrics import StepMetrics, insert_first

    grpo_trainer.quiet()
    if metrics is None:
        metrics = StepMetrics(s.out, grader, s.samples)
    more: dict[str, Any]
    own = model.generation_config.eos_token_id if model.generation_config is not None else None
    conversation = Conversation(tokenizer, own if isinstance(own, list) else [own], prompting_of(s))
    if s.mode == "multi":
        from kbx_env.train.rollout import Rollout, paid

        more = {"reward_funcs": [paid], "rollout_func": Rollout(
            grader, metrics, conversation, grpo_trainer.generate, s.max_turns, config.max_completion_length,
            models.context_of(model), s.episode, s.gamma if s.per_turn_credit else 1.0, s.turn_length,
        )}  # fmt: skip
    elif s.mode == "tool":
        from kbx_env.train.tool_env import tools

        more = tools(grader, metrics, tokenizer, s.max_turns, s.episode)
    else:
        from kbx_env.train.reward_fn import reward_of

        more = {"reward_funcs": [reward_of(grader, metrics, conversation)]}
    try:
        trainer = grpo_trainer.KernelTrainer(
            model=model, args=config, train_dataset=data, eval_dataset=eval_data, processing_class=tokenizer,
            peft_config=adapter, callbacks=[JsonlLog(s.out)], **more,
        )  # fmt: skip
    except ValueError as e:
        raise UsageError(f"the trainer refuses these settings: {str(e)[:600]}") from e
    trainer.per_turn, trainer.turn_baseline, trainer.step_metrics = s.per_turn_credit, s.turn_baseline, metrics
    if isinstance(grader, BatchGrader) and overlaps(s, grader):  # others, such as those of experiments, change answers
        trainer.watch = AnswerWatch(grader, conversation)
        if s.mode == "multi":
            more["rollout_func"].watch = trainer.watch
    insert_first(trainer, metrics)
    return trainer
