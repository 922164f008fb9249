"""fusion/fused_mv_sigmoid_sub."""

import torch
from kbx_env.tasks._varied import LARGE, SMALL_POSITIVE, TINY, balanced, longs, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Normal, Outlier, Paper, T, Uniform, task


def _case(n, m, lead=None, args=None, **more):
    draws = {"input": Normal(scale=m**-0.25), "vec": Normal(scale=m**-0.25)}
    return Case({"N": n, "M": m, "*o": (n,) if lead is None else lead}, args or {}, **({"draws": draws} | more))


@task(
    difficulty=2,
    takes={"input": T("N M"), "vec": T("M"), "other": T("*o")},
    truth=Close(ulps=16),
    cost=Cost(flops="2 * N * M"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="out= and broadcasts of other are exercised; sums are scaled so that the sigmoid does not saturate.",
    cases=(
        _case(2, 2),
        _case(2, 3, args={"other": 0.5}),
        _case(70, 130, args={"alpha": 2}),
        _case(70, 130, (1,), {"alpha": -0.3}, draw=Outlier(scale=3)),
        _case(33, 1030, (), out=True),
        _case(300, 17, args={"other": -2, "alpha": 0.25}, out=True),
        _case(48, 64, layouts={"input": "transposed", "vec": "strided", "other": "strided"}),
        _case(21, 40, layouts={"input": "strided"}),
        _case(1, 5),
        _case(0, 4),
        _case(57, 211, args={"alpha": 1.5}, held=True),
    ),
    varied=(
        sizes(
            longs({"N": (2, 30), "M": (2, 40)}, {"N": 1100, "M": 2100}, lambda p, s: {"*o": ()}),
            lambda p, s: {"alpha": p.real(-2, 2)},
            where=lambda c: "other" not in c.args,
            out=True,
            draws=lambda p, s: balanced(p, *p.shuffled(("input", "vec")), round(s["M"] ** -0.25, 3))
            | {"other": Uniform(20, 60)},
        ),
        *(
            sizes(lambda p: {"N": p.whole(9, 20), "M": p.whole(5, 9), "*o": ()}, lambda p, s: {"alpha": p.real(0.5, 2)},
                  where=lambda c: "other" not in c.args, draws=draws)
            for draws in ({"input": LARGE, "vec": TINY, "other": SMALL_POSITIVE}, {"input": TINY, "vec": LARGE, "other": Normal()})
        ),
    ),
    timed=tuple(_case(n, n, args={"other": 0.5}) for n in (4096, 8192, 16384)),
)
def fused_mv_sigmoid_sub(input, vec, other, alpha=1, *, out=None):
    """sigmoid(input @ vec) - alpha * other, fp32.

    Example: fused_mv_sigmoid_sub([[1, 2], [0, -1]], [1, 1], 0.5, alpha=2) = [-0.047426, -0.731059]

    input (N, M), vec (M,); other is an fp32 tensor (0-d too) that broadcasts to (N,), or a number; alpha is a number.
    sigmoid(z) = 1 / (1 + exp(-z)). Sums in fp32. out: None (the default: a new tensor), or a tensor of the result's
    shape and dtype with any strides and any contents, which is filled and returned. Inputs may have any strides; N may
    be 0.
    """
    y = torch.sigmoid(input @ vec) - alpha * other
    return y if out is None else out.copy_(y)
