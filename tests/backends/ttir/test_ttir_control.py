"""Control flow, atomics, random numbers, scans, sorting and shape operations."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from ttir_helper import execute, to_ttir

from kbx_env.backends.ttir import DeviceAssert

F = "*fp32"
rng = np.random.default_rng(1)


def randn(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@triton.jit
def histogram_kernel(x, o, cnt, tickets, n, B: tl.constexpr):
    p = tl.program_id(0)
    i = p * B + tl.arange(0, B)
    m = i < n
    v = tl.load(x + i, mask=m, other=0)
    tl.atomic_add(o + v, 1, mask=m)
    tl.store(tickets + p, tl.atomic_add(cnt, 2))
    tl.atomic_max(cnt + 1, p)
    tl.atomic_add((cnt + 2).to(tl.pointer_type(tl.float32)), 0.5)


def test_atomics() -> None:
    x = rng.integers(0, 10, 1000).astype(np.int32)
    o, cnt, tickets = np.zeros(10, np.int32), np.zeros(3, np.int32), np.zeros(8, np.int32)
    sig = {"x": "*i32", "o": "*i32", "cnt": "*i32", "tickets": "*i32", "n": "i32"}
    meter = execute(to_ttir(histogram_kernel, sig, {"B": 128}), (8,), [x, o, cnt, tickets, 1000])
    assert (o == np.bincount(x, minlength=10)).all()
    assert (tickets == np.arange(8) * 2).all()
    assert cnt[:2].tolist() == [16, 7]
    assert cnt[2:].view(np.float32)[0] == 4.0
    assert meter.atomics == 1000 + 24


@triton.jit
def lock_kernel(lock, o):
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(o, tl.load(o) * 2 + 1)
    tl.atomic_xchg(lock, 0)


def test_spin_lock() -> None:
    lock, o = np.zeros(1, np.int32), np.zeros(1, np.int32)
    execute(to_ttir(lock_kernel, {"lock": "*i32", "o": "*i32"}), (10,), [lock, o], deadline=time.process_time() + 20)
    assert o[0] == 1023


@triton.jit
def collatz_kernel(o, n):
    p = tl.program_id(0)
    if p >= n:
        return
    v = p + 1
    k = 0
    while v != 1:
        if v % 2 == 0:
            v = v // 2
        else:
            v = 3 * v + 1
        k += 1
    s = 0
    for j in range(p, n, 3):
        if j % 2 == 1:
            s += j
            tl.atomic_add(o + n, 1)
    tl.store(o + p, k * 1000 + s)


def test_divergent_loops_and_early_return() -> None:
    n = 40
    o = np.zeros(n + 1, np.int32)
    execute(to_ttir(collatz_kernel, {"o": "*i32", "n": "i32"}), (n + 9,), [o, n])
    hits = 0
    for p in range(n):
        v, k = p + 1, 0
        while v != 1:
            v, k = (v // 2 if v % 2 == 0 else 3 * v + 1), k + 1
        odd = [j for j in range(p, n, 3) if j % 2]
        hits += len(odd)
        assert o[p] == k * 1000 + sum(odd)
    assert o[n] == hits


@triton.jit
def pick(x, n):
    if n > 3:
        return x * 2
    return x + 1


@triton.jit(noinline=True)
def outlined(x, n):
    return x * 2 + n, x + 1


@triton.jit
def calls_kernel(o, B: tl.constexpr):
    p = tl.program_id(0)
    v = pick(tl.arange(0, B), p)
    a, b = outlined(p, 3)
    if p > 2:
        a += 100
        v = v * 3
    tl.store(o + p * B + tl.arange(0, B), v + a * b)


def test_calls_and_diverging_branches() -> None:
    o = np.zeros((6, 16), np.int32)
    execute(to_ttir(calls_kernel, {"o": "*i32"}, {"B": 16}), (6,), [o])
    for p in range(6):
        v = np.arange(16) * 2 if p > 3 else np.arange(16) + 1
        a = p * 2 + 3 + (100 if p > 2 else 0)
        assert (o[p] == v * (3 if p > 2 else 1) + a * (p + 1)).all()


@triton.jit
def assert_kernel(o):
    p = tl.program_id(0)
    tl.device_assert(p < 5, "too many")
    tl.store(o + p, p)


def test_device_assert() -> None:
    with pytest.raises(DeviceAssert, match="too many") as e:
        execute(to_ttir(assert_kernel, {"o": "*i32"}, debug=True), (9,), [np.zeros(9, np.int32)])
    assert e.value.program_id == (5, 0, 0)
    assert e.value.line == assert_kernel.fn.__code__.co_firstlineno + 3


def test_deadline() -> None:
    with pytest.raises(TimeoutError):
        execute(to_ttir(assert_kernel, {"o": "*i32"}), (4,), [np.zeros(9, np.int32)], deadline=time.process_time() - 1)


@triton.jit
def rand_kernel(o, seed, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.rand(seed, i))


def philox(seed: int, offset: np.ndarray) -> np.ndarray:
    u = np.uint64
    low = u(0xFFFFFFFF)
    c = [offset.astype(u), *[np.zeros_like(offset, u)] * 3]
    k0, k1 = u(seed & 0xFFFFFFFF), u(seed >> 32)
    for _ in range(10):
        a, b = u(0xD2511F53) * c[0], u(0xCD9E8D57) * c[2]
        c = [(b >> u(32)) ^ c[1] ^ k0, b & low, (a >> u(32)) ^ c[3] ^ k1, a & low]
        k0, k1 = (k0 + u(0x9E3779B9)) & low, (k1 + u(0xBB67AE85)) & low
    x = c[0].astype(np.uint32).view(np.int32)
    x = np.where(x < 0, -x - 1, x)
    return x.astype(np.float32) * np.float32(4.6566127342e-10)


@pytest.mark.parametrize("seed", [0, 1234, (7 << 32) + 5])
def test_rand_is_bit_exact(seed: int) -> None:
    o = np.zeros(256, np.float32)
    with np.errstate(over="ignore"):
        want = philox(seed, np.arange(256))
    execute(to_ttir(rand_kernel, {"o": F, "seed": "i64"}, {"B": 64}), (4,), [o, seed])
    assert (o == want).all()


@triton.jit
def horner(a, b):
    return a * 2 + b


@triton.jit
def affine(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def shapes_kernel(x, o, B: tl.constexpr):
    r = tl.program_id(0)
    i = tl.arange(0, B)
    v = tl.load(x + r * B + i)
    base = o + r * B * 8 + i
    tl.store(base, tl.cumsum(v, 0))
    tl.store(base + B, tl.sort(v))
    tl.store(base + 2 * B, tl.sort(v, descending=True))
    a, b = tl.split(tl.join(v, v * 2))
    tl.store(base + 3 * B, b - a)
    tl.store(base + 4 * B, tl.reshape(tl.trans(tl.reshape(v, (4, B // 4))), (B,)))
    tl.store(base + 5 * B, tl.cumsum(v, 0, reverse=True))
    s, t = tl.associative_scan((v, v), 0, affine)
    tl.store(base + 6 * B, t)
    tl.store(base + 7 * B, tl.gather(v, B - 1 - i, 0))


def test_scan_sort_trans_join_split_gather() -> None:
    B = 32
    x = randn(5, B)
    o = np.zeros((5, 8, B), np.float32)
    execute(to_ttir(shapes_kernel, {"x": F, "o": F}, {"B": B}), (5,), [x, o])
    np.testing.assert_allclose(o[:, 0], x.cumsum(1), rtol=1e-4, atol=1e-5)
    assert (o[:, 1] == np.sort(x, 1)).all()
    assert (o[:, 2] == np.sort(x, 1)[:, ::-1]).all()
    assert (o[:, 3] == x).all()
    assert (o[:, 4] == x.reshape(5, 4, B // 4).transpose(0, 2, 1).reshape(5, B)).all()
    np.testing.assert_allclose(o[:, 5], x[:, ::-1].cumsum(1)[:, ::-1], rtol=1e-4, atol=1e-5)
    want = np.zeros_like(x)
    acc = np.zeros(5)
    for j in range(B):
        acc = acc * x[:, j] + x[:, j]
        want[:, j] = acc
    np.testing.assert_allclose(o[:, 6], want, rtol=1e-3, atol=1e-5)
    assert (o[:, 7] == x[:, ::-1]).all()


@triton.jit
def absmax(a, b):
    return tl.where(tl.abs(a) + 1.0 > tl.abs(b) + 1.0, a, b)


@triton.jit
def math_kernel(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(o + i, tl.erf(v))
    tl.store(o + B + i, libdevice.tanh(v))
    tl.store(o + 2 * B + i, tl.sigmoid(v))
    tl.store(o + 3 * B + i, v.to(tl.float16).to(tl.float32))
    tl.store(o + 4 * B + i, v.to(tl.bfloat16).to(tl.float32))
    tl.store(o + 5 * B + i, v.to(tl.float8e5).to(tl.float32))
    tl.store(o + 6 * B + i, (v * 300).to(tl.int8).to(tl.float32))
    tl.store(o + 7 * B + i, tl.reduce(v, 0, absmax) + tl.zeros((B,), tl.float32))
    tl.store(o + 8 * B + i, tl.histogram(tl.abs(v * 4).to(tl.int32), B).to(tl.float32))
    tl.store(o + 9 * B + i, tl.clamp(v, -0.5, 0.5) + tl.div_rn(v, v + 3) + tl.sqrt_rn(tl.abs(v)) + tl.fma(v, v, v))


def test_math_and_conversions() -> None:
    B = 64
    # Distinct magnitudes: the reduction by largest magnitude has no winner among equals of either sign.
    x = np.random.default_rng(7).permutation(np.linspace(-2.43, 2.5, B)).astype(np.float32)
    o = np.zeros((10, B), np.float32)
    execute(to_ttir(math_kernel, {"x": F, "o": F}, {"B": B}), (1,), [x, o])
    t = torch.tensor(x)
    np.testing.assert_allclose(o[0], torch.erf(t), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(o[1], torch.tanh(t), rtol=1e-5)
    np.testing.assert_allclose(o[2], torch.sigmoid(t), rtol=1e-5)
    assert (o[3] == t.half().float().numpy()).all()
    assert (o[4] == t.bfloat16().float().numpy()).all()
    assert (o[5] == t.to(torch.float8_e5m2).float().numpy()).all()
    assert (o[6] == (x * 300).astype(np.int16).astype(np.int8)).all()
    assert (o[7] == x[np.abs(x).argmax()]).all()
    assert (o[8] == np.bincount(np.abs(x * 4).astype(int), minlength=B)).all()
    want = np.clip(x, -0.5, 0.5) + x / (x + 3) + np.sqrt(np.abs(x)) + x * x + x
    np.testing.assert_allclose(o[9], want, rtol=1e-5, atol=1e-6)


@triton.jit
def ints_kernel(x, y, o, B: tl.constexpr):
    i = tl.arange(0, B)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(o + i, a // b)
    tl.store(o + B + i, a % b)
    tl.store(o + 2 * B + i, (a.to(tl.uint32, bitcast=True) // b.to(tl.uint32, bitcast=True)).to(tl.int32))
    tl.store(o + 3 * B + i, (a >> 3) ^ (a << 2) | (b & 7))
    tl.store(o + 4 * B + i, tl.umulhi(a, b))
    tl.store(o + 5 * B + i, (a.to(tl.uint32, bitcast=True) > b.to(tl.uint32, bitcast=True)).to(tl.int32))
    tl.store(o + 6 * B + i, a * b)


def test_integers() -> None:
    B = 64
    x = rng.integers(-(2**31), 2**31, B).astype(np.int32)
    y = (rng.integers(1, 1000, B) * rng.choice([-1, 1], B)).astype(np.int32)
    o = np.zeros((7, B), np.int32)
    execute(to_ttir(ints_kernel, {"x": "*i32", "y": "*i32", "o": "*i32"}, {"B": B}), (1,), [x, y, o])
    a, b = x.astype(np.int64), y.astype(np.int64)
    ua, ub = x.view(np.uint32), y.view(np.uint32)
    q = np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))
    assert (o[0] == q).all()
    assert (o[1] == a - q * b).all()
    assert (o[2] == (ua // ub).view(np.int32)).all()
    assert (o[3] == ((x >> 3) ^ (x << 2) | (y & 7))).all()
    assert (o[4].view(np.uint32) == (ua.astype(np.uint64) * ub >> np.uint64(32))).all()
    assert (o[5] == (ua > ub)).all()
    assert (o[6] == x * y).all()


@triton.jit
def blocks_kernel(a, b, c, M, N, K, B: tl.constexpr):
    p, q = tl.program_id(0), tl.program_id(1)
    ap = tl.make_block_ptr(a, (M, K), (K, 1), (p * B, 0), (B, B), (1, 0))
    d = tl.make_tensor_descriptor(b, [K, N], [N, 1], [B, B])
    acc = tl.zeros((B, B), tl.float32)
    for k in range(0, K, B):
        x = tl.load(ap, boundary_check=(0, 1), padding_option="zero")
        acc = tl.dot(x, d.load([k, q * B]), acc)
        ap = tl.advance(ap, (0, B))
    e = tl.make_tensor_descriptor(c, [M, N], [N, 1], [B, B])
    e.store([p * B, q * B], acc.to(tl.float16))


@pytest.mark.filterwarnings("ignore")
def test_block_pointers_and_descriptors() -> None:
    M, N, K = 40, 48, 72
    a, b = randn(M, K).astype(np.float16), randn(K, N).astype(np.float16)
    c = np.zeros((M, N), np.float16)
    sig = {"a": "*fp16", "b": "*fp16", "c": "*fp16", "M": "i32", "N": "i32", "K": "i32"}
    execute(to_ttir(blocks_kernel, sig, {"B": 16}), (3, 3), [a, b, c, M, N, K])
    np.testing.assert_allclose(c, a.astype(np.float32) @ b.astype(np.float32), rtol=2e-3, atol=1e-2)


@triton.jit
def tickets_kernel(c, o, f, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.atomic_add(c + i % 3, i % 5))
    tl.store(f + i, tl.atomic_max(c + 3 + i % 2, (i * 7) % 11))


def test_old_values_of_repeated_addresses_follow_program_order() -> None:
    n = 64
    c, o, f = np.zeros(5, np.int32), np.zeros(n, np.int32), np.zeros(n, np.int32)
    execute(to_ttir(tickets_kernel, {"c": "*i32", "o": "*i32", "f": "*i32"}, {"B": 16}), (4,), [c, o, f])
    want = np.zeros(5, np.int32)
    for i in range(n):
        assert o[i] == want[i % 3]
        want[i % 3] += i % 5
        assert f[i] == want[3 + i % 2]
        want[3 + i % 2] = max(want[3 + i % 2], (i * 7) % 11)
    assert (c == want).all()


@triton.jit
def flag_kernel(flag, o):
    p = tl.program_id(0)
    while tl.load(flag, volatile=True) < p:
        pass
    tl.store(o + p, tl.load(o + p - 1, mask=p > 0, other=0) + p)
    tl.store(flag, p + 1)


def test_waiting_on_an_earlier_program() -> None:
    flag, o = np.zeros(1, np.int32), np.zeros(6, np.int32)
    execute(to_ttir(flag_kernel, {"flag": "*i32", "o": "*i32"}), (6,), [flag, o], deadline=time.process_time() + 20)
    assert o.tolist() == [0, 1, 3, 6, 10, 15]


@triton.jit
def bf16_max_kernel(x, o, B: tl.constexpr):
    v = tl.load(x + tl.arange(0, B))
    tl.store(o, tl.max(v, 0))
    tl.store(o + 1, tl.sum(v, 0))
    tl.store(o + tl.arange(0, B) + 2, tl.maximum(v, 1.0))


def test_bf16_reduction_ignores_nan() -> None:
    x = torch.tensor([1.0, float("nan"), 3.0, -2.0])
    bits = x.bfloat16().view(torch.int16).numpy().copy()
    o = np.zeros(6, np.int16)
    execute(to_ttir(bf16_max_kernel, {"x": "*bf16", "o": "*bf16"}, {"B": 4}), (1,), [bits, o])
    got = torch.tensor(o).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(got, [3, np.nan, 1, 1, 3, 1])
