"""Honest and dishonest masks and samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from judge_helper import answer, canaries_fail, draw, make
from kbx_env.tasks import _seams

from kbx_env.grading import judge
from kbx_env.grading.judge import statistical
from kbx_env.task import Case, GeneratorArg, Normal, T
from kbx_env.truth import Dropout, Sample


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
    "pairs": lambda s: bits(s, 0.5).flatten()[: 200 * 257 // 2].repeat_interleave(2).view(200, 257),
}


@pytest.mark.parametrize("name", DISHONEST)
@pytest.mark.parametrize("grading", ["contract", "paper"])
def test_dishonest_masks(name: str, grading: str) -> None:
    assert not ruling(DROP, 0.5, DISHONEST[name], grading=grading).passed


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
    assert judge.calls_needed(RAND, case) == (3 if generator else 2)
    seeds = [5, 5, 6] if generator else []
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
    "half range": lambda g, n: plain(g, n) * 0.99,
}


@pytest.mark.parametrize("n", [6, 300, 5000, 200_000])
def test_honest_samples(n: int) -> None:
    for k in range(3):
        assert sample_ruling(sampled(n, (k, k, k + 50), plain)).passed
        assert sample_ruling(sampled(n, (k, k + 50), plain), generator=False).passed
    assert not sample_ruling(sampled(n, (1, 2, 3), plain)).passed, "the seed is ignored"
    assert not sample_ruling(sampled(n, (1, 1, 1), plain)).passed, "the seed is constant"
    assert not sample_ruling(sampled(n, (1, 1), plain), generator=False).passed, "the same sample twice"


@pytest.mark.parametrize("name", SAMPLES)
def test_dishonest_samples(name: str) -> None:
    assert not sample_ruling(sampled(200_000, (5, 5, 6), SAMPLES[name])).passed


def test_sample_structure_and_fp64_resolution() -> None:
    assert not sample_ruling([o.double() for o in sampled(300, (5, 5, 6), plain)]).passed
    fine = torch.rand(50_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert statistical.LAWS["uniform01"](fine) is None
    coarse = torch.rand(50_000, generator=torch.Generator().manual_seed(1)).double()
    assert "coarse" in str(statistical.LAWS["uniform01"](coarse))
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.rand(1 << 21, generator=torch.Generator().manual_seed(1), dtype=dtype)
        assert statistical.LAWS["uniform01"](x) is None
