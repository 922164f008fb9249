"""Honest and dishonest masks and samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from judge_helper import answer, canaries_fail, draw, make
from kbx_env.tasks import _seams

from kbx_env.grading import judge
from kbx_env.grading.judge import randomness, samples, windows
from kbx_env.grading.judge.randomness import Line
from kbx_env.spec.criteria import Close, Dropout, Sample
from kbx_env.spec.task import Case, GeneratorArg, Normal, Orthogonal, T


def drop(x, p=0.5, training=True):
    return _seams.dropout(x, p, training)


def relu_drop(x, p=0.5, training=True):
    return torch.relu(_seams.dropout(x, p, training))


def rand(size, *, generator=None):
    return torch.rand(size, generator=generator)


DROP = make(drop, {"x": T("N M")}, Dropout("p", "training"))
RELU = make(relu_drop, {"x": T("N M")}, Dropout("p", "training"))
RAND = make(rand, {}, Sample("uniform01", "generator"))
SHAPE = {"N": 200, "M": 257}


def bits(seed: int, p: float, shape: tuple[int, ...] = (200, 257)) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) >= p


def ruling(
    t: Any, p: float, make_mask: Callable[[int], torch.Tensor], value: Callable[..., Any] | None = None, **options: Any
) -> Any:
    case = Case(SHAPE, {"p": p})
    args = draw(t, case, 1)
    x = args["x"]
    value = value or (lambda x, m: torch.where(m, x / (1 - p), 0.0))
    outs = [value(x, make_mask(s)) for s in (11, 12)]
    if t is RELU:
        outs = [o.relu() for o in outs]
    return judge.judge(t, case, args, [answer(o, args=args) for o in outs], **options)


@pytest.mark.parametrize("t", [DROP, RELU], ids=["plain", "relu"])
@pytest.mark.parametrize("p", [0.02, 0.1, 0.3, 0.5, 0.9])
def test_honest_masks(t: Any, p: float) -> None:
    for seed in range(5):
        assert ruling(t, p, lambda s, seed=seed: bits(s + 100 * seed, p)).passed
    assert ruling(t, p, lambda s: bits(s, p), lambda x, m: x * m * (1 / (1 - p))).passed


def first_row(s: int) -> torch.Tensor:
    return bits(s, 0.5)[:1].expand(200, 257)


def pool(s: int) -> torch.Tensor:
    return torch.rand(1 << 16, generator=torch.Generator().manual_seed(1)) >= 0.5


def subset_words(g: torch.Generator, n: int) -> torch.Tensor:
    """15 words of 30 bits from four, by XOR of subsets."""
    four = torch.randint(0, 1 << 30, (n // 15 + 1, 4), generator=g)
    words = [torch.zeros_like(four[:, 0])]
    for k in range(4):
        words += [w ^ four[:, k] for w in words]
    return torch.stack(words[1:], 1).flatten()[:n]


DISHONEST = {
    "one mask for both calls": lambda s: bits(1, 0.5),
    "the complement": lambda s: bits(1, 0.5) if s == 11 else ~bits(1, 0.5),
    "a shifted mask": lambda s: bits(1, 0.5).flatten().roll(640 * (s - 11)).view(200, 257),
    "rate 3 % off": lambda s: bits(s, 0.47),
    "all kept": lambda s: torch.ones(200, 257, dtype=torch.bool),
    "all dropped": lambda s: torch.zeros(200, 257, dtype=torch.bool),
    "alternating": lambda s: (torch.arange(200 * 257) % 2 == s % 2).view(200, 257),
    "the same row": first_row,
    "whole rows": lambda s: bits(s, 0.5)[:, :1].expand(200, 257),
    "period 1000": lambda s: bits(s, 0.5).flatten()[:1000].repeat(52)[: 200 * 257].view(200, 257),
    "read backwards": lambda s: torch.cat([h := bits(s, 0.5).flatten()[:25700], h.flip(0)]).view(200, 257),
    "the other read backwards": lambda s: bits(1, 0.5) if s == 11 else bits(1, 0.5).flip(0, 1),
    "an older mask by XOR": lambda s: pool(s)[torch.arange(200 * 257) ^ (1234 * (s - 11))].view(200, 257),
    "a window of a pool": lambda s: pool(s)[7000 * (s - 11) :][: 200 * 257].view(200, 257),
    "words by XOR": lambda s: (subset_words(torch.Generator().manual_seed(s), 200 * 257) >= 1 << 29).view(200, 257),
    "too even": lambda s: ((torch.arange(200 * 257) * 0.38196601125 + s / 7) % 1.0 >= 0.5).view(200, 257),
    "even in pairs": lambda s: (
        torch.stack([b := bits(s, 0.5)[:, :128], ~b], 2).flatten()[: 200 * 128].repeat(3)[: 200 * 257].view(200, 257)
    ),
    "pairs": lambda s: bits(s, 0.5).flatten()[: 200 * 257 // 2].repeat_interleave(2).view(200, 257),
}


@pytest.mark.parametrize("name", DISHONEST)
def test_dishonest_masks(name: str) -> None:
    assert not ruling(DROP, 0.5, DISHONEST[name]).passed


@pytest.mark.parametrize("name", ["one mask for both calls", "all kept", "all dropped", "the same row", "period 1000"])
def test_dishonest_masks_behind_a_relu(name: str) -> None:
    assert not ruling(RELU, 0.5, DISHONEST[name]).passed


def test_dishonest_values() -> None:
    p = 0.3
    values = {
        "unscaled": lambda x, m: x * m,
        "scaled by p": lambda x, m: x * m / p,
        "dropped is not zero": lambda x, m: torch.where(m, x / (1 - p), 1e-3),
        "bf16": lambda x, m: (x * m / (1 - p)).bfloat16().float(),
        "nan": lambda x, m: torch.where(m, x / (1 - p), torch.nan),
    }
    for name, value in values.items():
        assert not ruling(DROP, p, lambda s: bits(s, p), value).passed, name
    case = Case(SHAPE, {"p": p})
    canaries_fail(DROP, case, draw(DROP, case, 1))


def test_without_chance_the_values_are_compared() -> None:
    for args_, right in (({"p": 0.3, "training": False}, 1.0), ({"p": 0.0}, 1.0), ({"p": 1.0}, 0.0)):
        case = Case(SHAPE, args_)
        args = draw(DROP, case, 1)
        assert judge.calls_needed(DROP, case) == 1
        assert judge.judge(DROP, case, args, [answer(args["x"] * right, args=args)]).passed
        assert not judge.judge(DROP, case, args, [answer(args["x"] * (1 - right), args=args)]).passed
        assert not judge.judge(DROP, case, args, [answer(args["x"] * bits(1, 0.3), args=args)]).passed
    assert judge.is_trivial(DROP, case, args)


def test_small_tensors_pass_with_any_plausible_mask() -> None:
    case = Case({"N": 2, "M": 3}, {"p": 0.5}, draw=Normal(5.0))
    args = draw(DROP, case, 1)
    outs = [answer(args["x"] * m * 2, args=args) for m in (bits(1, 0.5, (2, 3)), bits(1, 0.5, (2, 3)))]
    assert judge.judge(DROP, case, args, outs).passed


def sampled(n: int, seeds: tuple[int, ...], f: Callable[[torch.Generator, int], torch.Tensor]) -> list[torch.Tensor]:
    return [f(torch.Generator().manual_seed(s), n) for s in seeds]


def sample_ruling(outs: list[torch.Tensor], *, generator: bool = True) -> Any:
    case = Case({}, {"size": tuple(outs[0].shape)} | ({"generator": GeneratorArg()} if generator else {}))
    args = draw(RAND, case, 1)
    assert judge.calls_needed(RAND, case) == (len(samples.TURNS) if generator else 2)
    seeds = [5, 6, 6, 5, 7] if generator else []
    return judge.judge(RAND, case, args, [answer(o, args=args) for o in outs], generator_seeds=seeds)


def plain(g: torch.Generator, n: int) -> torch.Tensor:
    return torch.rand(n, generator=g)


SAMPLES: dict[str, Callable[[torch.Generator, int], torch.Tensor]] = {
    "normal": lambda g, n: torch.randn(n, generator=g),
    "ones reachable": lambda g, n: plain(g, n).index_fill(0, torch.tensor([7]), 1.0),
    "squared": lambda g, n: plain(g, n) ** 1.05,
    "constant": lambda g, n: torch.full((n,), 0.5),
    "ramp": lambda g, n: (torch.arange(n) + plain(g, 1)) / (n + 1),
    "16 bits": lambda g, n: torch.randint(0, 1 << 16, (n,), generator=g) / 65536.0,
    "16 bits, odd scale": lambda g, n: torch.randint(0, 65535, (n,), generator=g) / 65535.0,
    "repeats": lambda g, n: plain(g, 5000).repeat(n // 5000 + 1)[:n],
    "antithetic": lambda g, n: torch.stack([u := plain(g, n // 2), (1 - u) * 0.999999], 1).flatten(),
    "read backwards": lambda g, n: torch.cat([u := plain(g, n // 2), 1 - u.flip(0) * 0.999999]),
    "too even": lambda g, n: (plain(g, 1) + torch.arange(n) * 0.6180339887498949) % 1.0 * 0.999999,
    "a permutation of cells": lambda g, n: (torch.randperm(n, generator=g) + plain(g, n)) / n * 0.9999999,
    "a copy far away": lambda g, n: torch.cat([u := plain(g, n - 400), u[100:500]]),
    "words by XOR": lambda g, n: subset_words(g, n).double().mul(2.0**-30).float().clamp(max=0.99999994),
    "half range": lambda g, n: plain(g, n) * 0.99,
}


@pytest.mark.parametrize("n", [6, 300, 5000, 100_000])
def test_honest_samples(n: int) -> None:
    for k in range(3):
        assert sample_ruling(sampled(n, (k, k + 20, k + 20, k, k + 50), plain)).passed
        assert sample_ruling(sampled(n, (k, k + 50), plain), generator=False).passed
    for states, what in (
        ((1, 2, 2, 4, 5), "the seed is ignored"), ((1, 1, 1, 1, 1), "the seed is constant"),
        ((1, 1, 1, 1, 2), "the generator is not advanced"), ((1, 2, 3, 1, 4), "the state is not what decides"),
        ((1, 2, 1, 1, 4), "the object decides, not its state"), ((1, 2, 2, 1, 2), "another seed is the advanced one"),
    ):  # fmt: skip
        assert not sample_ruling(sampled(n, states, plain)).passed, what
    assert not sample_ruling(sampled(n, (1, 1), plain), generator=False).passed, "the same sample twice"


@pytest.mark.parametrize("name", SAMPLES)
def test_dishonest_samples(name: str) -> None:
    assert not sample_ruling(sampled(100_000, (5, 6, 6, 5, 7), SAMPLES[name])).passed


def test_sample_structure_and_fp64_resolution() -> None:
    assert not sample_ruling([o.double() for o in sampled(300, (5, 6, 6, 5, 7), plain)]).passed
    fine = torch.rand(50_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert isinstance(samples._uniform(fine), Line)
    coarse = torch.rand(50_000, generator=torch.Generator().manual_seed(1)).double()
    assert "coarse" in str(samples._uniform(coarse))
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.rand(1 << 21, generator=torch.Generator().manual_seed(1), dtype=dtype)
        assert isinstance(samples._uniform(x), Line)


def test_long_lines_are_searched_behind_their_beginning() -> None:
    def line(x: torch.Tensor) -> Line:
        return Line(x - 0.5, 1 / 12, 0.5)

    fresh = torch.rand(1 << 20, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert randomness.patterned(line(fresh)) is None
    half = 1 << 19
    assert randomness.patterned(line(torch.cat([fresh[:half], fresh[:half]])))
    assert randomness.patterned(line(torch.cat([fresh[:half], fresh[:half].flip(0)])))
    # Whole stretches again, in single precision: what a kernel of half the work would give.
    again = torch.rand(1 << 21, generator=torch.Generator().manual_seed(4)).repeat(4)
    assert isinstance(samples._uniform(again), str)
    late = torch.cat([fresh[: half // 2], fresh[half // 2 :].sort().values])
    assert "uniform" not in str(samples._uniform(late)) and isinstance(samples._uniform(late), str)


def test_tests_of_chance_know_their_terms() -> None:
    """The counts of terms in closed form are those that the transforms of the places give."""
    for n in (2, 5, 300, 513):
        x = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64) - 0.5
        y, size = x.flip(0) * 0.7, 1 << (n - 1).bit_length()
        met = [sum((i ^ t) < n for i in range(n)) for t in range(size)]
        assert randomness._met(n, size, x.device).tolist() == met
        wide = torch.nn.functional.pad(x, (0, size - n)), torch.nn.functional.pad(y, (0, size - n))
        direct = torch.stack([(wide[0] * wide[1][torch.arange(size) ^ t]).sum() for t in range(size)])
        fast = randomness.walsh(randomness.walsh(wide[0]) * randomness.walsh(wide[1])) / size
        torch.testing.assert_close(fast, direct)
        for known in (None, torch.ones(n, dtype=torch.bool)):
            a = randomness.Line(x, 1 / 12, 0.5, known)
            for test in (randomness.shifted, randomness.mirrored, randomness.xored):
                assert test(a, a, own=True) is None


def test_binomial_law_up_close() -> None:
    n = 76_800
    g = torch.Generator().manual_seed(4)
    ones = torch.ones(n, dtype=torch.int32)
    args = {
        "input": ones,
        "other": ones,
        "total_count": torch.tensor(10, dtype=torch.int32),
        "probs": torch.tensor(0.5),
    }
    exact = (torch.rand(n, 10, generator=g) < 0.5).sum(1).float()
    rounded = (5 + 2.5**0.5 * torch.randn(n, generator=g)).round().clamp(0, 10)
    assert isinstance(samples._binomial(args, exact, 0), torch.Tensor)
    assert "successes came" in str(samples._binomial(args, rounded, 0))


def test_a_sample_beyond_all_chances_is_not_outside_the_distribution() -> None:
    """A sampler in fp32 gives one in some millions; the fp64 sums of its chances pass 1 by rounding."""
    n, g = 300, torch.Generator().manual_seed(4)
    ones, trials = torch.ones(n, dtype=torch.int32), torch.arange(n, dtype=torch.int32) % 60 + 1
    args = {"input": ones, "other": ones, "total_count": trials, "probs": torch.tensor(0.3)}
    drawn = torch.binomial(trials.float(), torch.full((n,), 0.3), generator=g)
    for place in range(n):
        y = drawn.clone()
        y[place] = trials[place]
        numbers = samples._binomial(args, y, 0)
        assert not isinstance(numbers, str)
        assert not isinstance(samples._uniform(numbers, coarse=True), str)


def test_a_pool_shows_between_cases() -> None:
    """Cases read windows of one pool: within a case they do not meet, between cases they do."""
    ring = plain(torch.Generator().manual_seed(1), 1 << 17)
    for source, passes in ((ring, False), (None, True)):
        seen: list[torch.Tensor] = []
        verdicts = []
        for k, n in enumerate((6, 5000, 20_000, 30_000, 50_000)):
            if source is None:
                outs = sampled(n, (10 + k, 20 + k), plain)
            else:
                outs = [source[1000 * k :][:n], source[65_000 + 1000 * k :][:n]]
            case = Case({}, {"size": (n,)})
            args = draw(RAND, case, 1)
            verdicts.append(judge.judge(RAND, case, args, [answer(o, args=args) for o in outs], earlier=seen).passed)
        assert verdicts[:2] == [True, True]
        assert all(verdicts) is passes


def behind(x, w, p=0.5, training=True):
    return _seams.dropout(x, p, training) @ w


def block(x, w, r, p=0.5):
    z = _seams.dropout(torch.softmax(x, -1), p, True) @ w + r
    return torch.nn.functional.layer_norm(z, z.shape[-1:])


BEHIND = make(behind, {"x": T("N M"), "w": T("M M")}, Dropout("p", "training", behind="w"), "2 * N * M * M")
BLOCK = make(
    block, {"x": T("N M"), "w": T("M M"), "r": T("N M")},
    Dropout("p", None, Close(ulps=64), behind="w", added="r", by_row=True), "2 * N * M * M",
)  # fmt: skip


@pytest.mark.parametrize("t", [BEHIND, BLOCK], ids=["product", "normalised"])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_behind_a_product(t: Any, p: float) -> None:
    case = Case({"N": 200, "M": 64}, {"p": p}, draws={"w": Orthogonal()})

    def passed(make_mask: Callable[[int], torch.Tensor], **swap: torch.Tensor) -> bool:
        outs = []
        for s in (11, 12):
            token = _seams.KEEP.set(make_mask(s))
            outs.append(answer(t.reference(**(args | swap)), args=args))
            _seams.KEEP.reset(token)
        return bool(judge.judge(t, case, args, outs).passed)

    for seed in range(5):
        args = draw(t, case, seed)
        assert passed(lambda s, seed=seed: bits(s + 100 * seed, p, (200, 64)))
    assert not passed(lambda s: bits(1, p, (200, 64)))
    assert not passed(lambda s: bits(s, p, (200, 64))[:, :1].expand(200, 64))
    assert not passed(lambda s: bits(s, 0.9 - p, (200, 64)))
    assert not passed(lambda s: bits(s, p, (200, 64)), w=torch.eye(64))
    if t is BLOCK:
        assert not passed(lambda s: bits(s, p, (200, 64)), r=torch.zeros(200, 64))


def test_masks_and_samples_do_not_come_again_in_other_cases() -> None:
    def run(seed: int, p: float, shape: tuple[int, int], earlier: list[Any]) -> bool:
        case = Case({"N": shape[0], "M": shape[1]}, {"p": p})
        args = draw(DROP, case, 1)
        masks = [torch.rand(shape[0] * shape[1], generator=torch.Generator().manual_seed(s)) >= p for s in (seed, seed + 1)]
        outs = [answer(torch.where(m.view(shape), args["x"] / (1 - p), 0.0), args=args) for m in masks]
        return bool(judge.judge(DROP, case, args, outs, earlier=earlier).passed)

    earlier: list[Any] = []
    assert all(run(10 * k, 0.1 + 0.08 * k, (50 + k, 257), earlier) for k in range(8))
    assert run(200, 0.5, (90, 40), earlier)
    assert not run(200, 0.3, (40, 90), earlier)


def test_windows_are_drawn_for_every_plane_and_call() -> None:
    def calls(f: Callable[[int, torch.Tensor], torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        k = torch.arange(120, dtype=torch.float64)
        return [(f(2 * c, k) % 1.0 - 0.5, f(2 * c + 1, k) % 1.0 - 0.5) for c in range(12)]

    def fresh(c: int, k: torch.Tensor) -> torch.Tensor:
        return torch.rand(120, generator=torch.Generator().manual_seed(c + 7), dtype=torch.float64)

    assert windows._together(calls(fresh)) == ""
    assert windows._together(calls(lambda c, k: 0.7548776662466927 * k + 0.381966 * c))
    assert windows._together(calls(lambda c, k: fresh(c % 4, k)))
    assert windows._together(calls(lambda c, k: fresh(c // 2, k)))


def test_the_binomial_law_is_exact() -> None:
    from scipy.stats import binom

    p = torch.tensor([0.0, 1.0, 0.5, 1e-9, 0.05, 0.95, 1 - 1e-9], dtype=torch.float64)
    for n in (1, 10, 60, 100):
        for k in (0, 1, n // 2, n):
            expected = torch.from_numpy(binom.pmf(k, n, p.numpy()))
            torch.testing.assert_close(samples.chances(k, n, p), expected, rtol=1e-11, atol=1e-300)
