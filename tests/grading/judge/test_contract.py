"""Quantization contracts and factorisations: honest and dishonest answers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from judge_helper import answer, canaries_fail, draw, make, rule, tf32
from kbx_env.tasks import _schemes

from kbx_env.grading import judge, reference
from kbx_env.grading.judge import contract
from kbx_env.spec.criteria import Invariant, QuantizationScheme
from kbx_env.spec.task import Case, Constant, Normal, Outlier, Paper, T


def w8a8(a, b):
    (qa, sa), (qb, sb) = _schemes.int8_symmetric(a, 1), _schemes.int8_symmetric(b, 0)
    return (qa @ qb) * sa * sb


PAPER = Paper(cosine=0.99, l1=0.05, rmse=5.0)
W8A8 = make(w8a8, {"a": T("M K"), "b": T("K N")}, QuantizationScheme("int8", "int32"), "2 * M * N * K", paper=PAPER)
CASE = Case({"M": 33, "K": 300, "N": 65})


def quantized(x: torch.Tensor, dim: int, how: str = "divide") -> tuple[torch.Tensor, torch.Tensor]:
    peak = x.abs().amax(dim, keepdim=True)
    if how == "per tensor":
        peak = x.abs().max().expand_as(peak)
    top = 128 if how == "128" else 127
    s = peak / top
    y = x * (top / peak) if how == "multiply" else x / s
    q = torch.trunc(y) if how == "truncate" else torch.floor(y) if how == "floor" else torch.round(y)
    if how == "int4":
        s = peak / 7
        q = torch.round(x / s)
    return q.clamp(-127, 127), s


def product(args: dict[str, Any], ha: str = "divide", hb: str = "divide", order: int = 0) -> torch.Tensor:
    (qa, sa), (qb, sb) = quantized(args["a"], 1, ha), quantized(args["b"], 0, hb)
    acc = (qa.double() @ qb.double()).float()
    return (acc * sa * sb, acc * (sa * sb), (acc * sb) * sa)[order]


@pytest.mark.parametrize("law", [Normal(), Outlier(0.01, 10.0)], ids=["normal", "outlier"])
def test_honest_quantization(law: Any) -> None:
    case = Case(CASE.axes, draw=law)
    for seed in range(6):
        args = draw(W8A8, case, seed)
        for ha in ("divide", "multiply"):
            for hb in ("divide", "multiply"):
                for order in range(3):
                    assert rule(W8A8, case, args, product(args, ha, hb, order)).passed


def test_dishonest_quantization() -> None:
    args = draw(W8A8, CASE, 1)
    for how in ("truncate", "floor", "128", "per tensor", "int4"):
        assert not rule(W8A8, CASE, args, product(args, how)).passed, how
        assert not rule(W8A8, CASE, args, product(args, "divide", how)).passed, how
    for name, y in {
        "fp32 product": args["a"] @ args["b"],
        "tf32 product": tf32(args["a"]) @ tf32(args["b"]),
        "weights only": args["a"] @ (quantized(args["b"], 0)[0] * quantized(args["b"], 0)[1]),
        "fp16 accumulation": product(args).half().float(),
    }.items():
        assert not rule(W8A8, CASE, args, y).passed, name
    assert rule(W8A8, CASE, args, args["a"] @ args["b"], grading="paper").passed
    assert not rule(W8A8, CASE, args, torch.zeros(33, 65), grading="paper").passed
    canaries_fail(W8A8, CASE, args)


@pytest.mark.parametrize("how", ["divide", "per tensor", "truncate", "int4"])
def test_variants_that_are_known_change_no_ruling(how: str) -> None:
    args = draw(W8A8, CASE, 3)
    expected, given = reference.expect(W8A8, CASE, args, "cpu"), answer(product(args, how), args=args)
    known = list(contract.variants(W8A8, CASE, args, expected, "cpu"))
    fresh = contract.rule(W8A8.truth, W8A8, CASE, args, expected, given, "cpu")
    same = contract.rule(W8A8.truth, W8A8, CASE, args, expected, given, "cpu", known)
    # Nobody reads the reasons of several answers to one call: the noise, which takes two evaluations, is left out there.
    assert (same.passed, same.error, same.reason) == (fresh.passed, fresh.error, fresh.reason.partition("; ")[0])
    assert fresh.passed == (how == "divide")


def test_all_zero_operands() -> None:
    case = Case(CASE.axes, draw=Constant(0.0))
    args = draw(W8A8, case, 1)
    assert rule(W8A8, case, args, torch.zeros(33, 65)).passed
    assert judge.is_trivial(W8A8, case, args)
    assert not judge.is_trivial(W8A8, CASE, draw(W8A8, CASE, 1))


def svd(A, full_matrices=True):
    return tuple(torch.linalg.svd(A, full_matrices=full_matrices))


SVD = make(svd, {"A": T("*b m n")}, Invariant("svd"))


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (31, 31), (64, 32), (3, 3), (1, 5)])
@pytest.mark.parametrize("full", [True, False], ids=["full", "thin"])
def test_svd(shape: tuple[int, int], full: bool) -> None:
    case = Case({"*b": (2,), "m": shape[0], "n": shape[1]}, {"full_matrices": full})
    args = draw(SVD, case, 1)
    a = args["A"]
    u, s, vh = torch.linalg.svd(a, full_matrices=full)
    k = s.shape[-1]
    assert rule(SVD, case, args, u, s, vh).passed
    signs = torch.where(torch.arange(k) % 2 == 0, 1.0, -1.0)
    u2, vh2 = u.clone(), vh.clone()
    u2[..., :k] *= signs
    vh2[..., :k, :] *= signs[:, None]
    assert rule(SVD, case, args, u2, s, vh2).passed
    wrong = {
        "signs of U only": (-u, s, vh),
        "S off": (u, s * (1 + 1e-3), vh),
        "U not orthogonal": (u * 1.001, s / 1.001, vh),
        "tf32": (tf32(u * 0.7371) / 0.7371, s, tf32(vh * 0.7371) / 0.7371),
        "zeros": (torch.zeros_like(u), torch.zeros_like(s), torch.zeros_like(vh)),
        "nan": (u * torch.nan, s, vh),
    }
    if k > 1:
        turned = (u2[..., :k].flip(-1), s.flip(-1), vh2[..., :k, :].flip(-2))
        wrong["unsorted"] = (u, s.flip(-1), vh) if full else turned
        wrong["swapped"] = (vh.mT, s, u.mT)
    if full and shape[0] > k:
        null = u.clone()
        null[..., k:] = 0.0
        wrong["null space left out"] = (null, s, vh)
        null = u.clone()
        null[..., -1] = u[..., 0]
        wrong["null space repeats a column"] = (null, s, vh)
    if k > 1:
        u3, s3 = u.clone(), s.clone()
        u3[..., k - 1] *= -1
        s3[..., -1] *= -1
        wrong["negative S"] = (u3, s3, vh)
    for name, factors in wrong.items():
        assert not rule(SVD, case, args, *factors).passed, name


def test_svd_of_nothing_and_of_rank_one() -> None:
    empty = Case({"*b": (), "m": 0, "n": 3})
    args = draw(SVD, empty, 1)
    assert rule(SVD, empty, args, *torch.linalg.svd(args["A"])).passed
    assert not rule(SVD, empty, args, torch.zeros(0, 0), torch.zeros(0), torch.zeros(3, 3)).passed
    ones = Case({"*b": (), "m": 6, "n": 4}, draw=Constant(1.0))
    args = draw(SVD, ones, 1)
    assert rule(SVD, ones, args, *torch.linalg.svd(args["A"])).passed
    bad = answer(*torch.linalg.svd(args["A"])[:2], args=args)
    assert not judge.judge(SVD, ones, args, [bad]).passed


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e300])
def test_noise_without_bound_is_a_number_of_decibels(value: float) -> None:
    """Found by fuzzing: an infinite result ended the grader instead of the grading."""
    plain = torch.ones(4, dtype=torch.float64)
    assert contract.sqnr(torch.tensor([1.0, 1.0, 1.0, value], dtype=torch.float64), plain) < -50
    assert contract.sqnr(plain, plain) == math.inf and contract.sqnr(plain, 0 * plain) == -math.inf
