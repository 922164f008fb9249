"""A fake GPU for host code on a machine without one: Triton's driver, ``torch.cuda``, and ``"cuda"`` as a device.

Host code asks for devices, asserts ``x.is_cuda``, and sizes grids by the number of multiprocessors. None of that is
computation, and on a GPU it works. It works here as well, so that both machines give the same verdict.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from kbx_env.sandbox import noop_stubs
from kbx_env.sandbox.fake_cuda import streams

TARGETS: Mapping[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32), "gfx942": GPUTarget("hip", "gfx942", 64),
}  # fmt: skip
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376, "gfx942": 65536}
"""Bytes of shared memory that one block may use."""
MULTIPROCESSORS = 132
NAME = "NVIDIA H200"
"""The name of a real GPU: a submission must not learn from it which tier it runs on."""
MEMORY = 143_156 << 20
CUDA_VERSION = "13.0"
HOST = torch.device("cpu")
CUDA_KIND, CUDA = torch.device("cuda"), torch.device("cuda", 0)
real_device: Callable[[torch.Tensor], torch.device] = torch.Tensor.device.__get__  # type: ignore[attr-defined]
"""Returns the true device of a tensor, whatever the replaced ``Tensor.device`` says."""


class _Utils:
    def get_device_properties(self, device: int = 0) -> dict[str, int]:
        """Return the device properties that Triton's utilities would (an H200)."""
        return {
            "max_shared_mem": SHARED_LIMIT["sm_90"], "max_num_regs": 65536, "multiprocessor_count": MULTIPROCESSORS,
            "warpSize": 32, "sm_clock_rate": 1980000, "mem_clock_rate": 3201000, "mem_bus_width": 6144,
        }  # fmt: skip


class StandInDriver:
    """Implements the interface of a Triton driver."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.utils = _Utils()

    def get_current_target(self) -> GPUTarget:
        """Return the target that launches are specialised for."""
        return self.target

    def get_current_device(self) -> int:
        """Return 0: there is one fake device."""
        return 0

    def set_current_device(self, device: int) -> None:
        """Do nothing: there is one fake device."""

    def get_current_stream(self, device: int) -> int:
        """Return the stream that the host code has chosen."""
        return streams.current().cuda_stream

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Return the compute capability, the same as ``torch.cuda`` does."""
        return (9, 0)

    def get_active_torch_device(self) -> torch.device:
        """Return the device that submissions see on their tensors."""
        return CUDA

    def get_device_interface(self) -> Any:
        """Return the module that autotuners ask for; nothing is timed with it here."""
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Return a benchmark in which all configurations tie, so that the first one is chosen: nothing can be timed."""
        return lambda call, quantiles=None, **kwargs: [1.0, 1.0, 1.0]

    def get_empty_cache_for_benchmark(self) -> None:
        """Return ``None``: there is no cache to flush."""

    def clear_cache(self, cache: Any) -> None:
        """Do nothing: there is no cache to flush."""


def at_home(value: Any) -> Any:
    """Return the host device for an argument that names the GPU, and any other argument unchanged."""
    if isinstance(value, torch.device):
        return HOST if value.type == "cuda" else value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return HOST
    return value


def _placed(value: Any) -> Any:
    """Do the same for an argument that can only be a device, where a number means a GPU."""
    return HOST if isinstance(value, int) and not isinstance(value, bool) else at_home(value)


def _homing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a factory function so that its tensors are in host memory, not pinned."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = _placed(kwargs["device"])
        return function(*(at_home(a) for a in args), **kwargs)

    return call


def _moving(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.to``, whose first argument may be the number of a GPU."""
    home = _homing(function)

    @functools.wraps(function)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return home(self, *map(_placed, args[:1]), *args[1:], **kwargs)

    return call


def _type(real: Any, make: Callable[..., Any]) -> Any:
    """Return a type that replaces one that cannot be subclassed: it makes and recognises objects of the real type."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, real)

        def __subclasscheck__(cls, kind: Any) -> bool:
            return issubclass(kind, real)

    return Meta(real.__name__, (), {"__module__": "torch", "__doc__": real.__doc__})


def _device(real: Any) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("device", kwargs.get("type"))
        if len(args) + len(kwargs) == 1 and isinstance(first, int):
            return real("cuda", first)
        return real(*args, **kwargs)

    return make


def _properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=NAME, major=9, minor=0, multi_processor_count=MULTIPROCESSORS, warp_size=32, total_memory=MEMORY,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
        shared_memory_per_block=49152, shared_memory_per_block_optin=SHARED_LIMIT["sm_90"],
        shared_memory_per_multiprocessor=233472, L2_cache_size=60 << 20, is_integrated=0, is_multi_gpu_board=0,
        clock_rate=1980000, memory_clock_rate=3201000, memory_bus_width=6144, gcnArchName=NAME,
    )  # fmt: skip


_FACTORIES = """
empty empty_like empty_strided empty_permuted zeros zeros_like ones ones_like full full_like scalar_tensor randint
randint_like rand rand_like randn randn_like arange linspace logspace eye tensor as_tensor asarray
""".split()
_METHODS = "new_empty new_empty_strided new_zeros new_ones new_full new_tensor".split()


def install() -> None:
    """Make one CUDA device visible in this process. Tensors stay in host memory."""
    _cuda()
    _tensors()
    noop_stubs.untimed()


def _cuda() -> None:
    """Replace functions of ``torch.cuda``, and other places that describe the GPU."""
    none: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
    zero: Callable[..., int] = lambda *args, **kwargs: 0  # noqa: E731
    yes: Callable[..., bool] = lambda *args, **kwargs: True  # noqa: E731
    seed = torch.default_generator.manual_seed
    answers: dict[str, Any] = {
        "_lazy_init": none, "is_available": yes, "is_initialized": yes, "init": none, "device_count": lambda: 1,
        "current_device": zero, "set_device": none, "synchronize": none, "empty_cache": none, "ipc_collect": none,
        "get_device_name": lambda device=None: NAME, "get_device_properties": _properties,
        "get_device_capability": lambda device=None: (9, 0), "is_bf16_supported": yes, "is_tf32_supported": yes,
        "get_arch_list": lambda: ["sm_80", "sm_90"], "can_device_access_peer": lambda device, peer: False,
        "device": streams.Guard, "device_of": streams.Guard, "_DeviceGuard": streams.Guard, "_exchange_device": zero,
        "_maybe_exchange_device": zero, "Stream": streams.Stream, "ExternalStream": streams.ExternalStream,
        "Event": streams.Event, "stream": streams.within, "StreamContext": streams.within,
        "set_stream": streams.choose, "current_stream": streams.current,
        "default_stream": lambda device=None: streams.DEFAULT, "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda device=None: (MEMORY - (1 << 30), MEMORY), "memory_allocated": zero,
        "max_memory_allocated": zero, "memory_reserved": zero, "max_memory_reserved": zero,
        "reset_peak_memory_stats": none, "manual_seed": seed, "manual_seed_all": seed,
        "initial_seed": torch.default_generator.initial_seed, "default_generators": (torch.default_generator,),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    accelerator = {
        "is_available": yes, "device_count": lambda: 1, "current_accelerator": lambda check_available=False: CUDA_KIND,
        "current_device_index": zero, "current_device_idx": zero, "set_device_index": none, "synchronize": none,
        "current_stream": streams.current, "set_stream": streams.choose, "device_index": streams.Guard,
    }  # fmt: skip
    for name, answer in accelerator.items():
        setattr(torch.accelerator, name, answer)
    torch.version.cuda = CUDA_VERSION
    built = "+cu" + CUDA_VERSION.replace(".", "")
    torch.__version__ = type(torch.__version__)(torch.__version__.partition("+")[0] + built)
    torch.version.__version__ = str(torch.__version__)
    torch.backends.cuda.is_built = yes  # type: ignore[assignment]
    torch.backends.cudnn.is_available = yes  # type: ignore[assignment]


def _tensors() -> None:
    """Replace the device of tensors, and the functions that create and move them."""
    tensor: Any = torch.Tensor
    tensor.device = property(lambda self: CUDA)
    tensor.is_cuda = property(lambda self: True)
    tensor.is_cpu = property(lambda self: False)
    tensor.get_device = lambda self: 0
    tensor.to = _moving(tensor.to)
    tensor.cuda = lambda self, *args, **kwargs: self
    # Pinning makes a copy. Streams need not know here which memory is still in use.
    tensor.pin_memory = lambda self, device=None: self.clone()
    tensor.record_stream = lambda self, stream: None
    for name in _METHODS:
        setattr(tensor, name, _homing(getattr(tensor, name)))
    for name in _FACTORIES:
        setattr(torch, name, _homing(getattr(torch, name)))
    torch.get_device = lambda input: 0  # type: ignore[assignment,unused-ignore]
    for name, make in (("device", _device(torch.device)), ("Generator", _homing(torch.Generator))):
        setattr(torch, name, _type(getattr(torch, name), make))
