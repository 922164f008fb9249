"""The rank test of bits, and the tests of lines of numbers."""

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


def test_a_line_gives_its_spectrum_at_every_size_asked_for_and_computes_it_once_while_the_size_stays() -> None:
    line = randomness.Line(torch.randn(300, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), 1.0, 4.0)
    for size in (600, 640, 600):
        found = line.spectrum(size)
        assert torch.allclose(found.to(torch.complex128), torch.fft.rfft(line.values, size), rtol=1e-5, atol=1e-4)
        assert line.spectrum(size) is found


def test_two_lines_of_one_size_are_told_from_each_other() -> None:
    draw = torch.Generator().manual_seed(3)
    a, b = (randomness.Line(torch.rand(4096, dtype=torch.float64, generator=draw) - 0.5, 1 / 12, 0.5) for _ in range(2))
    assert randomness.related(a, b) is None and randomness.patterned(a) is None
    later = randomness.Line(a.values.roll(7), a.var, a.most)
    backwards = randomness.Line(a.values.flip(0), a.var, a.most)
    assert randomness.related(a, later) == "7 apart" and randomness.related(a, backwards) == "read backwards"


def test_a_part_that_is_everything_is_the_line_itself() -> None:
    line = randomness.Line(torch.arange(10, dtype=torch.float64), 1.0, 9.0)
    assert line.part(0, 10) is line and line.part(0, 99) is line
    assert line.part(0, 9).values.tolist() == list(range(9)) and line.part(3, 99).n == 7
