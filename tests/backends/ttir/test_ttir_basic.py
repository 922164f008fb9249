"""Loads, stores, arithmetic, reductions and products against numpy and torch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from ttir_helper import execute, to_ttir

from kbx_env.backends.ttir import OutOfBounds, Unsupported

F = "*fp32"
rng = np.random.default_rng(0)


def randn(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@triton.jit
def add_kernel(x, y, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    tl.store(o + i, tl.load(x + i, mask=m) + tl.load(y + i, mask=m, other=1.5), mask=m)


ADD = {"x": F, "y": F, "o": F, "n": "i32"}


@pytest.mark.parametrize("n", [1, 127, 1000, 4099])
def test_masked_add_and_meter(n: int) -> None:
    x, y, o = randn(n), randn(n), np.zeros(n, np.float32)
    meter = execute(to_ttir(add_kernel, ADD, {"B": 128}), (triton.cdiv(n, 128),), [x, y, o, n])
    assert (o == x + y).all()
    assert (meter.loaded_bytes, meter.stored_bytes, meter.launches) == (8 * n, 4 * n, 1)


def test_small_chunks_give_the_same_result() -> None:
    n = 1000
    x, y, o = randn(n), randn(n), np.zeros(n, np.float32)
    execute(to_ttir(add_kernel, ADD, {"B": 64}), (16,), [x, y, o, n], max_bytes=1 << 10)
    assert (o == x + y).all()


@triton.jit
def bad_kernel(x, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n)
    tl.store(o + i, v)


def test_out_of_bounds_names_the_line() -> None:
    x, o = randn(100), np.zeros(100, np.float32)
    text = to_ttir(bad_kernel, {"x": F, "o": F, "n": "i32"}, {"B": 64})
    with pytest.raises(OutOfBounds) as e:
        execute(text, (2,), [x, o, 100])
    first = bad_kernel.fn.__code__.co_firstlineno
    assert e.value.line == first + 4
    assert e.value.kernel == "bad_kernel"
    assert (e.value.region, e.value.by_bytes, e.value.is_store) == ("arg1", 4, True)
    assert e.value.program_id == (1, 0, 0)


@triton.jit
def softmax_kernel(x, o, n, B: tl.constexpr):
    r = tl.program_id(0)
    i = tl.arange(0, B)
    v = tl.load(x + r * n + i, mask=i < n, other=float("-inf"))
    e = tl.exp(v - tl.max(v, 0))
    tl.store(o + r * n + i, e / tl.sum(e, 0), mask=i < n)


def test_softmax() -> None:
    x = randn(37, 100)
    o = np.zeros_like(x)
    execute(to_ttir(softmax_kernel, {"x": F, "o": F, "n": "i32"}, {"B": 128}), (37,), [x, o, 100])
    np.testing.assert_allclose(o, torch.softmax(torch.tensor(x), 1).numpy(), rtol=1e-5, atol=1e-7)


@triton.jit
def matmul_kernel(a, b, c, M, N, K, B: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr):
    m = tl.program_id(0) * B + tl.arange(0, B)
    n = tl.program_id(1) * B + tl.arange(0, B)
    k = tl.arange(0, B)
    acc = tl.zeros((B, B), ACC)
    for k0 in range(0, K, B):
        x = tl.load(a + m[:, None] * K + k[None, :] + k0, mask=(m[:, None] < M) & (k[None, :] + k0 < K), other=0)
        y = tl.load(b + (k[:, None] + k0) * N + n[None, :], mask=(n[None, :] < N) & (k[:, None] + k0 < K), other=0)
        acc = tl.dot(x, y, acc, out_dtype=ACC, input_precision=PREC)
    tl.store(c + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


@pytest.mark.parametrize(
    ("ptr", "dtype", "precision", "kind"),
    [
        ("*fp16", np.float16, "ieee", "f16*f16->f32"),
        ("*bf16", ml_dtypes.bfloat16, "ieee", "bf16*bf16->f32"),
        ("*fp32", np.float32, "ieee", "f32*f32->f32"),
        ("*fp32", np.float32, "tf32", "tf32"),
        ("*i8", np.int8, "ieee", "i8*i8->i32"),
    ],
)
def test_matmul(ptr: str, dtype: type, precision: str, kind: str) -> None:
    M, N, K, B = 70, 45, 100, 32
    ints = dtype is np.int8
    acc = tl.int32 if ints else tl.float32
    if ints:
        a, b = (rng.integers(-128, 128, s).astype(np.int8) for s in ((M, K), (K, N)))
    else:
        a, b = randn(M, K).astype(dtype), randn(K, N).astype(dtype)
    c = np.zeros((M, N), np.int32 if ints else np.float32)
    sig = {"a": ptr, "b": ptr, "c": "*i32" if ints else "*fp32", "M": "i32", "N": "i32", "K": "i32"}
    meter = execute(to_ttir(matmul_kernel, sig, {"B": B, "ACC": acc, "PREC": precision}), (3, 2), [a, b, c, M, N, K])
    assert meter.dot_kinds == {kind}
    assert meter.dot_flops == 2 * 96 * 64 * 128
    if ints:
        assert (c == a.astype(np.int32) @ b.astype(np.int32)).all()
        return
    want = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(c - want).max() < (0.1 if precision == "tf32" else 1e-4)
    if precision == "tf32":
        assert np.abs(c - want).max() > 1e-4


@triton.jit
def argmax_kernel(x, o, p, n, B: tl.constexpr):
    r = tl.program_id(0)
    i = tl.arange(0, B)
    v = tl.load(x + r * n + i, mask=i < n, other=float("-inf"))
    tl.store(o + r, tl.argmax(v, 0))
    tl.store(p + r, tl.argmin(v, 0))


def test_argmax_and_argmin_take_the_first_of_equals() -> None:
    x = rng.integers(0, 5, (20, 64)).astype(np.float32)
    o, p = np.zeros(20, np.int32), np.zeros(20, np.int32)
    sig = {"x": F, "o": "*i32", "p": "*i32", "n": "i32"}
    execute(to_ttir(argmax_kernel, sig, {"B": 64}), (20,), [x, o, p, 64])
    assert (o == x.argmax(1)).all()
    assert (p == x.argmin(1)).all()


@triton.jit
def layernorm_kernel(x, w, o, n, eps, B: tl.constexpr):
    r = tl.program_id(0)
    s = tl.zeros((B,), tl.float32)
    for k in range(0, n, B):
        i = k + tl.arange(0, B)
        s += tl.load(x + r * n + i, mask=i < n, other=0.0)
    mean = tl.sum(s, 0) / n
    q = tl.zeros((B,), tl.float32)
    for k in range(0, n, B):
        i = k + tl.arange(0, B)
        d = tl.where(i < n, tl.load(x + r * n + i, mask=i < n, other=0.0) - mean, 0.0)
        q += d * d
    inv = 1 / tl.sqrt(tl.sum(q, 0) / n + eps)
    for k in range(0, n, B):
        i = k + tl.arange(0, B)
        v = (tl.load(x + r * n + i, mask=i < n) - mean) * inv * tl.load(w + i, mask=i < n)
        tl.store(o + r * n + i, v, mask=i < n)


def test_layernorm() -> None:
    x, w = randn(9, 300), randn(300)
    o = np.zeros_like(x)
    sig = {"x": F, "w": F, "o": F, "n": "i32", "eps": "fp32"}
    execute(to_ttir(layernorm_kernel, sig, {"B": 64}), (9,), [x, w, o, 300, 1e-5])
    want = torch.nn.functional.layer_norm(torch.tensor(x), (300,), torch.tensor(w), eps=1e-5).numpy()
    np.testing.assert_allclose(o, want, rtol=1e-4, atol=1e-5)


@triton.jit
def asm_kernel(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.inline_asm_elementwise("mov.b32 $0,$1;", "=r,r", [tl.load(x + i)], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(o + i, v)


def test_unsupported_names_operation_and_line() -> None:
    with pytest.raises(Unsupported) as e:
        execute(to_ttir(asm_kernel, {"x": F, "o": F}, {"B": 16}), (1,), [randn(16), randn(16)])
    assert e.value.op == "tt.elementwise_inline_asm"
    assert e.value.line == asm_kernel.fn.__code__.co_firstlineno + 3
