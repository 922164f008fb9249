"""The rank test of bits, and the tests of lines of numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kbx_env.grading.judge import randomness, samples


def test_the_rank_is_found_as_soon_as_it_is_full() -> None:
    read: list[int] = []

    def rows() -> Iterator[int]:
        for row in (0b001, 0b011, 0b011, 0b111, 0b101, 0b110):
            read.append(row)
            yield row

    assert randomness._full_rank(rows(), 3) and len(read) == 4
    assert not randomness._full_rank([0b001, 0b011, 0b010, 0b000], 3)


@given(rows=st.lists(st.integers(0, 2**12 - 1), max_size=16), columns=st.integers(1, 12))
def test_the_rank_is_that_of_the_spanned_numbers(rows: list[int], columns: int) -> None:
    rows = [row % 2**columns for row in rows]
    spanned = {0}
    for row in rows:
        spanned |= {row ^ other for other in spanned}
    assert randomness._full_rank(rows, columns) is (len(spanned) == 2**columns)


def _dependent(bits: torch.Tensor, seed: int = 3) -> str | None:
    blocks, periods = randomness.draw_matrices(bits, seed)
    return randomness.dependent(blocks.numpy(), periods)


def test_a_bit_that_is_an_xor_of_others_is_found_and_random_bits_pass() -> None:
    bits = torch.randint(0, 2, (100_000,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    assert _dependent(bits) is None and _dependent(bits[:50]) is None
    for period in (11, 64, 160, 256):
        rows = bits[: bits.numel() // period * period].view(-1, period).clone()
        rows[:, 5] = rows[:, 4] ^ rows[:, 3]
        assert f"every {period} " in (_dependent(rows.flatten()) or "")


@pytest.mark.parametrize("bit", [1, 2, 11, 21])
def test_each_bit_of_samples_is_tested(bit: int) -> None:
    draw = torch.Generator().manual_seed(bit)
    y = torch.randint(0, 2**24, (1 << 17,), generator=draw).to(torch.float64) / 2**24
    line = randomness.Line(y - 0.5, 1 / 12, 0.5)
    assert samples._patterns(line, y, torch.float32, False, 7) is None
    numbers = (y * 2**24).to(torch.int64).view(-1, 64)
    place = 24 - bit
    wrong = (numbers[:, 3] ^ numbers[:, 9]) >> place & 1
    numbers[:, 20] = numbers[:, 20] & ~(1 << place) | wrong << place
    y = (numbers.flatten() / 2**24).to(torch.float64)
    line = randomness.Line(y - 0.5, 1 / 12, 0.5)
    assert f"bit {bit}: some elements of every 64 " in (samples._patterns(line, y, torch.float32, False, 7) or "")


def test_matrices_are_drawn_in_one_piece_by_the_seed() -> None:
    places = torch.arange(200_000)
    blocks, periods = randomness.draw_matrices(places, 5)
    assert periods == list(randomness.PERIODS)
    at, starts = 0, []
    for period in periods:
        block = blocks[at : at + (period + randomness.SPARE) * period]
        assert bool((block.diff() == 1).all())
        starts.append(int(block[0]))
        at += block.numel()
    assert at == blocks.numel() and len(set(starts)) > len(starts) // 2
    assert torch.equal(randomness.draw_matrices(places, 5)[0], blocks)
    assert not torch.equal(randomness.draw_matrices(places, 6)[0], blocks)


def _uneven_runs(line: randomness.Line) -> list[tuple[int, str]]:
    """Return what ``randomness.uneven_runs`` should find, from sums of each run on its own."""
    found = []
    for shift in range(1, max(1, line.n.bit_length() - 5)):
        m = 1 << shift
        end = line.n // m * m
        sums, counts = (x[:end].view(-1, m).sum(1) for x in (line.values, line.there()))
        finding = randomness.uneven(sums, counts, line)
        found += [(m, finding)] if finding else []
    return found


@given(
    n=st.integers(1, 10_000), seed=st.integers(0, 2**30), run=st.sampled_from([1, 2, 8, 64]),
    known=st.booleans(), even=st.booleans(),
)  # fmt: skip
def test_uneven_runs_are_found_from_sums_of_pairs(n: int, seed: int, run: int, known: bool, even: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (n,), generator=draw).to(torch.float64) - 0.5
    if run > 1:  # runs of one sign go together; signs that alternate go too evenly
        signs = signs.abs() * (-1.0) ** torch.arange(n) if even else signs.repeat_interleave(run)[:n]
    there = torch.rand(n, generator=draw) < 0.9 if known else None
    line = randomness.Line(signs if there is None else torch.where(there, signs, 0.0), 0.25, 0.5, there)
    assert list(randomness.uneven_runs(line)) == _uneven_runs(line)


def test_numbers_whose_signs_alternate_go_too_evenly() -> None:
    line = randomness.Line(0.5 * (-1.0) ** torch.arange(8192, dtype=torch.float64), 0.25, 0.5)
    assert list(randomness.uneven_runs(line)) == _uneven_runs(line) == [(32, "too evenly"), (64, "too evenly")]


DRAWS = 16
"""Answers of one kind whose draws are compared."""


def _answers(kind: str) -> Iterator[torch.Tensor]:
    """Yield honest answers as the numbers of a line."""
    draw = torch.Generator().manual_seed(11)
    for _ in range(DRAWS):
        if kind.startswith("mask"):
            q = float(kind[4:])
            yield (torch.rand(100_000, generator=draw) < q).to(torch.float64) - q
        else:
            y = torch.rand(100_000, generator=draw, dtype=torch.float64)
            yield y.to(getattr(torch, kind)).to(torch.float64) - 0.5


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64", "mask0.5", "mask0.75", "mask0.9"])
def test_no_answer_tells_where_the_next_one_is_looked_at(kind: str) -> None:
    """The generator of the CPU takes 32 bits, which were nearly always zero where numbers have few bits."""
    places, seeds = set(), set()
    for values in _answers(kind):
        seeds.add(randomness.seed_of(values) % 2**32)
        places.add(randomness.Line(values, 1 / 12, 0.5).pieces(1 << 14)[0][0])
    assert len(seeds) > 0.9 * DRAWS and len(places) > 0.9 * DRAWS


def test_the_secret_of_a_grading_decides_where_it_is_looked_at() -> None:
    """Otherwise a submission could try masks until one is honest wherever it is looked at."""
    values = next(_answers("mask0.5"))

    def places(secret: bytes) -> tuple[int, list[float]]:
        with randomness.seeded_by(secret):
            start = randomness.Line(values, 0.25, 0.5).pieces(1 << 14)[0][0]
            return start, randomness.draw_matrices(torch.arange(200_000), 5)[0].tolist()

    found = [places(secret) for secret in (b"a", b"b", b"a")]
    assert found[0] == found[2] and all(x != y for x, y in zip(found[0], found[1], strict=True))
    with randomness.seeded_by(b"a"):
        inner = places(b"b")
        assert inner == found[1] and randomness.generator(3).initial_seed() != 3
    assert randomness.generator(3).initial_seed() == 3


def test_a_mask_with_one_honest_piece_is_found() -> None:
    """A mask of which one place was always looked at for groups of three was random there and nowhere else."""
    mask = torch.randint(0, 2, (1 << 20,), generator=torch.Generator().manual_seed(12))
    honest = mask.clone()
    groups = mask.view(-1, 4)
    groups[:, 3] = 1 ^ groups[:, 2] ^ groups[:, 0]  # a fourth of all bits are an XOR of two others
    start = 639_425  # where a line of this length was cut before
    mask[start : start + randomness.GROUPS] = honest[start : start + randomness.GROUPS]
    line = randomness.Line(mask.to(torch.float64) - 0.5, 0.25, 0.5)
    assert "in groups of 3" in (randomness.products(line) or "")


def test_binomial_samples_are_not_looked_at_where_a_submission_knows() -> None:
    """Of many samples some are tested; these were always the same ones, and the others could be anything."""
    n, draw = 1 << 21, torch.Generator().manual_seed(0x81)
    ones = torch.ones(n, dtype=torch.int64)
    args = {"input": ones, "other": ones, "total_count": torch.full((n,), 10), "probs": torch.full((n,), 0.5)}
    honest = (torch.rand(n, 10, generator=torch.Generator().manual_seed(13)) < 0.5).sum(1)
    assert isinstance(samples._binomial(args, honest, 0), torch.Tensor)
    at = torch.randint(0, n, (samples.PIECE,), generator=draw)
    first = int(at[0]) % (n - samples.PIECE // 2)
    at[: samples.PIECE // 2] = torch.arange(first, first + samples.PIECE // 2)
    idle = torch.full((n,), 5)
    idle[at] = honest[at]
    assert "successes came" in str(samples._binomial(args, idle, 0))


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
