"""Attention, small float types, and text that only other compiler versions print."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from ttir_helper import execute, to_ttir

from kbx_env.backends.ttir import TtirError, Unsupported, parse

rng = np.random.default_rng(2)


@triton.jit
def attention_kernel(Q, K, V, O, scale, N, CAUSAL: tl.constexpr, B: tl.constexpr, D: tl.constexpr):  # noqa: E741
    p = tl.program_id(0)
    off = tl.program_id(1) * N * D
    m = p * B + tl.arange(0, B)
    d = tl.arange(0, D)
    q = tl.load(Q + off + m[:, None] * D + d[None, :], mask=m[:, None] < N, other=0.0)
    top = tl.full((B,), float("-inf"), tl.float32)
    total = tl.zeros((B,), tl.float32)
    acc = tl.zeros((B, D), tl.float32)
    # The trip count differs between programs when the mask is causal.
    hi = tl.minimum((p + 1) * B, N) if CAUSAL else N
    for s in range(0, hi, B):
        n = s + tl.arange(0, B)
        k = tl.load(K + off + n[None, :] * D + d[:, None], mask=n[None, :] < N, other=0.0)
        ok = n[None, :] < N
        if CAUSAL:
            ok = ok & (m[:, None] >= n[None, :])
        qk = tl.where(ok, tl.dot(q, k) * scale, float("-inf"))
        new = tl.maximum(top, tl.max(qk, 1))
        a = tl.exp2((top - new) * 1.44269504)
        e = tl.exp2((qk - new[:, None]) * 1.44269504)
        total = total * a + tl.sum(e, 1)
        v = tl.load(V + off + n[:, None] * D + d[None, :], mask=n[:, None] < N, other=0.0)
        acc = tl.dot(e.to(v.dtype), v, acc * a[:, None])
        top = new
    out = (acc / total[:, None]).to(O.dtype.element_ty)
    tl.store(O + off + m[:, None] * D + d[None, :], out, mask=m[:, None] < N)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("ptr", "dtype", "tol"), [("*fp16", np.float16, 2e-3), ("*bf16", ml_dtypes.bfloat16, 2e-2)])
def test_attention(causal: bool, ptr: str, dtype: type, tol: float) -> None:
    H, N, D = 3, 150, 32
    q, k, v = (rng.standard_normal((H, N, D)).astype(dtype) for _ in range(3))
    o = np.zeros_like(q)
    sig = {"Q": ptr, "K": ptr, "V": ptr, "O": ptr, "scale": "fp32", "N": "i32"}
    text = to_ttir(attention_kernel, sig, {"CAUSAL": causal, "B": 32, "D": D})
    execute(text, (5, H), [q, k, v, o, D**-0.5, N])
    t = [torch.tensor(x.astype(np.float32)) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*t, is_causal=causal).numpy()
    assert np.abs(o.astype(np.float32) - want).max() < tol


@triton.jit
def fp8_kernel(a, b, c, B: tl.constexpr):
    i = tl.arange(0, B)
    at = i[:, None] * B + i[None, :]
    z = tl.dot(tl.load(a + at), tl.load(b + at))
    tl.store(c + at, z)
    tl.store(a + at, (z * 100).to(a.dtype.element_ty))


@pytest.mark.parametrize(("ptr", "dtype"), [("*fp8e4nv", ml_dtypes.float8_e4m3fn), ("*fp8e5", ml_dtypes.float8_e5m2)])
def test_fp8_products_are_exact_and_conversion_saturates(ptr: str, dtype: type) -> None:
    a, b = (rng.standard_normal((32, 32)).astype(dtype) for _ in "ab")
    c = np.zeros((32, 32), np.float32)
    want = a.astype(np.float64) @ b.astype(np.float64)
    execute(to_ttir(fp8_kernel, {"a": ptr, "b": ptr, "c": "*fp32"}, {"B": 32}), (1,), [a, b, c])
    np.testing.assert_allclose(c, want, rtol=1e-5, atol=1e-5)
    top = float(ml_dtypes.finfo(dtype).max)
    assert (a == np.clip(c * 100, -top, top).astype(dtype)).all()


@triton.jit
def where_nan_kernel(x, y, o, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(o + i, tl.maximum(a, b))
    tl.store(o + B + i, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(o + 2 * B + i, (a != b).to(tl.float32) + 2 * (a < b).to(tl.float32) + 4 * (a == b).to(tl.float32))


def test_nan_semantics() -> None:
    nan, inf = np.nan, np.inf
    x, y = np.array([nan, 1, nan, inf], np.float32), np.array([1, nan, nan, -inf], np.float32)
    o = np.zeros((3, 4), np.float32)
    execute(to_ttir(where_nan_kernel, {"x": "*fp32", "y": "*fp32", "o": "*fp32"}, {"B": 4}), (1,), [x, y, o])
    np.testing.assert_array_equal(o[0], [1, 1, nan, inf])
    np.testing.assert_array_equal(o[1], [nan, nan, nan, inf])
    np.testing.assert_array_equal(o[2], [1, 1, 1, 1])


BLOCK_POINTER = """
#loc = loc("k.py":3:0)
module {
  tt.func public @k(%x: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("x"(#loc)), %o: !tt.ptr<f32>, %n: i32) {
    %c1 = arith.constant 1 : i64
    %c0 = arith.constant 0 : i32
    %c4 = arith.constant 4 : i32
    %n64 = arith.extsi %n : i32 to i64
    %c8 = arith.constant 8 : i64
    %p = tt.make_tensor_ptr %x, [%n64, %c8], [%c8, %c1], [%c0, %c0] {order = array<i32: 1, 0>} : <tensor<4x8xf32>>
    %q = tt.advance %p, [%c4, %c0] : <tensor<4x8xf32>>
    %v = tt.load %q {boundaryCheck = array<i32: 0, 1>, padding = 2 : i32} : !tt.ptr<tensor<4x8xf32>>
    %d = tt.make_tensor_ptr %o, [%c8, %c8], [%c8, %c1], [%c0, %c0] {order = array<i32: 1, 0>} : <tensor<4x8xf32>>
    tt.store %d, %v {boundaryCheck = array<i32: 0>} : !tt.ptr<tensor<4x8xf32>> loc(#loc)
    tt.return
  }
}
"""


def test_block_pointer_text() -> None:
    x, o = np.arange(48, dtype=np.float32), np.zeros((4, 8), np.float32)
    execute(BLOCK_POINTER, (1,), [x, o, 6])
    assert (o[:2].reshape(-1) == x[32:]).all()
    assert np.isnan(o[2:]).all()


def test_bad_text_is_an_error() -> None:
    with pytest.raises(TtirError):
        parse("module {\n}\n")
    with pytest.raises(Unsupported, match=r"tt\.mystery"):
        execute("module {\n tt.func public @k() {\n %0 = tt.mystery : i32\n tt.return\n }\n}\n", (1,), [])
