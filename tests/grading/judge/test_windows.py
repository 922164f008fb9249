"""How unevenly fair windows may be drawn before a call is refused."""

import random

import numpy as np
import pytest

from kbx_env.grading.judge import windows

PLACES = [
    # size, windows and kernel of rows and of columns, and planes
    ((7, 9), (1, 4), (2, 2), 60),
    ((11, 14), (4, 6), (2, 2), 100),
    ((10, 14), (5, 5), (2, 4), 40),
    ((14, 14), (11, 11), (3, 3), 400),
]


def shares_of(size, count, kernel):
    rows, columns = (windows.sequences(*axis)[1] for axis in zip(size, count, kernel, strict=True))
    return [p * q for p in rows for q in columns]


@pytest.mark.parametrize("size, count, kernel, planes", PLACES)
def test_fair_windows_pass_in_each_of_many_calls(size, count, kernel, planes):
    # Seven standard deviations were allowed: of 20,000 fair calls with three sequences, about four were refused.
    shares = shares_of(size, count, kernel)
    counts = np.random.default_rng(7).multinomial(planes, shares, size=20_000)
    expected = planes * np.array(shares)
    most = ((counts - expected) ** 2 / expected).sum(axis=1).argmax()
    call = [k for k, times in enumerate(counts[most]) for _ in range(times)]
    assert windows._drawn([call], shares).passed


@pytest.mark.parametrize("parts", [2, 3, 10])
def test_one_plane_shows_nothing(parts):
    assert windows._drawn([[0], [0]], [1 / parts] * parts).passed


# Forty fair planes with two sequences have the same one by chance, once in 10^9.
@pytest.mark.parametrize("size, count, kernel, planes", [place for place in PLACES if place[3] >= 60])
def test_one_pair_of_windows_for_all_planes_is_refused(size, count, kernel, planes):
    shares = shares_of(size, count, kernel)
    for pair in range(len(shares)):
        assert "far too often" in windows._drawn([[pair] * planes], shares).reason


def test_a_call_that_repeats_another_is_refused():
    shares = shares_of((11, 14), (4, 6), (2, 2))
    call = random.Random(3).choices(range(len(shares)), shares, k=100)
    other = random.Random(4).choices(range(len(shares)), shares, k=100)
    assert windows._drawn([call, other], shares).passed
    assert "same windows" in windows._drawn([call, call], shares).reason
