"""Compiles one small kernel before runners are forked, so that one-time work of a process is done for all of them."""

from __future__ import annotations

import contextlib
import importlib
import tempfile

import torch
import triton
import triton.language as tl
import triton.tools.tensor_descriptor  # noqa: F401  # Triton 3.6 imports it at the first launch
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime import build

from kbx_env.sandbox import firewall, specialised
from kbx_env.sandbox.fake_cuda.driver import TARGETS


@triton.jit
def _nothing(x, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    v = tl.load(x + o, mask=o < n)
    tl.store(x + o, tl.exp(v) + tl.sum(v, 0), mask=o < n)


def warm(target: str = "sm_90") -> None:
    """Compile a kernel for a target (a key of ``TARGETS``) through every stage; half a second, without a GPU."""
    firewall.warm()
    torch.broadcast_shapes((1,), (1,))  # half of all kernels call it, and it imports 500 modules
    specialised.context_of(make_backend(TARGETS[target]), TARGETS[target])
    # Triton runs a program for each of these, and keeps the answer.
    build.platform_key()
    with contextlib.suppress(Exception):  # there is no CUDA driver
        importlib.import_module("triton.backends.nvidia.driver").library_dirs()
    kept = triton.knobs.cache.dir
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        try:
            signature = {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}
            triton.compile(ASTSource(_nothing, signature, {"BLOCK": 128}), target=TARGETS[target])
        finally:
            triton.knobs.cache.dir = kept
