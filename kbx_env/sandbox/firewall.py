"""The dispatcher firewall: in a runner, torch may allocate, view, copy and fill. It may not compute.

Every ``aten`` kernel outside the allow-list is replaced by one that records the operation and raises. This
catches getattr, exec, operators, tensor methods, torch.ops and TorchScript alike, because all of them end in
the dispatcher. Ways out that do not (numpy, DLPack, Python lists) are limited by the host read budget.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import warnings
from collections.abc import Callable, Collection
from threading import get_ident
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
"""Dispatch keys whose kernels compute; on a machine without a GPU the CUDA keys have no kernels."""
SEED_ELEMENTS = 16
"""Numbers that ``random_`` may draw at once: enough for a seed of tl.rand, too few for the samples."""
HOST_READS = 64
"""Scalars that one call may read back to the host."""


class PolicyViolation(RuntimeError):
    """The submission did something forbidden; it is recorded even if the submission catches this exception."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule, self.detail = rule, detail


class Log:
    """The denied operations and the host reads of one runner.

    Args:
        reads: values that one call may read back.
        channel: file descriptor of a pipe to the grader. A denial is written to it before the exception is raised, so
            that no submission can take it back.

    Attributes:
        denied: pairs of rule and detail, the first hundred.
        host_reads: values read back in this call.
    """

    def __init__(self, reads: float = HOST_READS, channel: int | None = None) -> None:
        self.denied: list[tuple[str, str]] = []
        self.host_reads, self._max_reads = 0, reads
        self._channel = channel
        self._served = 0
        self._probed_by: int | None = None

    def attach(self, reads: float, channel: int | None) -> None:
        """Make this the log of one runner: the arguments are those of the class. To be called before a submission is loaded."""
        self._max_reads, self._channel = reads, channel

    def deny(self, rule: str, detail: str) -> PolicyViolation:
        """Record a violation.

        Args:
            rule: the broken rule, such as ``torch_compute``.
            detail: what the submission did; the grader gets the first 300 characters.

        Returns:
            The exception for the caller to raise.
        """
        if len(self.denied) < 100 and self._probed_by != get_ident():
            self.denied.append((rule, detail))
            self._send([rule, detail[:300]])
        return PolicyViolation(rule, detail)

    def served(self) -> None:
        """Send the grader the number of commands served so far; a gap in these numbers counts as tampering."""
        self._served += 1
        self._send(self._served)

    def _send(self, value: Any) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):
                os.write(self._channel, json.dumps(value).encode() + b"\n")

    def read(self, count: int, how: str) -> None:
        """Count values that leave the device for the host.

        Args:
            count: how many are read now.
            how: the operation that reads them, for the message.

        Raises:
            PolicyViolation: one call has read more than the limit.
        """
        self.host_reads += count
        if self.host_reads > self._max_reads:
            raise self.deny("host_traffic", f"{how}: more than {self._max_reads} values read back in one call")


_ahead: list[tuple[str, Log, list[Any]]] = []
"""The device, the log and the handles of ``close_ahead``, if this process or the one that it was forked from has called it."""


def close_ahead(device: str) -> None:
    """Replace the kernels of this process and its later forks, before any of them is a runner.

    To replace 2,600 kernels, on a GPU 3,600, takes 0.1 s and copies the pages of torch's tables, so it is not done again in
    every runner. Afterwards this process cannot compute with torch.

    Args:
        device: of the runners, ``cpu`` or ``cuda``.
    """
    log = Log()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel is replaced
        _ahead.append((device, log, _closed(device, log)))


def may_be_closed_ahead(without: Collection[str]) -> bool:
    """Return whether a runner may be forked from a process that has called ``close_ahead`` for the runner's device.

    Args:
        without: layers that its firewall leaves out, as ``install`` takes them.

    Returns:
        Whether the kernels that ``close_ahead`` replaces are those that its firewall replaces.
    """
    return "firewall" not in without


def log_of_runner(reads: float, channel: int | None) -> Log:
    """Return the log of the runner that this process is: the one to which kernels report that were replaced ahead.

    Args:
        reads: values that one call may read back.
        channel: file descriptor of a pipe to the grader.

    Returns:
        A log without entries.
    """
    log = _ahead[0][1] if _ahead else Log()
    log.attach(reads, channel)
    return log


def _blocker(log: Log, op: str) -> Callable[..., Any]:
    def blocked(*args: Any, **kwargs: Any) -> Any:
        raise log.deny("torch_compute", f"torch operation {op} computes; the work must be done by a Triton kernel")

    return blocked


def install(device: str, log: Log, without: Collection[str] = ()) -> list[Any]:
    """Replace the kernels of this process.

    Args:
        device: ``cpu`` or ``cuda``; on CUDA the kernels of both are closed.
        log: receives every denied operation.
        without: ``firewall`` and ``host`` leave out these layers, for ablations; ``values`` the bound on random numbers.

    Returns:
        Library handles; when they are freed, torch puts the original kernels back.

    Raises:
        RuntimeError: the kernels were closed ahead for another device.
    """
    handles: list[Any] = []
    if "firewall" not in without:
        if _ahead and _ahead[0][0] != device:
            raise RuntimeError(f"torch was closed for {_ahead[0][0]}, and this is a runner of {device}")
        handles += _ahead[0][2] if _ahead and _ahead[0][1] is log else _closed(device, log)
    handles += _guards(device, log, "values" in without)
    if "host" not in without:
        _host_side(log)
    return handles


@functools.cache
def _computing(device: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the operations to close by dispatch key: the same in every fork, so the zygote computes them once."""
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
    """Compute the operations to close once, before runners are forked."""
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


def _guards(device: str, log: Log, unbounded: bool) -> list[Any]:
    """Install checks in front of operations that are allowed up to a limit; ``unbounded`` leaves out that of random numbers."""
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
    for key in [] if unbounded else ["CPU", "CUDA"] if device == "cuda" else ["CPU"]:
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
        if not unbounded:
            lib.impl("random_", seed(aten.random_.default))
            lib.impl("random_.from", seed(getattr(aten.random_, "from")))
            lib.impl("random_.to", seed(aten.random_.to))
        handles.append(lib)
    # Inference mode skips the autograd keys, where the guards sit.
    torch.inference_mode = torch.no_grad  # type: ignore[misc,assignment]
    return handles


def _host_side(log: Log) -> None:
    """Close the ways from a tensor to host memory that do not pass the dispatcher."""

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
    # Other ways to compile and run code.
    closed_functions: list[tuple[Any, str]] = [(torch, "from_numpy"), (torch, "compile"), (torch, "from_dlpack")]
    closed_functions += [(torch._C, n) for n in ("_cuda_jiterator_compile_and_launch_kernel", "_te", "_jit_script_compile")]
    closed_functions += [(torch.cuda, n) for n in ("jiterator", "_compile_kernel")]
    for module, name in closed_functions:
        if not hasattr(module, name):
            continue

        def shut(*args: Any, _name: str = name, **kwargs: Any) -> Any:
            raise log.deny("forbidden_call", f"torch.{_name}")

        setattr(module, name, shut)


def probe(log: Log) -> bool:
    """Whether the firewall still stands: a computation must be refused (and is not counted)."""
    log._probed_by = get_ident()  # what other threads try meanwhile counts
    try:
        torch.empty(1).add_(1.0)
    except PolicyViolation:
        return True
    except Exception:
        return False
    finally:
        log._probed_by = None
    return False
