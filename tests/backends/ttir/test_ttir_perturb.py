"""Integers exchanged at the places that a quantization scheme names, and nowhere else."""

from __future__ import annotations

import random

import numpy as np
import pytest
import triton
import triton.language as tl
from ttir_helper import execute, to_ttir

from kbx_env.backends.ttir import Perturbation, parse
from kbx_env.backends.ttir.interp.slices import annotate, operand_slices
from kbx_env.grading.evidence.metamorphic import neighbours, pairs

TABLE = neighbours(random.Random(1))
BYTES = np.array(TABLE, np.uint8)


@triton.jit
def k_dot(a, b, o, f, B: tl.constexpr):
    i = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(o + i, tl.dot(x, y, out_dtype=tl.int32))
    tl.store(f + i, tl.dot(x.to(tl.float16), y.to(tl.float16)))


@triton.jit
def k_round(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + i, tl.load(x + i).to(tl.int32).to(tl.int8))


@triton.jit
def k_words(w, o, q, B: tl.constexpr):
    i = tl.arange(0, B)
    word, other = tl.load(w + i), tl.load(q + i)
    tl.store(o + i, (word >> 28).to(tl.float32) + other.to(tl.float32))


def test_operands_of_int8_products_only() -> None:
    text = to_ttir(k_dot, {"a": "*i8", "b": "*i8", "o": "*i32", "f": "*fp32"}, {"B": 32})
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-127, 128, (32, 32)).astype(np.int8) for _ in range(2))
    o, f = np.zeros((32, 32), np.int32), np.zeros((32, 32), np.float32)
    change = Perturbation("products", TABLE)
    execute(text, (1,), [a, b, o, f], perturbation=change)
    x, y = (BYTES[v.view(np.uint8)].view(np.int8).astype(np.int32) for v in (a, b))
    assert (o == x @ y).all() and change.touched == 2 * 32**3
    assert (f == (a.astype(np.int32) @ b.astype(np.int32))).all(), "a float product of the same integers stays"


def test_integers_are_counted_where_they_are_used() -> None:
    text = to_ttir(k_dot, {"a": "*i8", "b": "*i8", "o": "*i32", "f": "*fp32"}, {"B": 32})
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-127, 128, (32, 32)).astype(np.int8) for _ in range(2))
    o, f = np.zeros((32, 32), np.int32), np.zeros((32, 32), np.float32)
    change = Perturbation("products", list(range(256)), seen={})
    execute(text, (3,), [a, b, o, f], perturbation=change)
    assert (o == a.astype(np.int32) @ b.astype(np.int32)).all(), "the table that exchanges nothing"
    assert change.seen is not None
    found = sorted(change.seen.items(), key=lambda row: row[0][1])
    for (_, row), v in zip(found, (a, b), strict=True):
        assert (row == 3 * np.bincount(v.view(np.uint8).ravel(), minlength=256)).all()
    assert sorted((k, [sorted(f) for f in fs]) for k, fs in operand_slices(parse(text))) == [
        ("f16*f16->f32", [[0], [1]]), ("i8*i8->i32", [[0], [1]]),
    ]  # fmt: skip


def test_roundings_to_int8() -> None:
    x, o = np.arange(-64, 64, dtype=np.float32), np.zeros(128, np.int8)
    change = Perturbation("roundings", TABLE)
    execute(to_ttir(k_round, {"x": "*fp32", "o": "*i8"}, {"B": 128}), (1,), [x, o], perturbation=change)
    assert (o.view(np.uint8) == BYTES[x.astype(np.int8).view(np.uint8)]).all() and change.touched == 128


def test_words_of_packed_bytes_and_no_other_loads() -> None:
    text = to_ttir(k_words, {"w": "*i32", "o": "*fp32", "q": "*i32"}, {"B": 16})
    module = parse(text)
    annotate(module)
    loads = [op for op in module.entry.body.blocks[0].ops if op.name == "tt.load"]
    assert [op.attrs["unpacked"] for op in loads] == [True, False]
    w = np.random.default_rng(0).integers(-(2**31), 2**31, 16).astype(np.int32)
    o, q = np.zeros(16, np.float32), np.arange(16, dtype=np.int32)
    execute(text, (1,), [w, o, q], perturbation=Perturbation("bytes", TABLE))
    assert (o == (BYTES[w.view(np.uint8)].view(np.int32) >> 28) + q).all()


@pytest.mark.parametrize("seed", range(20))
def test_tables(seed: int) -> None:
    near = neighbours(random.Random(seed))
    signed = np.array(near, np.uint8).view(np.int8).astype(int)
    codes = np.arange(256, dtype=np.uint8).view(np.int8).astype(int)
    still = {0, 1, -128}
    assert sorted(near) == list(range(256)) and {int(c) for c in codes[signed == codes]} == still
    moved = ~np.isin(codes, list(still))
    assert (np.abs(signed - codes) <= 6).all() and (np.sign(signed) == np.sign(codes)).all()
    assert (signed[signed.astype(np.uint8)][moved] != codes[moved]).all(), "twice exchanged is not put right"
    both = pairs(random.Random(seed))
    used = [c for c in range(256) if c & 15 != 8 and c >> 4 != 8]
    assert both[0] == 0 and sorted(both[c] for c in used) == used


def test_a_perturbation_must_be_known() -> None:
    for place, table in (("elsewhere", TABLE), ("products", TABLE[:9])):
        with pytest.raises(ValueError, match="a perturbation is"):
            Perturbation(place, table)
