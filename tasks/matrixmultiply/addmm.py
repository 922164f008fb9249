"""matrixmultiply/addmm."""

import math

import torch
from kbx_env.tasks._varied import DEEP_SUM, LARGE, TINY, adjacent, balanced, few_rows, large_factor

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Constant, Cost, Normal, Outlier, Paper, T, task

HALF = {"input": "f16", "mat1": "f16", "mat2": "f16"}


def _case(m, k, n, lead=None, args=None, **more):
    return Case({"*": (m, n) if lead is None else lead, "M": m, "K": k, "N": n}, args or {}, **more)


def _any_factors(p):
    s = {"M": p.whole(130, 150), "K": p.whole(560, 640), "N": p.whole(130, 150)}
    beta, alpha = p.among(0, p.real(-2, 2)), p.real(-2, 2)
    return p.like({"*": p.broadcast((s["M"], s["N"]))} | s, {"beta": beta, "alpha": alpha}, out=True, draw=Normal(),
                  draws=balanced(p, "mat1", "mat2") | ({"input": Constant(math.nan)} if beta == 0 else {}))  # fmt: skip


def _deep(p):
    m, n = p.whole(2, 12), p.whole(2, 12)
    return p.like({"*": p.broadcast((m, n)), "M": m, "K": DEEP_SUM + p.whole(0, 200), "N": n}, {"beta": p.real(-2, 2), "alpha": 1},
                  draw=Normal(scale=0.5), dtypes=HALF)  # fmt: skip


def _vector(p):
    return _product(p, few_rows(p, "M", "K", "N"), out=True, layouts=adjacent(p, 0, "mat2") | {"out": "strided"})


def _large_right_factor(p):
    return _product(p, large_factor(p, "M", "K", "N"))


def _product(p, s, **more):
    # Few rows: all of input, so that each row has elements of its own.
    shape = (s["M"], s["N"]) if s["M"] == 2 else p.broadcast((s["M"], s["N"]))
    return p.like(s | {"*": shape}, {"beta": p.real(-2, 2), "alpha": p.real(-2, 2)}, draw=Normal(scale=0.2),
                  draws=balanced(p, "mat2", "mat1", 0.2), where=lambda c: not c.dtypes, **more)  # fmt: skip


def _small(p):
    return _of_size(p, TINY)


def _large(p):
    return _of_size(p, LARGE)


def _of_size(p, numbers):
    s = {"M": p.whole(5, 9), "K": p.whole(5, 9), "N": p.whole(5, 9)}
    return p.like({"*": p.broadcast((s["M"], s["N"]))} | s, {"beta": p.real(0.5, 2), "alpha": p.real(0.5, 2)},
                  draws={"input": numbers, "mat1": numbers, "mat2": Normal()}, where=lambda c: not c.dtypes)  # fmt: skip


@task(
    difficulty=4,
    takes={"input": T("*"), "mat1": T("M K"), "mat2": T("K N")},
    truth=Close(ulps=16),
    cost=Cost(flops="2 * M * K * N", reads={"input": "numel(input) * nonzero(beta)"}),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="out= and broadcasts of input are exercised, and fp16, which the published timings use, is tested as well.",
    cases=(
        _case(2, 2, 2),
        _case(3, 4, 5, (5,), {"beta": 0.5, "alpha": 2.0}),
        _case(64, 96, 80, args={"beta": -1.5}),
        # Many rows: kernels walk the tiles in groups of rows, of which the last one is not full. Results of one product.
        _case(270, 1, 520),
        _case(2, 1030, 9, args={"beta": 0}, draws={"input": Constant(float("nan"))}, layouts={"mat2": "transposed"}, out=True),
        _case(64, 96, 80, (64, 1), {"alpha": 0.3}, draw=Outlier()),
        _case(33, 130, 57, (), {"beta": 2, "alpha": -1}, out=True),
        _case(40, 31, 29, args={"beta": 0}, draws={"input": Constant(float("nan"))}),
        _case(48, 64, 40, layouts={"input": "transposed", "mat1": "transposed", "mat2": "transposed"}),
        _case(17, 50, 23, layouts={"mat1": "strided", "input": "strided"}, out=True),
        _case(50, 70, 60, dtypes=HALF, args={"alpha": 0.5}),
        _case(0, 4, 5),
        _case(29, 140, 83, (1, 83), {"beta": 0.7, "alpha": 1.3}, held=True),
        _case(23, 99, 40, dtypes=HALF, held=True),
    ),
    varied=(_any_factors, _deep, _vector, _large_right_factor, _small, _large),
    timed=(_case(1024, 1024, 1024), _case(4096, 4096, 4096), _case(2048, 2048, 2048, dtypes=HALF),
           _case(4096, 4096, 4096, dtypes=HALF)),
)  # fmt: skip
def addmm(input, mat1, mat2, beta=1, alpha=1, out=None):
    """beta * input + alpha * (mat1 @ mat2), fp32 or fp16.

    Example: addmm([1, 2], [[1, 2], [3, 4]], [[1, 0], [0, 1]], beta=10, alpha=0.5) = [[10.5, 21], [11.5, 22]]

    mat1 (M, K), mat2 (K, N); input broadcasts (0-d too) to (M, N). beta and alpha are numbers; with beta = 0 input is
    not read, NaN in it does not show. fp32: products and sums in IEEE fp32, TF32 is too coarse and fails. fp16 (all
    three): accumulate in fp32, round once. out: None (the default: a new tensor), or a tensor of the result's shape and
    dtype with any strides and any contents, which is filled and returned. Inputs may have any strides; M may be 0.
    """
    y = torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)
    return y if out is None else out.copy_(y)
