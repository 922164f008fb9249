"""Estimate the GPU memory that training needs, from the shapes in a checkpoint, before the model is loaded."""

from __future__ import annotations

from pathlib import Path

from kbx_env.errors import UsageError

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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


def needed(weights: int, dtype: str, lora: bool, vllm: bool = False) -> int:
    """Return the bytes that weights, gradients and Adam's two moments need.

    That is a lower bound: activations and the cache of generation come on top.

    Args:
        weights: number of weights.
        dtype: their dtype.
        lora: whether only a LoRA adapter is trained. It is small, so that the frozen weights alone count.
        vllm: whether vLLM keeps a second copy of the weights on the same GPU, in half precision.

    Returns:
        Bytes.
    """
    each = _BYTES[dtype]
    return weights * ((each if lora else 4 * each) + (2 if vllm else 0))


def check(folder: str | Path, dtype: str, lora: bool, vllm: bool, free: int) -> None:
    """Check that a model can fit on the GPU.

    Args:
        folder: folder of the checkpoint.
        dtype: dtype of the weights.
        lora: whether only a LoRA adapter is trained.
        vllm: whether vLLM runs on the same GPU.
        free: free bytes of the GPU.

    Raises:
        UsageError: the GPU is too small.
    """
    need = needed(weights_of(folder), dtype, lora, vllm)
    if need > free:
        less = "a smaller model" if lora else "lora={r: 32}, dtype=bfloat16 or a smaller model"
        raise UsageError(
            f"{folder} needs at least {need / 2**30:.1f} GiB for weights, gradients and optimizer; the GPU has "
            f"{free / 2**30:.1f} GiB free; use {less}"
        )
