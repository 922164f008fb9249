"""Static slices: where pointers come from and which inputs reach which stores."""

from __future__ import annotations

from typing import Any

import pytest
import triton
import triton.language as tl
from test_ttir_basic import matmul_kernel
from ttir_helper import to_ttir

from kbx_env.backends.ttir import parse
from kbx_env.backends.ttir.interp.slices import StoreSlice, annotate, store_slices

F, I = "*fp32", "*i32"


def slices(fn: Any, sig: dict[str, str], const: dict[str, Any] | None = None) -> list[StoreSlice]:
    return store_slices(parse(to_ttir(fn, sig, const)))


def sets(s: StoreSlice) -> tuple[set[int], set[int], set[int], set[int]]:
    return set(s.target_args), set(s.value_args), set(s.control_args), set(s.address_args)


@triton.jit
def k_simple(x, y, o, p, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=i < n) * 2)
    tl.store(p + i, tl.load(y + i, mask=i < n) + 1)


def test_values_and_targets_and_lines() -> None:
    a, b = slices(k_simple, {"x": F, "y": F, "o": F, "p": F, "n": "i32"}, {"B": 16})
    assert sets(a) == ({2}, {0}, set(), set()) and sets(b) == ({3}, {1}, set(), set())
    assert b.line == a.line + 1 == k_simple.fn.__code__.co_firstlineno + 4


@triton.jit
def k_roles(x, idx, keep, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + tl.load(idx + i))
    tl.store(o + i, v, mask=tl.load(keep + i) != 0)


def test_address_and_control_are_kept_apart() -> None:
    (s,) = slices(k_roles, {"x": F, "idx": I, "keep": I, "o": F}, {"B": 16})
    assert sets(s) == ({3}, {0}, {2}, {1})


@triton.jit
def k_branch(x, y, flag, o, B: tl.constexpr):
    i = tl.arange(0, B)
    if tl.load(flag) > 0:
        v = tl.load(x + i)
    else:
        v = tl.load(y + i)
    tl.store(o + i, v)


def test_a_branch_is_control_and_its_values_data() -> None:
    (s,) = slices(k_branch, {"x": F, "y": F, "flag": I, "o": F}, {"B": 16})
    assert sets(s) == ({3}, {0, 1}, {2}, set())


@triton.jit
def k_where(x, y, c, o, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + i, tl.where(tl.load(c + i) > 0, tl.load(x + i), tl.load(y + i)))


def test_the_condition_of_where_is_data() -> None:
    (s,) = slices(k_where, {"x": F, "y": F, "c": I, "o": F}, {"B": 16})
    assert sets(s) == ({3}, {0, 1, 2}, set(), set())


@triton.jit
def k_loop(x, n, o, B: tl.constexpr):
    i = tl.arange(0, B)
    acc = tl.zeros((B,), tl.float32)
    p = x + i
    for _ in range(tl.load(n)):
        acc += tl.load(p)
        p += B
    tl.store(o + i, acc)


def test_loops_carry_pointers_and_values_and_their_length_is_control() -> None:
    (s,) = slices(k_loop, {"x": F, "n": I, "o": F}, {"B": 16})
    assert sets(s) == ({2}, {0}, {1}, set())


@triton.jit
def k_rotate(x, y, o, n, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    for _ in range(n):
        a, b = b, a + 1
    tl.store(o + i, a)


def test_loops_are_followed_until_nothing_changes() -> None:
    (s,) = slices(k_rotate, {"x": F, "y": F, "o": F, "n": "i32"}, {"B": 16})
    assert sets(s)[:2] == ({2}, {0, 1})


@triton.jit
def k_while(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    while tl.max(v, 0) > 1.0:
        v = v / 2
    tl.store(o + i, v)


def test_while() -> None:
    (s,) = slices(k_while, {"x": F, "o": F}, {"B": 16})
    assert sets(s) == ({1}, {0}, {0}, set())


@triton.jit(noinline=True)
def outlined(p, k):
    return tl.load(p + k) + 1


@triton.jit
def k_call(x, y, o, p):
    k = tl.program_id(0)
    tl.store(o + k, outlined(x, k))
    tl.store(p + k, outlined(y, k))


def test_calls_are_told_apart() -> None:
    module = parse(to_ttir(k_call, {"x": F, "y": F, "o": F, "p": F}))
    assert len(module.funcs) == 2
    a, b = store_slices(module)
    assert sets(a) == ({2}, {0}, set(), set()) and sets(b) == ({3}, {1}, set(), set())
    annotate(module)
    (inner,) = [f for f in module.funcs.values() if not f.public]
    # The load itself is shared by both calls.
    assert [op.attrs["tensors"] for op in inner.body.blocks[0].ops if op.name == "tt.load"] == [(0, 1)]


@triton.jit
def k_early(x, flag, o, B: tl.constexpr):
    if tl.load(flag) == 0:
        return
    i = tl.arange(0, B)
    tl.store(o + i, tl.load(x + i))


def test_an_early_return_is_control() -> None:
    (s,) = slices(k_early, {"x": F, "flag": I, "o": F}, {"B": 16})
    assert sets(s) == ({2}, {0}, {1}, set())


@triton.jit
def k_atomic(x, o, count, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.atomic_add(o + i, tl.load(x + i))
    tl.atomic_cas(count, tl.load(x).to(tl.int32), 1)


def test_atomics() -> None:
    a, b = slices(k_atomic, {"x": F, "o": F, "count": I}, {"B": 16})
    assert sets(a) == ({1}, {0}, set(), set())
    assert sets(b) == ({2}, set(), {0}, set())


@triton.jit
def k_reduce(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(o, tl.argmax(v, 0))
    tl.store(o + 1 + i, tl.cumsum(v, 0).to(tl.int32))


def test_reductions_and_scans_pass_values_on() -> None:
    for s in slices(k_reduce, {"x": F, "o": I}, {"B": 16}):
        assert sets(s) == ({1}, {0}, set(), set())


@pytest.mark.parametrize(
    ("ptr", "acc", "precision", "kind"),
    [
        ("*i8", tl.int32, "ieee", "i8*i8->i32"),
        ("*fp16", tl.float32, "ieee", "f16*f16->f32"),
        (F, tl.float32, "tf32", "tf32"),
    ],
)
def test_dots(ptr: str, acc: Any, precision: str, kind: str) -> None:
    sig = {"a": ptr, "b": ptr, "c": I if acc is tl.int32 else F, "M": "i32", "N": "i32", "K": "i32"}
    (s,) = slices(matmul_kernel, sig, {"B": 32, "ACC": acc, "PREC": precision})
    assert s.dots == {kind} and sets(s) == ({2}, {0, 1}, set(), set())


@triton.jit
def k_decoy(a, b, x, o, junk, B: tl.constexpr):
    i, j = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    d = tl.dot(tl.load(a + i * B + j), tl.load(b + i * B + j))
    tl.store(junk + i * B + j, d)
    tl.store(o + i * B + j, tl.load(x + i * B + j))


def test_a_dot_beside_the_output_is_not_in_its_slice() -> None:
    junk, out = slices(k_decoy, {"a": "*fp16", "b": "*fp16", "x": F, "o": F, "junk": F}, {"B": 16})
    assert junk.dots == {"f16*f16->f32"} and sets(junk)[:2] == ({4}, {0, 1})
    assert out.dots == frozenset() and sets(out)[:2] == ({3}, {2})


@triton.jit
def k_select(x, y, o, p, flag, B: tl.constexpr):
    i = tl.arange(0, B)
    q = o
    if flag > 0:
        q = p
    tl.store(q + i, tl.load(x + i))
    address = y.to(tl.int64, bitcast=True) + 4
    tl.store(o + i, tl.load(address.to(tl.pointer_type(tl.float32), bitcast=True) + i))


def test_ambiguous_and_unknown_pointers() -> None:
    module = parse(to_ttir(k_select, {"x": F, "y": F, "o": F, "p": F, "flag": "i32"}, {"B": 16}))
    a, b = store_slices(module)
    assert sets(a)[:2] == ({2, 3}, {0})
    assert sets(b)[:2] == ({2}, {0, 1, 2, 3})  # made from an integer: it may point anywhere
    annotate(module)
    found: dict[str, list[Any]] = {"tt.load": [], "tt.store": []}
    for op in module.entry.body.blocks[0].ops:
        if op.name in found:
            found[op.name].append(op.attrs["tensors"])
    assert found == {"tt.load": [(0,), ()], "tt.store": [(2, 3), (2,)]}


@triton.jit
def k_descriptor(x, o, M, N, B: tl.constexpr):
    a = tl.make_tensor_descriptor(x, [M, N], [N, 1], [B, B])
    c = tl.make_tensor_descriptor(o, [M, N], [N, 1], [B, B])
    c.store([0, 0], a.load([0, 0]))


def test_descriptors() -> None:
    (s,) = slices(k_descriptor, {"x": F, "o": F, "M": "i32", "N": "i32"}, {"B": 16})
    assert sets(s) == ({1}, {0}, set(), set())


@triton.jit
def k_packed(x, w, o, B: tl.constexpr, HALVES: tl.constexpr):
    i = tl.arange(0, B)
    b = tl.load(w + i[:, None] * B + i[None, :])
    if HALVES:
        b = b >> 4
    p = tl.dot(tl.load(x + i[:, None] * B + i[None, :]), b.to(tl.float16))
    tl.store(o + i[:, None] * B + i[None, :], p)


@triton.jit
def k_round(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + i, tl.load(x + i).to(tl.int8).to(tl.float32))


def test_halves_of_bytes_and_roundings_to_int8_are_seen_on_the_way() -> None:
    kinds = {"x": "*fp16", "w": "*i8", "o": F}
    (s,) = slices(k_packed, kinds, {"B": 16, "HALVES": True})
    assert s.dots == {"i4 in f16*f16->f32"}
    (s,) = slices(k_packed, kinds, {"B": 16, "HALVES": False})
    assert s.dots == {"f16*f16->f32"}
    (s,) = slices(k_round, {"x": F, "o": F}, {"B": 16})
    assert s.dots == {"f32->i8"}
