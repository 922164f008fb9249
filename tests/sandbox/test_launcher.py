"""The launcher passes on what Triton's own would: values, sizes, attributes, hooks and errors. A stand-in plays the driver.

Where Triton is 3.6, both launch on the stand-in, and it must get the same.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import importlib.resources
import struct
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime import build

from kbx_env.sandbox import launcher

STAND_IN = r"""
#include <string.h>
#include "cuda.h"
int launches, code, attributes[8], non_portable, no_context, made_current;
unsigned sizes[7];
unsigned long long values[64];
int count;
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **e) {
  unsigned now[7] = {c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->sharedMemBytes,
                     (unsigned)(unsigned long long)c->hStream, (unsigned)(unsigned long long)f};
  memcpy(sizes, now, sizeof now);
  for (int i = 0; i < count; i++) memcpy(&values[i], p[i], 8);
  memset(attributes, 0, sizeof attributes);
  for (unsigned i = 0; i < c->numAttrs; i++) {
    attributes[2 * i] = c->attrs[i].id;
    attributes[2 * i + 1] = c->attrs[i].value.clusterDim.x;
  }
  launches++;
  return (CUresult)code;
}
CUresult cuGetErrorString(CUresult e, const char **s) { *s = "a launch failure"; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = no_context ? NULL : (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { made_current++; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { non_portable++; return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute a, CUdeviceptr p) {
  *(CUdeviceptr *)out = p;
  return p == 13 ? CUDA_ERROR_INVALID_VALUE : p == 14 ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}
"""
"""A driver that writes down what is launched."""


class StandIn:
    """A built launcher and the driver that it calls."""

    def __init__(self, folder: Path) -> None:
        include = str(importlib.resources.files("triton") / "backends/nvidia/include")
        (folder / "stand_in.c").write_text(STAND_IN)
        made = folder / "libstandincuda.so"
        flags = ["-shared", "-fPIC", f"-I{include}", "-Wl,-soname,libstandincuda.so"]
        subprocess.run(["gcc", *flags, str(folder / "stand_in.c"), "-o", str(made)], check=True)
        self.driver = ctypes.CDLL(str(made))
        self.build = {"library_dirs": [str(folder)], "include_dirs": [include], "libraries": ["libstandincuda.so"]}
        self.plain = launcher.build_launcher(**self.build).launch

    def launch(
        self, letters: str, *arguments: Any, grid: tuple[int, int, int] = (2, 3, 4), metadata: tuple[int, int, int] = (4, 1, 64),
        hooks: tuple[Any, Any] = (None, None), flags: tuple[bool, bool] = (False, False), scratch: tuple[Any, Any] = (None, None),
    ) -> list[bytes]:  # fmt: skip
        """Launch, and return the bytes of each value that the driver has got, the two scratch buffers last."""
        launch = functools.partial(self.plain, letters.encode())
        self.set("count", len([letter for letter in letters if letter not in "x()"]) + 2)
        return self.got(launch, *grid, 5, 7, *flags, *scratch, metadata, "told", *hooks, *arguments)

    def got(self, launch: Callable[..., Any], *arguments: Any) -> list[bytes]:
        """Call a launcher, and return the bytes of each value that the driver has got."""
        launch(*arguments)
        values = (ctypes.c_ulonglong * 64).in_dll(self.driver, "values")
        return [struct.pack("<Q", values[i]) for i in range(self.number("count"))]

    def number(self, name: str) -> int:
        """Return a variable of the driver."""
        return ctypes.c_int.in_dll(self.driver, name).value

    def set(self, name: str, value: int) -> None:
        """Set a variable of the driver."""
        ctypes.c_int.in_dll(self.driver, name).value = value

    def row(self, name: str, length: int) -> list[int]:
        """Return numbers of the driver."""
        return list((ctypes.c_uint * length).in_dll(self.driver, name))


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    folder = tmp_path_factory.mktemp("launcher")
    kept = triton.knobs.cache.dir
    triton.knobs.cache.dir = str(folder / "triton")
    try:
        yield StandIn(folder)
    finally:
        triton.knobs.cache.dir = kept


def _bits(letter: str, value: Any) -> bytes:
    """Return the bytes that a kernel reads for a value, as numpy and struct make them."""
    if letter == "e":
        raw = np.float16(value).tobytes()
    elif letter == "t":
        raw = struct.pack("<f", np.float32(value))[2:]
    elif letter == "P":
        raw = struct.pack("<Q", value)
    else:
        raw = struct.pack("<" + {"b": "B", "L": "q", "K": "Q"}.get(letter, letter), value)
    return raw.ljust(8, b"\0")


_BITS = {"b": (0, 8), "h": (1, 16), "i": (1, 32), "L": (1, 64), "B": (0, 8), "H": (0, 16), "I": (0, 32), "K": (0, 64)}
_INTEGERS = [
    st.tuples(st.just(k), st.integers(-(2 ** (n - 1)) if signed else 0, 2 ** (n - 1) - 1 if signed else 2**n - 1))
    for k, (signed, n) in _BITS.items()
]
_FLOATS = [st.tuples(st.just(k), st.floats(-6e4, 6e4, width=w)) for k, w in (("e", 16), ("t", 32), ("f", 32), ("d", 64))]
_POINTERS = st.tuples(st.just("P"), st.integers(0, 2**64 - 1))
_CONSTANTS = st.tuples(st.just("x"), st.sampled_from([1, None, "text", (1, 2)]))


@given(given_=st.lists(st.one_of(*_INTEGERS, *_FLOATS, _POINTERS, _CONSTANTS), max_size=30))
def test_a_kernel_gets_the_values(stand_in: StandIn, given_: list[tuple[str, Any]]) -> None:
    got = stand_in.launch("".join(k for k, _ in given_), *[v for _, v in given_], scratch=(4096, None))
    assert got[:-2] == [_bits(k, v) for k, v in given_ if k != "x"]
    assert got[-2:] == [_bits("P", 4096), _bits("P", 0)]


def test_a_kernel_gets_the_items_of_tuples(stand_in: StandIn) -> None:
    got = stand_in.launch("i(LL)(x(Pf))()x", 1, (2, 3), ("constant", (4096, 0.5)), (), None)
    assert got[:-2] == [_bits(k, v) for k, v in (("i", 1), ("L", 2), ("L", 3), ("P", 4096), ("f", 0.5))]


def test_a_kernel_gets_sizes_and_attributes(stand_in: StandIn) -> None:
    stand_in.launch("", grid=(6, 5, 1), metadata=(8, 1, 1024))
    assert stand_in.row("sizes", 7) == [6, 5, 1, 256, 1024, 5, 7]
    assert stand_in.row("attributes", 8) == [0] * 8
    stand_in.launch("", grid=(6, 5, 1), metadata=(2, 4, 0), flags=(True, True))
    assert stand_in.row("sizes", 7) == [24, 5, 1, 64, 0, 5, 7]
    dependent, cooperative, cluster, policy = 6, 2, 4, 5  # CUlaunchAttributeID of cuda.h
    assert stand_in.row("attributes", 8) == [dependent, 1, cooperative, 1, cluster, 4, policy, 1]
    assert stand_in.number("non_portable") == 0
    stand_in.launch("", grid=(6, 5, 1), metadata=(2, 16, 0))
    assert stand_in.row("sizes", 7)[0] == 96 and stand_in.number("non_portable") == 1


def test_a_grid_without_programs_launches_nothing(stand_in: StandIn) -> None:
    before = stand_in.number("launches")
    stand_in.launch("i", 3, grid=(0, 1, 1))
    stand_in.launch("i", 3, grid=(1, 1, 0))
    stand_in.launch("i", 3, grid=(-1, 1, 1))
    assert stand_in.number("launches") == before
    stand_in.launch("i", 3, grid=(2**31 - 1, 65535, 1))  # the product does not fit into 32 bits
    assert stand_in.number("launches") == before + 1


def test_tensors_and_objects_give_their_addresses(stand_in: StandIn) -> None:
    buffer = torch.zeros(4)
    given_ = (types.SimpleNamespace(data_ptr=lambda: 4096), None, buffer, torch.empty(0))
    assert stand_in.launch("PPPP", *given_)[:4] == [_bits("P", n) for n in (4096, 0, buffer.data_ptr(), 0)]


@pytest.mark.parametrize("letters, arguments, error, text", [
    ("P", (13,), None, None),  # an address as a number is not looked up
    ("xP", (1, types.SimpleNamespace(data_ptr=lambda: 13)), ValueError, r"Pointer argument \(at 1\) cannot be accessed from"),
    ("x(iP)", (1, (2, types.SimpleNamespace(data_ptr=lambda: 13))), ValueError, r"\(at 2\)"),
    ("P", (types.SimpleNamespace(data_ptr=lambda: 14),), RuntimeError, "Triton Error"),
    ("P", ("text",), TypeError, "Pointer argument must be either uint64 or have data_ptr method"),
    ("P", (types.SimpleNamespace(data_ptr=lambda: "text"),), TypeError, "must return 64-bit int"),
    ("P", (-1,), OverflowError, None),
    ("i", (2**31,), OverflowError, None),
    ("i", (1.5,), TypeError, None),
    ("f", ("text",), TypeError, None),
    ("e", (1e9,), OverflowError, None),
    ("ii", (1,), TypeError, "the kernel takes another number of arguments than the 1"),
    ("i", (1, 2), TypeError, "the kernel takes another number of arguments than the 2"),
    ("i(ii)", (1, (2,)), TypeError, "the kernel takes another number of arguments than the 1"),
    ("i(ii)", (1, (2, 3, 4)), TypeError, "the kernel takes another number of arguments than the 3"),
    ("i(ii)", (1, 2), TypeError, "argument 1 must be a tuple"),
    ("i(ii", (1, (2, 3)), TypeError, "another number of arguments"),
    ("i)i", (1, 2), TypeError, "another number of arguments"),
    ("i" * 513, (1,) * 513, TypeError, "too many arguments"),
    ("?", (1,), ValueError, "no type of an argument"),
])  # fmt: skip
def test_what_cannot_be_passed_is_an_error(
    stand_in: StandIn, letters: str, arguments: tuple[Any, ...], error: type[Exception] | None, text: str | None
) -> None:
    if error is None:
        stand_in.launch(letters, *arguments)
        return
    before = stand_in.number("launches")
    with pytest.raises(error, match=text):
        stand_in.launch(letters, *arguments)
    assert stand_in.number("launches") == before


def test_sizes_and_scratch_that_cannot_be_read_are_errors(stand_in: StandIn) -> None:
    before = stand_in.number("launches")
    with pytest.raises(TypeError):
        stand_in.launch("", metadata=(4, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(at -1\)"):
        stand_in.launch("", scratch=(None, types.SimpleNamespace(data_ptr=lambda: 13)))
    with pytest.raises(TypeError, match="launch takes 14 arguments and more"):
        stand_in.plain(b"", 1)
    assert stand_in.number("launches") == before


def test_an_error_of_the_driver_is_told(stand_in: StandIn) -> None:
    stand_in.set("code", 719)
    try:
        with pytest.raises(RuntimeError, match=r"^Triton Error \[CUDA\]: a launch failure$"):
            stand_in.launch("")
    finally:
        stand_in.set("code", 0)


def test_a_thread_without_a_context_gets_one(stand_in: StandIn) -> None:
    stand_in.set("no_context", 1)
    try:
        before = stand_in.number("made_current")
        stand_in.launch("")
        assert stand_in.number("made_current") == before + 1
    finally:
        stand_in.set("no_context", 0)


def test_arguments_may_let_go_of_the_letters(stand_in: StandIn) -> None:
    launch = functools.partial(stand_in.plain, bytes(bytearray(b"P" + b"i" * 300)))
    kept = []

    def data_ptr() -> int:
        launch.__setstate__((stand_in.plain, (b"",), {}, None))  # type: ignore[attr-defined]
        gc.collect()
        kept.extend(bytes(bytearray(b"?" * 301)) for _ in range(2000))
        return 4096

    before = stand_in.number("launches")
    fixed = (1, 1, 1, 5, 7, False, False, None, None, (4, 1, 64), "told", None, None)
    launch(*fixed, types.SimpleNamespace(data_ptr=data_ptr), *[1] * 300)
    assert stand_in.number("launches") == before + 1


def test_tuples_that_are_too_deep_are_an_error(stand_in: StandIn) -> None:
    depth, deep = 100_000, ()
    for _ in range(depth - 1):
        deep = (deep,)  # type: ignore[assignment]
    with pytest.raises(RecursionError):
        stand_in.launch("(" * depth + ")" * depth, deep)
    while deep:
        deep = deep[0]


def test_nothing_is_kept_of_what_is_passed(stand_in: StandIn) -> None:
    wrong = types.SimpleNamespace(data_ptr=lambda: "text")
    items = (types.SimpleNamespace(data_ptr=lambda: 4096), wrong, 0.5)
    before = [sys.getrefcount(value) for value in (*items, items)]
    for _ in range(100):
        stand_in.launch("P(PPd)x", None, (items[0], None, items[2]), items)
        with pytest.raises(TypeError):
            stand_in.launch("(PPd)x", items, items)
    assert [sys.getrefcount(value) for value in (*items, items)] == before


def test_hooks_are_called_around_the_launch(stand_in: StandIn) -> None:
    before = stand_in.number("launches")
    seen: list[Any] = []
    hooks = [lambda told, name=name: seen.append((name, told, stand_in.number("launches") - before)) for name in ("enter", "exit")]
    stand_in.launch("", hooks=(hooks[0], hooks[1]))
    assert seen == [("enter", "told", 0), ("exit", "told", 1)]
    with pytest.raises(TypeError):
        stand_in.launch("i", "text", hooks=(hooks[0], hooks[1]))
    assert len(seen) == 2, "an argument is wrong: no hook is called"


def test_a_hook_that_raises_ends_the_launch(stand_in: StandIn) -> None:
    before = stand_in.number("launches")

    def wrong(told: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        stand_in.launch("", hooks=(wrong, None))
    assert stand_in.number("launches") == before
    with pytest.raises(KeyError, match="mine"):
        stand_in.launch("", hooks=(None, wrong))


_BYTES = {"b": 1, "B": 1, "h": 2, "H": 2, "e": 2, "t": 2, "i": 4, "I": 4, "f": 4}
"""The bytes of a value by its letter, where they are not eight; Triton's launcher leaves the others as they are."""
_SIGNATURES: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
    ((), ()),
    (("*fp32", "i32", "i64", "constexpr", "fp32"), (4096, -7, 2**40, "constant", 0.1)),
    (("i1", "i8", "i16", "u8", "u16", "u32", "u64"), (True, 200, -300, 255, 65535, 2**32 - 1, 2**64 - 1)),
    (("fp16", "bf16", "fp64", "*i8"), (-1.5, 3.14159, 2.5e-300, None)),
    (("*fp16", ("i32", ("*i8", "constexpr")), "i64"), (4096, (3, (8192, 1)), 5)),
]


@pytest.mark.parametrize("signature, arguments", _SIGNATURES)
@pytest.mark.parametrize("sizes", [(4, 1, 64), (8, 2, 0), (1, 16, 1024)])
@pytest.mark.parametrize("flags", [(False, False), (True, True)])
def test_tritons_launcher_passes_on_the_same(
    stand_in: StandIn, signature: tuple[Any, ...], arguments: tuple[Any, ...], sizes: tuple[int, int, int], flags: tuple[bool, bool]
) -> None:
    driver: Any = importlib.import_module("triton.backends.nvidia.driver")
    if getattr(driver, "_BASE_ARGS_FORMAT", None) != launcher._ARGUMENTS:
        pytest.skip("this Triton builds no launchers")
    source = driver.make_launcher({}, dict(enumerate(signature)), None)
    assert 'dlopen("libcuda.so.1"' in source
    source = source.replace('dlopen("libcuda.so.1"', 'dlopen("libstandincuda.so"')
    theirs = build.compile_module_from_src(src=source, name="__triton_launcher", **stand_in.build).launch
    letters = launcher.letters_of(signature)
    assert letters is not None
    stand_in.set("count", len([letter for letter in letters if letter not in "x()"]) + 2)
    found = []
    for launch in (theirs, functools.partial(stand_in.plain, letters.encode())):
        values = stand_in.got(launch, 3, 4, 5, 5, 7, *flags, 4096, None, sizes, "told", None, None, *arguments)
        used = [_BYTES.get(k, 8) for k in letters if k not in "x()"] + [8, 8]
        found.append(([v[:n] for v, n in zip(values, used, strict=True)], stand_in.row("sizes", 7), stand_in.row("attributes", 8)))
    assert found[0] == found[1]


def test_letters_of_a_signature() -> None:
    kinds = ["*fp32", "*i8", "i1", "i64", "u32", "bf16", "fp16", "fp32", "fp64", "constexpr"]
    assert launcher.letters_of(kinds) == "PPbLItefdx"
    assert launcher.letters_of(["*fp32", ("i32", ("*i8", "constexpr")), ()]) == "P(i(Px))()"
    assert launcher.letters_of(["tensordesc<fp16[64, 64]>"]) is None
    assert launcher.letters_of(["i32", ("tensordesc<fp16[64, 64]>",)]) is None
    assert launcher.letters_of(["i32"] * (launcher.MOST_ARGUMENTS + 1)) is None


def _driver_of_triton(monkeypatch: pytest.MonkeyPatch, arguments: str) -> Any:
    """Make a stand-in for the driver module of Triton, whose launchers say from what they were built."""
    module: Any = types.ModuleType("triton.backends.nvidia.driver")
    module._BASE_ARGS_FORMAT = arguments
    module.library_dirs, module.include_dirs, module.libraries = list, [], []
    module.make_launcher = lambda constants, signature, meta: f"source for {list(signature.values())}"
    module.compile_module_from_src = lambda src, name, **options: types.SimpleNamespace(launch=(name, src))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(launcher, "build_launcher", lambda **options: types.SimpleNamespace(launch=lambda *given_: given_))
    return module


def test_signatures_without_descriptors_are_launched_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _driver_of_triton(monkeypatch, "iiiKKppOOOOOO")
    launcher.install()

    def made(signature: dict[int, Any], name: str = "__triton_launcher") -> Any:
        return module.compile_module_from_src(src=module.make_launcher({}, signature, None), name=name).launch

    assert made({0: "*fp32", 1: "i32"})(1, 2) == (b"Pi", 1, 2)
    assert made({0: "tensordesc<i8[4]>"}) == ("__triton_launcher", "source for ['tensordesc<i8[4]>']")
    assert module.compile_module_from_src(src="int x;", name="cuda_utils").launch == ("cuda_utils", "int x;")


def test_another_triton_keeps_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _driver_of_triton(monkeypatch, "iiiKKOOOOOO")
    own = module.make_launcher
    launcher.install()
    assert module.make_launcher is own


@triton.jit
def _tell(out, flag, small, middle, plain, wide, half, brain, single, absent, several, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    values = tl.where(o == 0, flag.to(tl.float64), 0.0)
    values += tl.where(o == 1, small.to(tl.float64), 0.0) + tl.where(o == 2, middle.to(tl.float64), 0.0)
    values += tl.where(o == 3, plain.to(tl.float64), 0.0) + tl.where(o == 4, wide.to(tl.float64), 0.0)
    values += tl.where(o == 5, half.to(tl.float64), 0.0) + tl.where(o == 6, brain.to(tl.float64), 0.0)
    values += tl.where(o == 7, single.to(tl.float64), 0.0) + tl.where(o == 8, several[0].to(tl.float64), 0.0)
    values += tl.where(o == 9, several[1][1].to(tl.float64), 0.0)
    tl.store(out + o, values)


@pytest.mark.gpu
def test_a_kernel_on_a_gpu_gets_the_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver: Any = importlib.import_module("triton.backends.nvidia.driver")
    if getattr(driver, "_BASE_ARGS_FORMAT", None) != launcher._ARGUMENTS:
        pytest.skip("this Triton builds no launchers")
    for name in ("make_launcher", "compile_module_from_src"):
        monkeypatch.setattr(driver, name, getattr(driver, name))  # put back afterwards
    monkeypatch.setattr(build.knobs.cache, "dir", str(tmp_path))
    launcher.install()
    out = torch.zeros(16, dtype=torch.float64, device="cuda")
    given_ = (True, 200, -30_000, -2_000_000_000, 2**40, 1.5, -3.25, 0.1)
    _tell[(1,)](out, *given_, None, (300, (1, 0.75)), BLOCK=16)
    assert out.tolist()[:10] == pytest.approx([1.0, 200.0, -3e4, -2e9, 2.0**40, 1.5, -3.25, 0.1, 300.0, 0.75], rel=1e-6)
    assert not [p for p in tmp_path.rglob("__triton_launcher*")]
