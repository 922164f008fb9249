"""The dispatcher firewall: in a runner, torch may allocate, view, copy and fill. It may not compute.

Every ``aten`` kernel outside the allow-list is replaced by one that records the operation and raises. This
catches getattr, exec, operators, tensor methods, torch.ops and TorchScript alike, because all of them end in
the dispatcher. What does not end there (numpy, DLPack, Python lists) is held back by the host read budget.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Collection
from typing import Any

import torch

# Allocation, views, copies, fills. Nothing here combines two values.
ALLOWED = frozenset("""
empty empty_like empty_strided new_empty new_empty_strided new_zeros new_ones new_full zeros zeros_like ones
ones_like full full_like scalar_tensor fill_ zero_ resize_ resize_as_ set_ lift_fresh lift lift_fresh_copy
_efficientzerotensor empty_permuted
alias view _unsafe_view reshape _reshape_alias as_strided as_strided_ expand expand_as permute transpose
transpose_ t t_ swapaxes movedim moveaxis squeeze squeeze_ unsqueeze unsqueeze_ flatten unflatten select slice
narrow split split_with_sizes chunk unbind diagonal detach detach_ view_as view_as_real view_as_complex unfold
_conj _neg_view resolve_conj resolve_neg broadcast_to atleast_1d atleast_2d atleast_3d contiguous unsafe_split
unsafe_chunk unsafe_split_with_sizes tensor_split real
copy_ clone _to_copy to _copy_from _copy_from_and_resize _pin_memory pin_memory is_pinned
stride size numel storage_offset is_contiguous is_non_overlapping_and_dense sym_size sym_stride sym_numel
sym_storage_offset is_same_size is_set_to _has_compatible_shallow_copy_type _version output_nr is_leaf
retain_grad requires_grad_ set_data data _local_scalar_dense item record_stream _backward
constant_pad_nd pad random_
""".split())  # fmt: skip

KEYS = ("CPU", "CUDA", "SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA", "QuantizedCPU", "QuantizedCUDA",
        "NestedTensorCPU", "NestedTensorCUDA", "MkldnnCPU")  # fmt: skip
"""Dispatch keys whose kernels compute; on a machine without a GPU those of CUDA have none."""
SEED_ELEMENTS = 16
"""``random_`` may draw this many numbers at once: a seed for tl.rand, not the samples."""
HOST_READS = 64
"""Scalars that one call may read back to the host."""


class PolicyViolation(RuntimeError):
    """The submission did what it may not do; recorded even when the submission catches it."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule, self.detail = rule, detail


class Log:
    """What was denied and how much was read back, for one runner.

    Args:
        reads: values that one call may read back.
        channel: a pipe to the grader. What was denied leaves the process before the exception is raised, so that no
            submission can take it back.
    """

    def __init__(self, reads: float = HOST_READS, channel: int | None = None) -> None:
        self.denied: list[tuple[str, str]] = []
        self.host_reads, self.most = 0, reads
        self._channel = channel
        self._told = 0

    def deny(self, rule: str, detail: str) -> PolicyViolation:
        """Record a violation; returns the exception to raise."""
        if len(self.denied) < 100:
            self.denied.append((rule, detail))
            self._tell([rule, detail[:300]])
        return PolicyViolation(rule, detail)

    def served(self) -> None:
        """Tell the grader that one more command was served: silence would be a sign of tampering."""
        self._told += 1
        self._tell(self._told)

    def _tell(self, what: Any) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):
                os.write(self._channel, json.dumps(what).encode() + b"\n")

    def read(self, count: int, how: str) -> None:
        """Count values that left the device for the host."""
        self.host_reads += count
        if self.host_reads > self.most:
            raise self.deny("host_traffic", f"{how}: more than {self.most} values read back in one call")


def _blocker(log: Log, op: str) -> Callable[..., Any]:
    def blocked(*args: Any, **kwargs: Any) -> Any:
        raise log.deny("torch_compute", f"torch operation {op} computes; the work must be done by a Triton kernel")

    return blocked


def install(device: str, log: Log, without: Collection[str] = ()) -> list[Any]:
    """Replace the kernels of this process. Returns handles that must stay alive.

    Args:
        device: ``cpu`` or ``cuda``; on CUDA both sides are closed.
        log: receives every denied operation.
        without: ``firewall`` and ``host`` leave out these layers, to see what they are worth.
    """
    handles: list[Any] = []
    if "firewall" not in without:
        handles += _closed(device, log)
    handles += _guards(device, log)
    if "host" not in without:
        _host_side(log)
    return handles


@functools.cache
def _computing(device: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """By dispatch key the operations to close: the same in every fork, so the zygote asks once for all."""
    keys = [k for k in KEYS if device == "cuda" or "CUDA" not in k]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    found = []
    for key in keys:
        # Composite kernels reach vendor libraries (mkldnn_convolution) without another dispatch.
        plain = key in ("CPU", "CUDA")

        def shut(name: str, key: str = key, plain: bool = plain) -> bool:
            base = name[6:].split(".")[0]
            if plain and base in ALLOWED or base == "randint":
                return False
            return has(name, key) or plain and has(name, "CompositeExplicitAutograd")

        found.append((key, tuple(n[6:] for n in names if shut(n))))
    return tuple(found)


def warm() -> None:
    """Find out once what every fork needs."""
    for device in ("cpu", "cuda"):
        _computing(device)


def _closed(device: str, log: Log) -> list[Any]:
    handles: list[Any] = []
    for key, names in _computing(device):
        lib = torch.library.Library("aten", "IMPL", key)
        handles.append(lib)
        for name in names:
            lib.impl(name, _blocker(log, name.split(".")[0]))
    return handles


def _guards(device: str, log: Log) -> list[Any]:
    """Checks in front of operations that are allowed within bounds."""
    aten = torch.ops.aten
    below = torch._C._AutoDispatchBelowAutograd

    def scalar(x: Any) -> Any:
        log.read(1, ".item()")
        with below():
            return aten._local_scalar_dense.default(x)

    def seed(op: Any) -> Callable[..., Any]:
        def draw(x: Any, *args: Any, **kwargs: Any) -> Any:
            if x.numel() > SEED_ELEMENTS:
                raise log.deny("torch_compute", f"random_ on {x.numel()} elements; at most {SEED_ELEMENTS} (a seed)")
            with below():
                return op(x, *args, **kwargs)

        return draw

    def randint(low: int, high: int, size: Any, generator: Any, options: dict[str, Any]) -> Any:
        options = {"dtype": torch.int64} | {k: v for k, v in options.items() if v is not None}
        out = torch.empty(size, **options)
        if out.numel() > SEED_ELEMENTS:
            raise log.deny("torch_compute", f"randint of {out.numel()} elements; at most {SEED_ELEMENTS} (a seed)")
        return out.random_(low, high, generator=generator)

    handles = []
    for key in ["CPU", "CUDA"] if device == "cuda" else ["CPU"]:
        # Factories skip the autograd keys, so randint needs a kernel of its own.
        lib = torch.library.Library("aten", "IMPL", key)
        lib.impl("randint", lambda high, size, **k: randint(0, high, size, None, k))
        lib.impl("randint.generator", lambda high, size, *, generator, **k: randint(0, high, size, generator, k))
        lib.impl("randint.low", lambda low, high, size, **k: randint(low, high, size, None, k))
        lib.impl(
            "randint.low_generator", lambda low, high, size, *, generator, **k: randint(low, high, size, generator, k)
        )
        handles.append(lib)
    for key in ["AutogradCPU", "AutogradCUDA"] if device == "cuda" else ["AutogradCPU"]:
        lib = torch.library.Library("aten", "IMPL", key)
        lib.impl("_local_scalar_dense", scalar)
        lib.impl("random_", seed(aten.random_.default))
        lib.impl("random_.from", seed(getattr(aten.random_, "from")))
        lib.impl("random_.to", seed(aten.random_.to))
        handles.append(lib)
    # Inference mode skips the autograd keys, where the guards sit.
    torch.inference_mode = torch.no_grad  # type: ignore[misc,assignment]
    return handles


def _host_side(log: Log) -> None:
    """Close the doors from a tensor to host memory that do not pass the dispatcher."""

    def closed(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise log.deny("host_traffic", f"Tensor.{name} moves values to the host")

        return method

    for name in ("numpy", "__array__", "__dlpack__", "__array_interface__", "share_memory_", "apply_", "map_"):
        setattr(torch.Tensor, name, closed(name))
    plain = torch.Tensor.tolist

    def tolist(self: Any) -> Any:
        log.read(self.numel(), ".tolist()")
        return plain(self)

    torch.Tensor.tolist = tolist  # type: ignore[assignment,method-assign]
    # Other ways to compile and run code of one's own.
    doors: list[tuple[Any, str]] = [(torch, "from_numpy"), (torch, "compile"), (torch, "from_dlpack")]
    doors += [(torch._C, n) for n in ("_cuda_jiterator_compile_and_launch_kernel", "_te", "_jit_script_compile")]
    doors += [(torch.cuda, n) for n in ("jiterator", "_compile_kernel")]
    for module, name in doors:
        if not hasattr(module, name):
            continue

        def shut(*args: Any, _name: str = name, **kwargs: Any) -> Any:
            raise log.deny("forbidden_call", f"torch.{_name}")

        setattr(module, name, shut)


def probe(log: Log) -> bool:
    """Whether the firewall still stands: a computation must be refused (and is not counted)."""
    kept, channel = list(log.denied), log._channel
    log._channel = None
    try:
        torch.empty(1).add_(1.0)
    except PolicyViolation:
        return True
    except Exception:
        return False
    finally:
        log.denied[:], log._channel = kept, channel
    return False
