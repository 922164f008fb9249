"""Runs a task's reference twice: in the declared dtypes (torch's own answer) and in fp64 (the truth)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kbx_env.task import Case, DeviceArg, DtypeArg, GeneratorArg, Task
from kbx_env.wire import DTYPES


@dataclass(frozen=True)
class Expected:
    """What a right answer looks like."""

    outputs: tuple[torch.Tensor, ...]
    """The truth: fp64 for floating point, as is for integers and booleans."""
    native: tuple[torch.Tensor, ...]
    """Torch's own answer in the declared dtypes, TF32 off: dtypes, shapes, and how large an honest error is."""
    written: Mapping[str, torch.Tensor]
    """The truth of tensors that the call changes in place."""
    native_written: Mapping[str, torch.Tensor]
    aliases: tuple[str | None, ...]
    """Per output: the parameter whose very tensor is returned."""
    is_tuple: bool


@contextlib.contextmanager
def exact_matmul() -> Iterator[None]:
    """IEEE fp32 products in torch: TF32 off everywhere."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


def resolve(args: Mapping[str, Any], device: str, *, exact: bool = False, generator_seed: int = 0) -> dict[str, Any]:
    """Copies of the arguments on a device, markers replaced; ``exact`` turns floating point into fp64."""
    out: dict[str, Any] = {}
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            # as_strided over a copy of the span keeps the layout, which .clone() would not always do
            span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
            flat = value.as_strided((span,), (1,), value.storage_offset()).to(device, copy=True)
            if exact and value.dtype.is_floating_point:
                flat = flat.to(torch.float64)
            out[name] = flat.as_strided(value.shape, value.stride())
        elif isinstance(value, DtypeArg):
            dtype = DTYPES[value.name]
            out[name] = torch.float64 if exact and dtype.is_floating_point else dtype
        elif isinstance(value, DeviceArg):
            out[name] = torch.device(device)
        elif isinstance(value, GeneratorArg):
            out[name] = torch.Generator(device=device).manual_seed(generator_seed)
        else:
            out[name] = value
    return out


def expect(
    task: Task,
    case: Case,
    args: Mapping[str, Any],
    device: str = "cpu",
    *,
    keep: bool | None = None,
    rounding: tuple[str, ...] = (),
    exact: bool = True,
) -> Expected:
    """Evaluate the reference.

    Args:
        task: the task.
        case: the case the arguments were drawn for.
        args: from ``inputs.draw``; not changed.
        device: where to compute.
        keep: what ``_seams.dropout`` does: keep all, drop all, or draw.
        rounding: formulas of ``_schemes.int8_symmetric``, in order.
        exact: also compute the fp64 truth (otherwise the native answer stands in).
    """
    from kbx_env.tasks import _schemes, _seams

    def run(is_exact: bool) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor], tuple[str | None, ...], bool]:
        mine = resolve(args, device, exact=is_exact)
        token = _seams.KEEP.set(keep)
        _schemes.set_rounding(rounding)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = task.reference(**mine)
        finally:
            _seams.KEEP.reset(token)
            _schemes.set_rounding(())
        outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
        written = {n: mine[n] for n in task.written(case.args) if isinstance(mine.get(n), torch.Tensor)}
        aliases = tuple(next((n for n, v in mine.items() if v is o), None) for o in outputs)
        return tuple(o.detach() for o in outputs), written, aliases, isinstance(result, tuple | list)

    with exact_matmul():
        native, native_written, aliases, is_tuple = run(False)
        truth, written, _, _ = run(True) if exact else (native, native_written, aliases, is_tuple)
    return Expected(truth, native, written, native_written, aliases, is_tuple)
