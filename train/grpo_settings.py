"""The settings of ``train/grpo.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kbx_env.train.settings import MISSING

from kbx_env.envs.answer import REASONING


@dataclass
class Settings:
    """Settings of this script."""

    model: str = MISSING
    """Folder of the checkpoint to start from, such as that of train/sft.py; nothing is fetched from a hub."""
    out: str = MISSING
    """Folder for checkpoints, log and result; must be new or empty unless resume is given."""
    tasks: str = "*"
    """Glob over ids of the train split, comma-separated."""
    category: str | None = None
    """One category only."""
    split: str = "train"
    """train; tasks of the eval split are refused."""
    eval_tasks: str | None = None
    """Glob over ids of the train split, comma-separated: tasks to evaluate on every trainer.eval_steps, and not to train on."""
    system: str | None = None
    """A system message before every task; the trained checkpoint keeps it for reports."""
    template: str | None = None
    """File of a chat template (Jinja) to use in place of the checkpoint's own."""
    reasoning: list[str] | None = field(default_factory=lambda: list(REASONING))
    """Tags that begin and end the reasoning of a thinking model, which is not graded; null: nothing is cut."""
    mode: str = "single"
    """single: one answer; multi: answers and feedback in turn; tool: the model calls a tool (TRL's environment_factory)."""
    max_turns: int = 4
    """Submissions of an episode at most, in the modes multi and tool."""
    turn_length: int | None = None
    """Longest answer in mode multi, in tokens; null: what is left of trainer.max_completion_length, which all turns share."""
    episode: str = "best"
    """Which submission of an episode of several turns counts: best or last."""
    per_turn_credit: bool = False
    """In mode multi: each turn learns from the discounted rewards from it on, instead of the episode's reward."""
    gamma: float = 0.4
    """Discount between turns, with per_turn_credit; 0.4 as in Kevin (arXiv 2507.11948)."""
    turn_baseline: str = "group"
    """With per_turn_credit, what a turn's return is compared with: group: the mean over all turns of the group; leave-one-out:
    the mean over the turns of the other episodes of the group."""
    reward: str = "default"
    """The preset of rewards/presets."""
    backend: str = "auto"
    """Where kernels are graded: cpu, cuda, or auto: cuda where there is a GPU."""
    timing: bool = True
    """Time correct kernels, on a GPU."""
    precision: str = "training"
    """Of these times: training (3 %), or report (1 %), which takes about twice as long."""
    target: float = 1.0
    """Smallest speedup with which a task is solved, where kernels are timed."""
    torch_ops: str = "strict"
    """strict, or allow: wrappers may compute in torch."""
    targets: str = "sm_90"
    """Ahead-of-time targets of every grading, comma-separated, or none."""
    wall: float = 30.0
    """Seconds for one grading, without timing."""
    workers: int | None = None
    """Gradings at a time; null: as many as cores, on a GPU two fewer, on Ray as many as fit on the cluster."""
    executor: str = "process"
    """process: on this machine; ray: on a Ray cluster."""
    ray_address: str | None = None
    """Address of the cluster: local, auto, or HOST:PORT of its head."""
    per_gpu: int | None = None
    """Gradings that share a GPU of the cluster; null: what its cores allow."""
    grade_gpus: list[int] | None = None
    """Numbers of GPUs of this machine that only grade, as nvidia-smi counts them, such as [6,7]; null: each process grades on the
    GPU that it trains on."""
    grader: str | None = None
    """Address of a grading service (kbx serve), such as http://HOST:8300; the token is in the environment variable KBX_TOKEN."""
    overlap: str = "auto"
    """Grade each answer as soon as it ends, while others are generated: auto (unless kernels are timed on the GPU that generates),
    true (there too, but only the proof on the CPU begins early) or false."""
    grading_seed: int | None = None
    """Fixes the inputs of gradings; null: secret and new for each grading, so that none can be memorized."""
    curriculum: bool = False
    """Easy tasks first, in every epoch; otherwise shuffled."""
    categories: list[str] | None = None
    """Order of categories in a curriculum, before difficulty; categories that are not named come last."""
    dtype: str | None = None
    """Dtype of the weights: float32 or bfloat16. null: float32, and for LoRA on a GPU bfloat16."""
    lora: dict[str, Any] | None = None
    """Fields of peft.LoraConfig, such as {r: 32, lora_alpha: 64}; null: all weights are trained."""
    quantize: str | None = None
    """Quantise the frozen weights under a LoRA adapter (QLoRA): 4bit or 8bit; null: do not."""
    memory_check: bool = True
    """Refuse a model that cannot fit on the GPU before it is loaded."""
    vllm: str = "auto"
    """Generate with vLLM: auto (where it is installed and there is a GPU), true or false (transformers)."""
    samples: int = 4
    """Answers of each step that samples.jsonl keeps."""
    resume: str | None = None
    """A checkpoint folder of an earlier run to continue, or last: the newest complete one in out, if there is any."""
    wandb: bool = False
    """Mirror the log to Weights & Biases; without an account it stays in out/wandb."""
    store: str | None = None
    """A file of gradings that several runs may share, so that none repeats another's; null: gradings.sqlite in out."""
    seed: int = 0
    """Seed of sampling, shuffling and new weights."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Fields of trl.GRPOConfig, unchanged: num_generations, learning_rate, max_steps, max_completion_length, ..."""
