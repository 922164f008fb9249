"""Time the TTIR executor against Triton's interpreter, each in its own process on one core.

Usage: python benchmarks/ttir_speed.py [--only NAME]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
import triton.language as tl

TARGET = 20.0


@triton.jit
def add(x, y, o, n, B: tl.constexpr):
    """Add two vectors."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    tl.store(o + i, tl.load(x + i, mask=m) + tl.load(y + i, mask=m), mask=m)


@triton.jit
def softmax(x, o, n, B: tl.constexpr):
    """Normalise one row per program."""
    r = tl.program_id(0)
    i = tl.arange(0, B)
    v = tl.load(x + r * n + i, mask=i < n, other=float("-inf"))
    e = tl.exp(v - tl.max(v, 0))
    tl.store(o + r * n + i, e / tl.sum(e, 0), mask=i < n)


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Multiply two matrices block by block."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for s in range(0, K, BK):
        x = tl.load(a + i[:, None] * K + (s + k)[None, :], mask=(i < M)[:, None] & (s + k < K)[None, :], other=0.0)
        y = tl.load(b + (s + k)[:, None] * N + j[None, :], mask=(s + k < K)[:, None] & (j < N)[None, :], other=0.0)
        acc = tl.dot(x, y, acc)
    tl.store(c + i[:, None] * N + j[None, :], acc.to(tl.float16), mask=(i < M)[:, None] & (j < N)[None, :])


@triton.jit
def attention(q, k, v, o, n, scale, B: tl.constexpr, D: tl.constexpr):
    """Attend to one block of queries with a running softmax."""
    base = tl.program_id(1) * n * D
    i = tl.program_id(0) * B + tl.arange(0, B)
    d = tl.arange(0, D)
    x = tl.load(q + base + i[:, None] * D + d[None, :])
    top = tl.full((B,), float("-inf"), tl.float32)
    norm = tl.zeros((B,), tl.float32)
    acc = tl.zeros((B, D), tl.float32)
    for s in range(0, n, B):
        j = s + tl.arange(0, B)
        kb = tl.load(k + base + j[None, :] * D + d[:, None])
        w = tl.dot(x, kb) * scale
        new = tl.maximum(top, tl.max(w, 1))
        p = tl.exp(w - new[:, None])
        keep = tl.exp(top - new)
        norm = norm * keep + tl.sum(p, 1)
        vb = tl.load(v + base + j[:, None] * D + d[None, :])
        acc = tl.dot(p.to(vb.dtype), vb, acc * keep[:, None])
        top = new
    tl.store(o + base + i[:, None] * D + d[None, :], (acc / norm[:, None]).to(o.dtype.element_ty))


def _attention(dtype: torch.dtype) -> tuple[Any, ...]:
    q, k, v = torch.randn(3, 2, 4, 128, 64).to(dtype)
    want = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
    args = [q, k, v, torch.zeros_like(q), 128, 64**-0.5]
    return attention, (4, 8), args, {"B": 32, "D": 64}, 3, want


def _case(name: str) -> tuple[Any, ...]:
    """Return kernel, grid, arguments, constants, index of the output and expectation."""
    torch.manual_seed(0)
    if name == "add":
        x, y = torch.randn(2, 1 << 20)
        return add, (1024,), [x, y, torch.zeros_like(x), 1 << 20], {"B": 1024}, 2, x + y
    if name == "softmax":
        x = torch.randn(4096, 1024)
        return softmax, (4096,), [x, torch.zeros_like(x), 1024], {"B": 1024}, 1, torch.softmax(x, 1)
    if name == "matmul":
        a, b = torch.randn(2, 512, 512).half()
        args = [a, b, torch.zeros_like(a), 512, 512, 512]
        return matmul, (8, 8), args, {"BM": 64, "BN": 64, "BK": 32}, 2, a.float() @ b.float()
    return _attention(torch.float16 if name.endswith("fp16") else torch.float32)


NAMES = ["add", "softmax", "matmul", "attention_fp32", "attention_fp16"]
_TYPES = {torch.float32: "*fp32", torch.float16: "*fp16"}


def _executor(fn: Any, grid: tuple[int, ...], args: list[Any], const: dict[str, int]) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kbx_env.backends.ttir import Meter, Region, launch, parse

    kinds = [
        _TYPES[a.dtype] if isinstance(a, torch.Tensor) else "fp32" if isinstance(a, float) else "i32" for a in args
    ]
    sig = dict(zip(fn.arg_names, kinds + ["constexpr"] * len(const), strict=True))
    text = triton.compile(ASTSource(fn, sig, const), target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    regions, flat = [], []
    for k, a in enumerate(args):
        if isinstance(a, torch.Tensor):
            regions.append(Region((k + 1) << 32, a.view(-1).view(torch.uint8).numpy(), f"arg{k}"))
            flat.append((k + 1) << 32)
        else:
            flat.append(a)
    full = (tuple(grid) + (1, 1))[:3]
    module = parse(text)
    return lambda: launch(module, full, flat, regions, Meter())


def child(name: str, which: str) -> None:
    """Measure one case in this process and print the seconds, the best of the runs."""
    torch.set_num_threads(1)
    fn, grid, args, const, out, want = _case(name)
    once = _executor(fn, grid, args, const) if which == "executor" else lambda: fn[grid](*args, **const)
    best = math.inf
    for _ in range(5 if which == "executor" else 1):
        t = time.perf_counter()
        once()
        best = min(best, time.perf_counter() - t)
    error = float((args[out].float() - want).abs().max() / want.abs().max())
    print(json.dumps({"seconds": best, "error": error}))


def main() -> int:
    """Run both sides of every case and print a table."""
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--only", choices=NAMES)
    ap.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    opts = ap.parse_args()
    if opts.child:
        child(*opts.child)
        return 0
    ratios = []
    for name in [opts.only] if opts.only else NAMES:
        rows = {}
        for which in ("executor", "interpreter"):
            env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            env["TRITON_INTERPRET"] = "1" if which == "interpreter" else "0"
            cmd = [sys.executable, __file__, "--child", name, which]
            if hasattr(os, "sched_getaffinity"):
                cmd = ["taskset", "-c", str(max(os.sched_getaffinity(0))), *cmd]
            done = subprocess.run(cmd, env=env, capture_output=True, text=True)
            if done.returncode:
                print(name, which, done.stderr[-800:])
                return 1
            rows[which] = json.loads(done.stdout.splitlines()[-1])
        ratios.append(rows["interpreter"]["seconds"] / rows["executor"]["seconds"])
        print(
            f"{name:16} executor {rows['executor']['seconds']:8.4f} s  interpreter {rows['interpreter']['seconds']:8.3f} s  "
            f"x{ratios[-1]:6.1f}  errors {rows['executor']['error']:.1e} {rows['interpreter']['error']:.1e}",
            flush=True,
        )
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"geometric mean x{mean:.1f}, target x{TARGET:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
