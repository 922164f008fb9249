"""Records what the host code of a submission does with memory: allocations, fills, copies, launches.

On the CPU tier nothing is computed in a submission's process. Its tensors have the right shapes and addresses but not
the inputs' values. The recorded steps are executed by the engine on the grader's side, which also answers the few scalars
that a submission may read back. The record is not trusted: a wrong one only makes the engine execute other steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kbx_env.backends.engine import argument_to_float, may_copy
from kbx_env.sandbox.fake_cuda.driver import at_home
from kbx_env.sandbox.firewall import Log

HOST_ELEMENTS = 4096
"""Constants that one call may create on the host: sizes, offsets, seeds, small tables."""
_PURE = frozenset("""
empty empty_like empty_strided empty_permuted new_empty new_empty_strided
alias view _unsafe_view _reshape_alias as_strided expand permute transpose t squeeze unsqueeze select slice narrow
split split_with_sizes unbind diagonal detach view_as view_as_real view_as_complex unfold unsafe_split
unsafe_split_with_sizes unsafe_chunk _conj _neg_view resolve_conj resolve_neg is_pinned pin_memory record_stream
stride size numel storage_offset is_contiguous sym_size sym_stride sym_numel sym_storage_offset is_same_size is_set_to
_has_compatible_shallow_copy_type _version output_nr is_leaf transpose_ t_ squeeze_ unsqueeze_ swapaxes_ as_strided_
is_non_overlapping_and_dense _efficientzerotensor set_ can_cast promote_types result_type
""".split())  # fmt: skip
_CONSTANT = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "zero_": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_VALUE = {"full": 1, "full_like": 1, "new_full": 2, "fill_": 1, "fill": 1}
_COPIES = {"clone", "_to_copy", "lift_fresh_copy", "contiguous"}
_HOST = {"lift_fresh", "lift", "scalar_tensor", "random_", "randint"}

_MOVES = _PURE | set(_CONSTANT) | set(_VALUE) | _COPIES | _HOST | {"copy_"}
"""Operations that the engine performs itself, on its own values."""
_FACTORS = {"linalg_lu", "linalg_lu_factor", "linalg_lu_factor_ex", "_linalg_lu"}

Ask = Callable[[dict[str, Any]], Any]
"""Sends a request to the engine through the grader, and returns the values of the answer; its bytes for a ``raw`` request."""


def _repeatable(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> bool:
    """Return whether the engine can repeat an operation: it draws nothing, returns tensors, and its arguments can be sent."""
    left_out = torch.device | torch.layout | torch.memory_format
    named = [v for k, v in kwargs.items() if k != "pin_memory" and not isinstance(v, left_out)]
    returns = any(isinstance(o, torch.Tensor) for o in (out if isinstance(out, tuple | list) else [out]))
    return returns and torch.Tag.nondeterministic_seeded not in func.tags and _sendable([args, named])


def _sendable(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_sendable, value))
    return value is None or isinstance(value, torch.Tensor | torch.dtype | bool | int | float | complex | str)


def unpivoted(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Factorise without pivoting, as a GPU does; torch on the host has no such code.

    Args:
        func: an operation of ``_FACTORS``.
        args: positional arguments.
        kwargs: the others.

    Returns:
        What the operation returns; ``None`` where it pivots.
    """
    a = args[0]
    if kwargs.get("pivot", args[1] if len(args) > 1 else True) is not False:
        return None
    rows, columns = a.shape[-2:]
    k, x = min(rows, columns), a.clone()
    for j in range(k):
        x[..., j + 1 :, j] /= x[..., j, j, None]
        x[..., j + 1 :, j + 1 :] -= x[..., j + 1 :, j, None] * x[..., j, None, j + 1 :]
    if "factor" in func._schema.name:
        pivots = torch.arange(1, k + 1, dtype=torch.int32).expand(*a.shape[:-2], k).contiguous()
        info = torch.zeros(a.shape[:-2], dtype=torch.int32)
        return (x, pivots, info) if func._schema.name.endswith("_ex") else (x, pivots)
    lower = x.tril(-1)[..., :k] + torch.eye(rows, k, dtype=a.dtype)
    return a.new_empty((0,)), lower, x.triu()[..., :k, :].contiguous()


class Recorder(TorchDispatchMode):
    """Records operations while it is entered as a context manager.

    Args:
        log: receives denied operations and host reads.
        ask: sends the steps recorded so far and returns values from the engine.
        allow: also record torch operations that compute, which the engine then repeats.
        values: operations that compute get their operands' values from the engine first (the paper's grading): a shape or an
            error that depends on values is then that of the real call.

    Attributes:
        live: false in calls that are not recorded.
        steps: the steps recorded since the last ``take``, in the form that the engine reads.
        kernels: key to TTIR of kernels that the engine has not got yet.
        inputs: name of each tensor argument to the address of its storage.
    """

    def __init__(self, log: Log, ask: Ask, allow: bool = False, values: bool = False) -> None:
        super().__init__()
        self.log, self._ask, self.allow, self.values = log, ask, allow, values
        self.live = True
        self._begun = False
        self.steps: list[list[Any]] = []
        self._freed: list[int] = []
        self.kernels: dict[str, dict[str, Any]] = {}
        self._sent: set[str] = set()
        self._known: dict[int, Any] = {}
        self._weak: dict[int, StorageWeakRef] = {}
        self.inputs: dict[str, int] = {}
        self._passed: set[int] = set()
        self._host = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its compiler here, to exclude a function that is never compiled.
        return False

    # -- a call ------------------------------------------------------------------------------------
    def begin(self, live: bool, tensors: dict[str, torch.Tensor]) -> None:
        """Start a call: forget storages that have been freed.

        Args:
            live: false if nothing is to be recorded.
            tensors: the call's tensor arguments by name.
        """
        self.live = live
        self._begun = True
        self._host = 0
        # What was recorded while the module was executed goes with the first call. Until then its storages are held, so that
        # no later one takes an address that those steps have yet to allocate.
        if not self.steps:
            self._known.clear()
        for base, weak in list(self._weak.items()):
            if weak.expired():
                del self._weak[base]
                self._freed.append(base)
        self.inputs = {}
        for name, t in tensors.items():
            storage = t.untyped_storage()
            if storage.nbytes():
                self.inputs[name] = base = storage.data_ptr()
                if base in self._weak:  # the address is used again: the storage before was freed
                    self._freed.append(base)
                self._known[base], self._weak[base] = storage, StorageWeakRef(storage)
        self._passed = set(self.inputs.values())

    def take(self) -> dict[str, Any]:
        """Return, and forget, the freed storages, steps and kernels since the last time, with this call's inputs."""
        steps, self.steps = self.steps, []
        kernels, self.kernels = self.kernels, {}
        freed, self._freed = self._freed, []
        return {"free": freed, "inputs": self.inputs, "steps": steps, "kernels": kernels}

    @property
    def _loads(self) -> bool:
        """Whether the module is being executed where operations have values: nothing was launched, so the stand-ins have them."""
        return self.values and not self._begun

    def view(self, t: torch.Tensor) -> list[Any]:
        """Return a tensor as the engine reads it, and record the allocation of a storage that is new.

        Args:
            t: any strided tensor.

        Returns:
            Address of the storage, dtype, offset in bytes, shape, strides.
        """
        storage = t.untyped_storage()
        base = storage.data_ptr()
        if base not in self._known and storage.nbytes():
            if base not in self._weak or self._weak[base].expired():
                # Storages of earlier calls that the host code has let go since: a new one may lie across several of them.
                for gone in [b for b, weak in self._weak.items() if weak.expired()]:
                    self.steps.append(["free", gone])
                    del self._weak[gone]
                self.steps.append(["alloc", base, storage.nbytes()])
            # Held until the call ends, so that no other storage takes its address meanwhile.
            self._known[base], self._weak[base] = storage, StorageWeakRef(storage)
        name = str(t.dtype).removeprefix("torch.")
        return [base, name, t.storage_offset() * t.element_size(), list(t.shape), list(t.stride())]

    def read(self, t: torch.Tensor) -> list[Any]:
        """Return the values of a tensor, row-major, from the engine; zeros while nothing is recorded."""
        if not self.live:
            return [0] * t.numel()
        if self._loads:
            return [v.item() for v in t.detach().reshape(-1).unbind()]
        if not t.numel():
            return []
        return list(self._ask({"want": self.view(t)} | self.take()))

    def launch(
        self, key: str, kernel: dict[str, Any], grid: tuple[int, ...], args: list[Any], names: list[str]
    ) -> None:
        """Record a launch.

        Args:
            key: identifies the compiled kernel; its text is sent once.
            kernel: TTIR and options.
            grid: number of programs in each dimension.
            args: runtime values in the order of the compiled function; addresses for pointers.
            names: the names of ``args``.
        """
        if self.live:
            if key not in self._sent:
                self._sent.add(key)
                self.kernels[key] = kernel
            self.steps.append(["launch", key, list(grid), args, names])

    # -- operations --------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Perform an operation on the stand-in tensors, and record its effect."""
        kwargs = {k: at_home(v) for k, v in (kwargs or {}).items()}
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense":
            return self._scalar(args[0]) if self.live and not self._loads else func(*args, **kwargs)
        if name == "constant_pad_nd":
            return self._pad(*args, **kwargs)
        if name in ("resize_", "resize_as_"):
            return self._resize(func, args, kwargs)
        if name == "copy_" or name in _COPIES:
            self._check(args[0] if name == "copy_" else kwargs.get("dtype"), args[1] if name == "copy_" else args[0])
        computes = self.values and self.live and name not in _MOVES
        if computes and self._begun:
            self._fetch([args, kwargs])
        out = unpivoted(func, args, kwargs) if computes and name in _FACTORS else None
        if out is not None:
            self._note_values(func, args, kwargs, out)
            return out
        out = func(*args, **kwargs)
        if self.live:
            self._note(func, name, args, kwargs, out)
        return out

    def _fetch(self, value: Any) -> None:
        """Copy the values of all tensors among arguments from the engine into the stand-ins."""
        if isinstance(value, torch.Tensor):
            if value.numel() and value.layout == torch.strided:
                base, _, offset, shape, stride = self.view(value)
                size = (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))) * value.element_size()
                data = self._ask({"want": [base, "uint8", offset, [size], [1]], "raw": True} | self.take())
                ctypes.memmove(value.data_ptr(), bytes(data), size)
        elif isinstance(value, dict | tuple | list):
            for v in value.values() if isinstance(value, dict) else value:
                self._fetch(v)

    def _note_values(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the values that an operation gave: its results, and the arguments that it wrote."""
        arguments = {**dict(zip((a.name for a in func._schema.arguments), args)), **kwargs}
        written = [arguments.get(a.name) for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        found: list[Any] = [out, *written]
        while found:
            t = found.pop()
            if isinstance(t, tuple | list):
                found.extend(t)
            elif isinstance(t, torch.Tensor) and t.numel():
                self._data(t)

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Record the effect of an operation that has been performed with result ``out``."""
        if name in _PURE:
            if isinstance(out, torch.Tensor):
                self.view(out)
        elif name in _CONSTANT:
            self._fill(out, _CONSTANT[name])
        elif name in _VALUE:
            self._fill(out, args[_VALUE[name]] if len(args) > _VALUE[name] else kwargs["fill_value"])
        elif name == "copy_":
            self._copy(args[0], args[1])
        elif name in _COPIES:
            if out is not args[0]:
                self._copy(out, args[0])
        elif name in _HOST:
            self._constants(out)
        elif self.values and not _repeatable(func, args, kwargs, out):
            self._note_values(func, args, kwargs, out)
        elif self.allow:
            self._compute(func, name, args, kwargs, out)
        else:
            raise self.log.deny(
                "torch_compute", f"torch operation {name} is not one of allocation, view, copy and fill"
            )

    def _compute(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Record an operation that the engine repeats on the real values."""

        def encode(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return {"t": self.view(x)}
            if isinstance(x, tuple | list):
                return [encode(v) for v in x]
            if isinstance(x, torch.dtype):
                return {"d": str(x).removeprefix("torch.")}
            if isinstance(x, complex):
                return {"c": [x.real, x.imag]}
            if x is None or type(x) in (bool, int, float, str):
                return x
            raise self.log.deny("torch_compute", f"torch operation {name} with a {type(x).__name__}")

        skipped = (torch.device, torch.layout, torch.memory_format)
        named = {k: encode(v) for k, v in kwargs.items() if not isinstance(v, skipped) and k != "pin_memory"}
        outs = [o for o in (out if isinstance(out, tuple | list) else [out]) if isinstance(o, torch.Tensor)]
        overload = func._overloadname or "default"
        self.steps.append(["torch", name, overload, encode(list(args)), named, [self.view(o) for o in outs]])

    def _scalar(self, t: torch.Tensor) -> Any:
        return self.read(t)[0]

    def _fill(self, t: torch.Tensor, value: Any) -> None:
        if not t.numel():
            return
        if isinstance(value, torch.Tensor):
            self._copy(t, value.expand(t.shape))
        elif isinstance(value, bool | int | float):
            self.steps.append(["fill", self.view(t), value])
        else:
            raise self.log.deny("torch_compute", f"fill with a {type(value).__name__}")

    def _check(self, target: Any, source: torch.Tensor) -> None:
        if self.allow:
            return
        dtype = target.dtype if isinstance(target, torch.Tensor) else target or source.dtype
        if may_copy(source.dtype, dtype):
            return
        # The engine decides, because it knows what wrote the bytes; a refusal here can name the line of the source.
        passed = not self.live or not source.numel() or source.untyped_storage().data_ptr() in self._passed
        if passed and argument_to_float(source.dtype, dtype):
            return
        raise self.log.deny(
            "torch_compute",
            f"conversion from {source.dtype} to {dtype} of values that are not an unmodified argument; do it in the kernel "
            "(tl.load(...).to(...))",
        )

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.numel():
            if source.dtype is target.dtype and source.untyped_storage().data_ptr() in self._passed:
                self._passed.add(target.untyped_storage().data_ptr())
            self.steps.append(["copy", self.view(target), self.view(source.expand(target.shape))])

    def _constants(self, t: torch.Tensor) -> None:
        self._host += t.numel()
        if self._host > HOST_ELEMENTS and not self.values:
            raise self.log.deny("host_traffic", f"more than {HOST_ELEMENTS} constants built on the host in one call")
        if t.numel():
            self._data(t)

    def _data(self, t: torch.Tensor) -> None:
        """Record the values that a stand-in has."""
        dense = t.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        data = bytearray(dense.numel())
        ctypes.memmove((ctypes.c_char * len(data)).from_buffer(data), dense.data_ptr(), len(data))
        self.steps.append(["host", self.view(t), data.hex()])

    def _resize(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """Resize in place if the storage is large enough; else move to a new storage and copy the old content."""
        t: torch.Tensor = args[0]
        size = list(args[1].shape if isinstance(args[1], torch.Tensor) else args[1])
        storage = t.untyped_storage()
        held, need = storage.nbytes(), (t.storage_offset() + math.prod(size)) * t.element_size()
        if need <= held or min(size, default=0) < 0:
            out: torch.Tensor = func(*args, **kwargs)
        else:
            # torch would free the old memory during the call, and an address would have two meanings: hence a new storage.
            kept, fresh = torch.empty(0, dtype=torch.uint8).set_(storage), torch.empty(need, dtype=torch.uint8)
            order = kwargs.get("memory_format") or torch.contiguous_format
            stride = torch.empty(size, device="meta", memory_format=order).stride()
            out = t.set_(fresh.untyped_storage(), t.storage_offset(), size, stride)
            if self.live:
                self._copy(fresh[:held], kept)
        if self.live:
            self.view(out)
        return out

    def _pad(self, t: torch.Tensor, pad: list[int], value: Any = 0) -> torch.Tensor:
        """Perform ``constant_pad_nd`` as a fill and a copy."""
        if len(pad) % 2 or len(pad) > 2 * t.dim():
            raise ValueError(f"padding of {len(pad)} numbers for a tensor of {t.dim()} dimensions")
        before, after = [0] * t.dim(), [0] * t.dim()
        for k in range(len(pad) // 2):
            before[-1 - k], after[-1 - k] = pad[2 * k], pad[2 * k + 1]
        shape = [n + b + a for n, b, a in zip(t.shape, before, after, strict=True)]
        if min(shape, default=0) < 0:
            raise ValueError("padding gives a negative size")
        out = torch.full(shape, value, dtype=t.dtype)
        inner, part = out, t
        for d, (b, a, n) in enumerate(zip(before, after, t.shape, strict=True)):
            start, stop = max(0, -b), n - max(0, -a)
            part = part.narrow(d, start, max(0, stop - start))
            inner = inner.narrow(d, max(0, b), part.shape[d])
        inner.copy_(part)
        if self.live:
            self._fill(out, value)
            self._copy(inner, part)
        return out


def _nested(values: list[Any], shape: tuple[int, ...]) -> Any:
    if not shape:
        return values[0]
    step = math.prod(shape[1:])
    return [_nested(values[k * step : (k + 1) * step], shape[1:]) for k in range(shape[0])]


def install(recorder: Recorder) -> None:
    """Replace ``Tensor.tolist``, which reads memory past the dispatcher, by a request to the engine."""

    def tolist(self: torch.Tensor) -> Any:
        recorder.log.read(self.numel(), ".tolist()")
        values = recorder.read(self)
        return _nested(values, tuple(self.shape)) if self.numel() else []

    torch.Tensor.tolist = tolist  # type: ignore[assignment,method-assign]


@contextlib.contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Record within the block; without a recorder (CUDA, where launches are executed directly) do nothing."""
    if recorder is None:
        yield
    else:
        with recorder:
            yield
