"""activation/combined_activation."""

import torch
from kbx_env.tasks._varied import LARGE, SHARE, TINY, adjacent, balanced, few_rows, large_factor

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Normal, Outlier, Paper, T, task


def _case(n, k, d, lead=None, bias=None, **more):
    axes = {"N": n, "K": k, "D": d, "*w": (n, d) if lead is None else lead, "*b": (n, d) if bias is None else bias}
    return Case(axes, **({"draws": {"input": Normal(scale=k**-0.25), "weight1": Normal(scale=k**-0.25)}} | more))


def _long(p):
    return _product(p, {"N": p.whole(130, 150), "K": p.whole(560, 640), "D": p.whole(130, 150)}, "input", "weight1")


def _vector(p):
    sizes = few_rows(p, "N", "K", "D")
    # Whole tensors: each row has elements of its own.
    whole = dict.fromkeys(("*w", "*b"), (sizes["N"], sizes["D"]))
    return _product(p, sizes | whole, "weight1", "input", layouts=adjacent(p, 0, "weight1"))


def _product(p, s, large, small, **more):
    shape = (s["N"], s["D"])
    return p.like({"*w": p.broadcast(shape), "*b": p.broadcast(shape)} | s, out=True,
                  draws=balanced(p, large, small, round(s["K"] ** -0.25, 3)), **more)  # fmt: skip


def _large_right_factor(p):
    return _product(p, large_factor(p, "N", "K", "D"), "weight1", "input")


def _scaled(first, second, others):
    """Small matrices, of which one has large numbers."""

    def family(p):
        n, k, d = p.whole(3, 9), p.whole(4, 8), p.whole(3, 9)
        draws = {"input": first, "weight1": second, "weight2": others, "bias": others}
        return p.like({"N": n, "K": k, "D": d, "*w": (n, d), "*b": (d,)}, draws=draws)

    return family


@task(
    difficulty=3,
    takes={"input": T("N K"), "weight1": T("K D"), "weight2": T("*w"), "bias": T("*b")},
    truth=Close(ulps=16),
    cost=Cost(flops="2 * N * K * D"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="1-D weight2 and bias, which the published timings use, and out= are exercised.",
    cases=(
        _case(2, 3, 4),
        _case(5, 5, 5, (5,), (5,)),
        _case(64, 100, 96),
        # Many rows: kernels walk the tiles in groups of rows, of which the last one is not full. Results of one product.
        _case(270, 1, 520),
        _case(64, 100, 96, (96,), (64, 1), draws={}, draw=Outlier(scale=3)),
        _case(33, 257, 70, (1,), (), out=True),
        _case(48, 64, 40, (40,), (40,), layouts={"input": "transposed", "weight1": "transposed", "bias": "strided"}),
        _case(17, 31, 29, layouts={"input": "strided", "weight2": "transposed"}),
        _case(1, 130, 200, out=True),
        _case(0, 5, 7, (7,), (7,)),
        _case(29, 140, 83, (83,), held=True),
    ),
    varied=(_long, _vector, _large_right_factor, _scaled(LARGE, SHARE, LARGE), _scaled(SHARE, LARGE, TINY)),
    timed=(_case(1024, 1024, 1024, (1024,), (1024,)), _case(2048, 2048, 2048), _case(4096, 4096, 4096, (4096,), (4096,))),
)  # fmt: skip
def combined_activation(input, weight1, weight2, bias, *, out=None):
    """tanh(sigmoid(input @ weight1)) * weight2 + bias, fp32.

    Example: combined_activation([[1, 2]], [[0], [1]], [10], [1]) = [[8.066366]]

    input (N, K), weight1 (K, D); weight2 and bias broadcast to (N, D) and may be 0-d. sigmoid(z) = 1 / (1 + exp(-z)).
    Products and sums in IEEE fp32: TF32 is too coarse and fails. out: None (the default: a new tensor), or a tensor of
    the result's shape and dtype with any strides and any contents, which is filled and returned. Inputs may have any
    strides; N may be 0.
    """
    y = torch.tanh(torch.sigmoid(input @ weight1)) * weight2 + bias
    return y if out is None else out.copy_(y)
