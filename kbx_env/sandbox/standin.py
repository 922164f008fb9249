"""A GPU for host code to talk to on a machine without one: Triton's driver, ``torch.cuda``, and ``"cuda"`` as a device.

Host code asks for devices, asserts ``x.is_cuda``, sizes grids by the number of multiprocessors. None of that is
computation, and on a GPU it works; so that a verdict here is the verdict there, it works here as well.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

TARGETS: Mapping[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32), "gfx942": GPUTarget("hip", "gfx942", 64),
}  # fmt: skip
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376, "gfx942": 65536}
"""Bytes of shared memory that one block may use."""
MULTIPROCESSORS = 132
HOST = torch.device("cpu")
CUDA = torch.device("cuda", 0)
real_device: Callable[[torch.Tensor], torch.device] = torch.Tensor.device.__get__  # type: ignore[attr-defined]
"""Where a tensor really is, whatever ``Tensor.device`` says."""


class _Utils:
    def get_device_properties(self, device: int = 0) -> dict[str, int]:
        """What Triton's own utilities tell of the device (an H100 SXM)."""
        return {
            "max_shared_mem": SHARED_LIMIT["sm_90"], "max_num_regs": 65536, "multiprocessor_count": MULTIPROCESSORS,
            "warpSize": 32, "sm_clock_rate": 1980000, "mem_clock_rate": 2619000, "mem_bus_width": 5120,
        }  # fmt: skip


class StandInDriver:
    """Answers what Triton asks of a driver."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.utils = _Utils()

    def get_current_target(self) -> GPUTarget:
        """The target that launches are specialised for."""
        return self.target

    def get_current_device(self) -> int:
        """There is one pretended device."""
        return 0

    def set_current_device(self, device: int) -> None:
        """There is only one."""

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where submissions believe their tensors to be."""
        return CUDA

    def get_device_interface(self) -> Any:
        """What autotuners ask for; never used to time anything here."""
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Nothing can be timed without a GPU: every configuration ties, so the first one is taken."""
        return lambda call, quantiles=None, **kwargs: [1.0, 1.0, 1.0]

    def get_empty_cache_for_benchmark(self) -> None:
        """No cache to flush."""

    def clear_cache(self, cache: Any) -> None:
        """No cache to flush."""


def at_home(value: Any) -> Any:
    """A device argument that names the GPU, as the host; anything else unchanged."""
    if isinstance(value, torch.device):
        return HOST if value.type == "cuda" else value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return HOST
    return value


def _homing(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*(at_home(a) for a in args), **{k: at_home(v) for k, v in kwargs.items()})

    return call


def _properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name="stand-in for an H100", major=9, minor=0, multi_processor_count=MULTIPROCESSORS, warp_size=32,
        total_memory=80 << 30, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        regs_per_multiprocessor=65536, shared_memory_per_block=49152, L2_cache_size=50 << 20, is_integrated=0,
        shared_memory_per_block_optin=SHARED_LIMIT["sm_90"], shared_memory_per_multiprocessor=233472,
    )  # fmt: skip


def install() -> None:
    """Let this process believe in one CUDA device. Tensors stay in host memory."""
    nothing = types.SimpleNamespace(
        cuda_stream=0, device=CUDA, synchronize=lambda: None, wait_stream=lambda s: None, wait_event=lambda e: None
    )
    answers: dict[str, Any] = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "is_initialized": lambda: True, "init": lambda: None,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda device: None,
        "synchronize": lambda device=None: None, "empty_cache": lambda: None, "ipc_collect": lambda: None,
        "get_device_name": lambda device=None: _properties().name, "get_device_properties": _properties,
        "get_device_capability": lambda device=None: (9, 0), "is_bf16_supported": lambda *a, **k: True,
        "device": lambda device=None: contextlib.nullcontext(), "device_of": lambda obj: contextlib.nullcontext(),
        "current_stream": lambda device=None: nothing, "default_stream": lambda device=None: nothing,
        "manual_seed": torch.default_generator.manual_seed, "manual_seed_all": torch.default_generator.manual_seed,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    tensor: Any = torch.Tensor
    tensor.device = property(lambda self: CUDA)
    tensor.is_cuda = property(lambda self: True)
    tensor.is_cpu = property(lambda self: False)
    tensor.get_device = lambda self: 0
    tensor.to = _homing(tensor.to)
    tensor.cuda = lambda self, *args, **kwargs: self
    for name in ("tensor", "as_tensor", "asarray", "Generator"):
        setattr(torch, name, _homing(getattr(torch, name)))
