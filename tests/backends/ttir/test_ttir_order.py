"""The order in which the programs of a launch run: results of programs that race depend on it, all others do not."""

from __future__ import annotations

import numpy as np
import pytest
import triton
import triton.language as tl
from ttir_helper import to_ttir

from kbx_env.backends.ttir import Meter, Region, launch, parse

BASE = 1 << 32
N, B = 6, 4


@triton.jit
def k_overlap(o, B: tl.constexpr):
    i = tl.arange(0, 2 * B)
    tl.store(o + tl.program_id(0) * B + i, tl.program_id(0) * 2 * B + i)


@triton.jit
def k_lanes(o, B: tl.constexpr):
    i = tl.arange(0, 2 * B)
    tl.store(o + tl.program_id(0) * B + i % B, i)


@triton.jit
def k_carry(o, B: tl.constexpr):
    p = tl.program_id(0)
    tl.store(o + p, tl.load(o + p - 1, mask=p > 0, other=0) + 1)


@triton.jit
def k_apart(o, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, i)


@triton.jit
def k_draws(o, B: tl.constexpr):
    mine = tl.atomic_add(o + tl.num_programs(0), 1)
    tl.store(o + mine, tl.program_id(0))


def result(kernel: triton.JITFunction, order: str) -> list[int]:
    data = np.zeros((N + 1) * B, np.int32)
    text = to_ttir(kernel, {"o": "*i32", "B": "constexpr"}, {"B": B})
    launch(parse(text), (N, 1, 1), [BASE], [Region(BASE, data.view("u1"), "o", None)], Meter(), order=order)
    return data.tolist()


def blocks(first: bool) -> list[int]:
    """What overlapping blocks leave behind; where two meet, the earlier (``first``) or the later program's numbers."""
    own = [p * 2 * B + np.arange(2 * B) for p in range(N)]
    lower = [own[0][:B], *[own[p - 1][B:] if first else own[p][:B] for p in range(1, N)], own[-1][B:]]
    return np.concatenate(lower).tolist()


def test_overlapping_stores_leave_what_comes_last() -> None:
    assert result(k_overlap, "") == result(k_overlap, "forwards") == blocks(first=False)
    assert result(k_overlap, "backwards") == blocks(first=True)


def test_of_several_lanes_the_first_counts_backwards() -> None:
    assert result(k_lanes, "forwards")[: N * B] == [*range(B, 2 * B)] * N
    assert result(k_lanes, "backwards")[: N * B] == [*range(B)] * N


def test_a_program_sees_what_earlier_ones_stored() -> None:
    assert result(k_carry, "forwards")[:N] == [1, 2, 3, 4, 5, 6]
    assert result(k_carry, "backwards")[:N] == [1] * N


@pytest.mark.parametrize("order", ["", "forwards", "backwards"])
def test_independent_programs_give_the_same_in_every_order(order: str) -> None:
    assert result(k_apart, order)[: N * B] == [*range(N * B)]


def test_waiting_programs_start_from_the_last() -> None:
    assert result(k_draws, "backwards")[: N + 1] == [5, 4, 3, 2, 1, 0, N]
    assert result(k_draws, "forwards")[: N + 1] == [0, 1, 2, 3, 4, 5, N]
