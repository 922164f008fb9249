import sys

import numpy as np
import pytest

if sys.platform != "linux":
    pytest.skip("no triton", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kbx_env.backends.cost import count, facts, resources
from kbx_env.backends.cost.facts import sample_ids
from kbx_env.backends.ttir import Region


@triton.jit
def _add(x, y, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    tl.store(o + i, tl.load(x + i, mask=m) + tl.load(y + i, mask=m), mask=m)


@triton.jit
def _matmul(a, b, c, K, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    j = tl.program_id(1) * B + tl.arange(0, B)
    k = tl.arange(0, B)
    acc = tl.zeros((B, B), tl.float32)
    for s in range(0, K, B):
        acc = tl.dot(
            tl.load(a + i[:, None] * K + (s + k)[None, :]), tl.load(b + (s + k)[:, None] * K + j[None, :]), acc
        )
    tl.store(c + i[:, None] * K + j[None, :], acc)


@triton.jit
def _gather(x, at, o, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + tl.load(at + i)))


@triton.jit
def _hits(at, o, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(o + tl.load(at + i), 1)


@triton.jit
def _sum(x, o, n, B: tl.constexpr):
    total = tl.zeros((B,), tl.float32)
    for s in range(0, n, B):
        i = s + tl.arange(0, B)
        total += tl.exp(tl.load(x + i, mask=i < n, other=0.0))
    tl.store(o, tl.sum(total, 0))


def compiled(fn, types, warps=4, **const):
    sig = dict(zip(fn.arg_names, types + ["constexpr"] * len(const), strict=True))
    return triton.compile(ASTSource(fn, sig, const), target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def memory(*arrays):
    regions = [Region((k + 1) << 36, a.reshape(-1).view(np.uint8), f"arg{k}") for k, a in enumerate(arrays)]
    return regions, [r.base for r in regions]


def measure(k, grid, arrays, scalars=(), stages=1):
    regions, bases = memory(*arrays)
    c = count(k.asm["ttir"], (*grid, 1, 1)[:3], [*bases, *scalars], regions, num_stages=stages)
    return c, facts(
        c, kernel="k", programs=int(np.prod(grid)), num_warps=4, num_stages=stages,
        registers=resources(k.asm["cubin"]).registers, shared_bytes=k.metadata.shared,
    )  # fmt: skip


def test_vector_add_is_exact():
    n = 4096
    k = compiled(_add, ["*fp32"] * 3 + ["i32"], B=256)
    _, f = measure(k, (16,), [np.zeros(n, np.float32) for _ in range(3)], [n])
    assert (f.loaded_bytes, f.stored_bytes, f.unique_bytes) == (8 * n, 4 * n, 12 * n)
    assert (f.loaded_sectors, f.stored_sectors) == (n // 4, n // 8)
    assert f.sectors == 12 * n // 32
    assert (f.dot_flops, f.special_flops, f.atomics, f.load_rounds, f.syncs) == ({}, 0, 0, 1, 0)
    # Per element one addition, three address steps of two wide operations, one index and one comparison.
    assert n <= f.alu_flops <= 20 * n
    assert 8 <= f.registers <= 255 and f.shared_bytes == 0


def test_a_sample_stands_for_a_large_grid():
    n = 1 << 24
    k = compiled(_add, ["*fp32"] * 3 + ["i32"], B=256)
    _, f = measure(k, (n // 256,), [np.zeros(n, np.float32) for _ in range(3)], [n])
    assert (f.loaded_bytes, f.stored_bytes, f.sectors) == (8 * n, 4 * n, 12 * n // 32)


def test_a_sample_of_products_and_of_trips_is_exact():
    K, B = 1024, 32
    k = compiled(_matmul, ["*fp16", "*fp16", "*fp32", "i32"], B=B)
    arrays = [np.zeros((K, K), np.float16), np.zeros((K, K), np.float16), np.zeros((K, K), np.float32)]
    _, f = measure(k, (K // B, K // B), arrays, [K])
    assert f.dot_flops == {"f16*f16->f32": pytest.approx(2.0 * K**3)}
    assert f.loaded_bytes == pytest.approx(2 * 2 * K * K * (K // B))
    assert f.unique_loaded == 2 * 2 * K * K and f.unique_stored == 4 * K * K
    assert f.load_rounds == pytest.approx(K // B) and f.syncs == pytest.approx(K // B)
    _, piped = measure(k, (K // B, K // B), arrays, [K], stages=4)
    assert piped.load_rounds == pytest.approx(K // B / 4)


def test_loops_count_trips_that_did_not_run():
    n = 100_000
    k = compiled(_sum, ["*fp32", "*fp32", "i32"], B=128)
    _, f = measure(k, (1,), [np.zeros(n, np.float32), np.zeros(8, np.float32)], [n])
    assert f.loaded_bytes == 4 * n
    assert f.special_flops == pytest.approx(n, rel=0.01)
    assert f.load_rounds == pytest.approx(-(-n // 128)) and f.syncs == 1


def test_a_random_gather_touches_a_sector_per_element():
    n = 1 << 16
    at = np.random.default_rng(0).integers(0, n, n, np.int32)
    k = compiled(_gather, ["*fp32", "*i32", "*fp32"], B=256)
    c, f = measure(k, (n // 256,), [np.zeros(n, np.float32), at, np.zeros(n, np.float32)])
    assert c.loaded["arg0"][0] > 0.9 * n and c.loaded["arg1"][0] == n // 8
    assert f.load_rounds == 2


def test_atomics_count_lanes_and_addresses():
    n = 4096
    at = np.arange(n, dtype=np.int32) % 16
    k = compiled(_hits, ["*i32", "*i32"], B=256)
    _, f = measure(k, (n // 256,), [at, np.zeros(16, np.int32)])
    assert f.atomics == n and f.atomic_lines == 16 * (n // 256)


def test_resources_read_the_cubin():
    small = resources(compiled(_add, ["*fp32"] * 3 + ["i32"], B=32).asm["cubin"])
    large = resources(compiled(_add, ["*fp32"] * 3 + ["i32"], warps=1, B=4096).asm["cubin"])
    assert small.registers < large.registers <= 255
    assert small.local_bytes == 0
    with pytest.raises(ValueError, match="ELF"):
        resources(b"text")


def test_sampled_programs_are_spread():
    assert sample_ids(5, 8).tolist() == [0, 1, 2, 3, 4]
    ids = sample_ids(1 << 20, 8)
    assert len(set(ids.tolist())) == 8 and ids.min() > 0 and ids.max() < (1 << 20) - 1
