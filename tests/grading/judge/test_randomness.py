"""The rank test of bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kbx_env.grading.judge import randomness


def test_the_rank_is_found_as_soon_as_it_is_full() -> None:
    read: list[int] = []

    def rows() -> Iterator[int]:
        for row in (0b001, 0b011, 0b011, 0b111, 0b101, 0b110):
            read.append(row)
            yield row

    assert randomness._full_rank(rows(), 3) and len(read) == 4
    assert not randomness._full_rank([0b001, 0b011, 0b010, 0b000], 3)


def test_a_bit_that_is_an_xor_of_others_is_found_and_random_bits_pass() -> None:
    bits = torch.randint(0, 2, (100_000,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    assert randomness.dependent(bits) is None
    for period in (11, 64, 160):
        rows = bits[: bits.numel() // period * period].view(-1, period).clone()
        rows[:, 5] = rows[:, 4] ^ rows[:, 3]
        assert f"every {period} " in (randomness.dependent(rows.flatten()) or "")
