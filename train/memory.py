"""Estimate the GPU memory that training needs, from the shapes in a checkpoint, before the model is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbx_env.errors import UsageError

_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "8bit": 1.0, "4bit": 0.55}
"""Bytes a weight. 4 bits have scales of blocks beside them: 4.127 bits a weight with double quantisation (QLoRA,
arXiv 2305.14314), and the embeddings, which stay in half precision."""
LEAST_RATE = 1.0e-5
"""Learning rate below which weights in half precision hardly move: bfloat16 keeps 8 bits, so that a step smaller than 1/256 of a
weight is lost. At 1e-6, 2 % of the weights moved in 20 steps of Adam."""


@dataclass(frozen=True)
class Sharding:
    """What the processes of a run share. ``None`` for things that every process has whole.

    Attributes:
        name: for messages.
        processes: processes of the run.
        weights: whether weights are divided among them.
        gradients: whether gradients are.
        moments: whether the moments of the optimizer are.
        master: whether the optimizer has a copy of the weights in float32 beside weights in half precision (DeepSpeed).
        offloads: whether moments and master weights are on the CPU.
    """

    name: str = "one process"
    processes: int = 1
    weights: bool = False
    gradients: bool = False
    moments: bool = False
    master: bool = False
    offloads: bool = False


def sharding_of(config: Any, environment: Mapping[str, str] | None = None) -> Sharding:
    """Find out what the processes of this run share.

    Args:
        config: the trainer's configuration; its ``deepspeed_plugin`` is set where DeepSpeed trains.
        environment: as ``accelerate launch`` sets it; by default that of this process.

    Returns:
        The sharding.
    """
    env = os.environ if environment is None else environment
    world = int(env.get("WORLD_SIZE", "1"))
    plugin = getattr(config, "deepspeed_plugin", None)
    if plugin is not None:
        stage, zero = int(plugin.zero_stage), plugin.deepspeed_config.get("zero_optimization", {})
        offloads = str(zero.get("offload_optimizer", {}).get("device", "none")) not in ("none", "None")
        return Sharding(f"ZeRO-{stage}", world, stage >= 3, stage >= 2, stage >= 1, True, offloads)
    if env.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        version = env.get("FSDP_VERSION", "1")
        name = "FSDP_RESHARD_AFTER_FORWARD" if version == "2" else "FSDP_SHARDING_STRATEGY"
        strategy = env.get(name, "true").upper()
        whole = strategy in ("NO_SHARD", "3")
        weights = not whole and strategy not in ("FALSE", "SHARD_GRAD_OP", "2")
        offloads = env.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
        return Sharding(f"FSDP{version}", world, weights or not whole, not whole, not whole, False, offloads)
    return Sharding("DDP" if world > 1 else "one process", world)


def moments_of(optimizer: str, each: float) -> float:
    """Return the bytes a weight that an optimizer keeps.

    Args:
        optimizer: name of ``transformers.training_args.OptimizerNames``, such as ``adamw_torch_fused`` or ``adamw_bnb_8bit``.
        each: bytes of a weight: torch's optimizers keep moments in the dtype of the weights.

    Returns:
        Bytes: two moments for Adam, one for Lion and momentum, factors that do not count for Adafactor; a byte for each moment of
        8-bit optimizers.
    """
    name = optimizer.lower()
    count = 0 if name.startswith(("adafactor", "sgd", "galore", "apollo")) else 1 if "lion" in name or "rmsprop" in name else 2
    return count * (1.0 if "8bit" in name or "4bit" in name else each)


def weights_of(folder: str | Path) -> int:
    """Return the number of weights in the safetensors of a checkpoint; 0 where it has none."""
    from safetensors import safe_open

    count = 0
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names: list[str] = list(tensors.keys())
            for name in names:
                one = 1
                for n in tensors.get_slice(name).get_shape():
                    one *= n
                count += one
    return count


def needed(
    weights: int, dtype: str, lora: bool, vllm: bool = False, *, optimizer: str = "adamw_torch", sharding: Sharding | None = None,
    quantize: str | None = None,
) -> int:  # fmt: skip
    """Return the bytes that weights, gradients and the optimizer's moments need on the GPU of one process.

    That is a lower bound: activations, a layer that is gathered, and the cache of generation come on top.

    Args:
        weights: number of weights.
        dtype: their dtype.
        lora: whether only a LoRA adapter is trained. It is small, so that the frozen weights alone count.
        vllm: whether vLLM keeps a second, whole copy of the weights on the same GPU, in half precision.
        optimizer: the optimizer's name.
        sharding: what the processes share; ``None`` for one process.
        quantize: ``4bit`` or ``8bit`` for quantised frozen weights.

    Returns:
        Bytes.
    """
    s = sharding or Sharding()
    each = _BYTES["bfloat16" if s.master else dtype]
    share = 1.0 / max(1, s.processes)
    total = _BYTES[quantize] if quantize else each
    total *= share if s.weights else 1.0
    if not lora:
        total += each * (share if s.gradients else 1.0)
        kept = 4.0 + moments_of(optimizer, 4.0) if s.master else moments_of(optimizer, each)
        total += 0.0 if s.offloads else kept * (share if s.moments else 1.0)
    return round(weights * (total + (2.0 if vllm else 0.0)))


def check(
    folder: str | Path, dtype: str, lora: bool, vllm: bool, free: int, *, optimizer: str = "adamw_torch",
    sharding: Sharding | None = None, quantize: str | None = None,
) -> None:  # fmt: skip
    """Check that a model can fit on the GPU.

    Args:
        folder: folder of the checkpoint.
        dtype: dtype of the weights.
        lora: whether only a LoRA adapter is trained.
        vllm: whether vLLM runs on the same GPU.
        free: free bytes of the GPU.
        optimizer: the optimizer's name.
        sharding: what the processes share; ``None`` for one process.
        quantize: ``4bit`` or ``8bit`` for quantised frozen weights.

    Raises:
        UsageError: the GPU is too small.
    """
    s = sharding or Sharding()
    need = needed(weights_of(folder), dtype, lora, vllm, optimizer=optimizer, sharding=s, quantize=quantize)
    if need <= free:
        return
    # Not: weights in bfloat16. They would fit, and learn nothing at the rates of full training.
    less = [] if lora else ["lora={r: 32}"]
    less += [] if lora or "8bit" in optimizer else ["trainer.optim=adamw_bnb_8bit"]
    less += [] if s.weights else ["more GPUs with FSDP or ZeRO-3 (train/recipes)"]
    less += ["quantize=4bit"] if lora and not quantize and not s.weights else []
    less += ["vllm=false or a vLLM server"] if vllm else []
    raise UsageError(
        f"{folder} needs at least {need / 2**30:.1f} GiB a GPU for weights, gradients and optimizer ({s.name}, {s.processes} "
        f"process(es)); the GPU has {free / 2**30:.1f} GiB free; use {', '.join(less)} or a smaller model, or memory_check=false "
        "to try all the same"
    )


def still(dtype: str, lora: bool, rate: float, sharding: Sharding | None = None) -> str:
    """Return a warning where weights in half precision would hardly move; empty where they do.

    Args:
        dtype: dtype of the weights.
        lora: whether only a LoRA adapter is trained.
        rate: the learning rate.
        sharding: what the processes share; DeepSpeed keeps weights in float32 beside.

    Returns:
        The warning.
    """
    if lora or dtype == "float32" or rate >= LEAST_RATE or (sharding is not None and sharding.master):
        return ""
    return (
        f"dtype={dtype} with a learning rate of {rate:g}: most steps are smaller than half of the last bit of a weight and are "
        "lost. Use dtype=float32 (computed in bfloat16 all the same), lora={r: 32}, or ZeRO, which keeps weights in float32."
    )
