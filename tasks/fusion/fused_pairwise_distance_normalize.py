"""fusion/fused_pairwise_distance_normalize."""

import math

import torch.nn.functional as F
from kbx_env.tasks._varied import longs, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Literal, Normal, Outlier, Paper, T, task


def _case(n, m, d, args=None, **more):
    return Case({"N": n, "M": m, "D": d}, args or {}, **more)


@task(
    difficulty=2,
    takes={"x1": T("N D"), "x2": T("M D")},
    truth=Close(ulps=16),
    cost=Cost(flops="4 * (numel(x1) + numel(x2))"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Distances of row i to row i, with eps_distance inside, as the text and torch's pairwise_distance have it; "
    "the published reference took all pairs of rows.",
    cases=(
        _case(2, 2, 2, draws={"x1": Literal(1, 2, 3, 4), "x2": Literal(5, 6, 8, 7)}),
        _case(2, 2, 2, {"p_norm": 1.0}, draws={"x1": Literal(1, 2, 3, 4), "x2": Literal(5, 6, 8, 7)}),
        _case(32, 32, 128),
        _case(32, 32, 128, {"keepdim": True}, draw=Outlier(0.01, 30)),
        _case(100, 100, 300, {"p_norm": 3.0}, draw=Outlier()),
        _case(100, 100, 300, {"p_norm": 1.5, "keepdim": True}),
        _case(65, 65, 257, {"p_norm": float("inf")}),
        _case(50, 50, 31, {"eps_distance": 0.5}),
        _case(50, 50, 31, {"eps_norm": 3.0, "eps_distance": -0.125}, draw=Normal(scale=0.5)),
        _case(40, 40, 70, {"eps_norm": 0.01, "p_norm": 1.0}, draw=Choice(0.0, 0.0, 1e-4, -1e-4, 1e-5)),
        _case(2, 2, 32768),
        _case(2, 2, 20001, {"p_norm": float("inf")}),
        # One element more than a block has.
        _case(2, 2, 16385, {"eps_distance": 0.01}),
        _case(4, 4, 5000, {"p_norm": 2.5}),
        _case(1, 37, 65),
        _case(37, 1, 65, {"keepdim": True, "eps_distance": 0.01}),
        _case(33, 33, 20, layouts={"x1": "transposed", "x2": "strided"}),
        _case(0, 0, 5),
        _case(77, 77, 211, {"eps_distance": 0.03}, held=True),
        _case(19, 19, 1030, {"p_norm": 4.0}, held=True),
    ),
    varied=(
        sizes(longs({"N": (2, 20), "D": (2, 40)}, {"N": 1100, "D": 4300}, lambda p, s: {"M": s["N"]}),
              lambda p, s: {"p_norm": p.among(math.inf, p.real(1, 5)), "eps_norm": p.real(0.01, 4),
                    "eps_distance": p.real(0.01, 0.5), "keepdim": p.chance()},
              draw=Normal()),
    ),
    timed=tuple(_case(n, n, d) for n, d in ((131072, 128), (65536, 1024), (8192, 16384))),
)  # fmt: skip
def fused_pairwise_distance_normalize(x1, x2, p_norm=2.0, eps_norm=1e-12, eps_distance=1e-6, keepdim=False):
    """Distance of each row of x1 to the same row of x2, after both rows have been scaled to norm 1; all fp32.

    Example: fused_pairwise_distance_normalize([[3, 4], [1, 0]], [[4, 3], [0, 2]]) = [0.282843, 1.414214]
    Example: fused_pairwise_distance_normalize([[3, 4], [1, 0]], [[4, 3], [0, 2]], p_norm=1.0, eps_distance=0.5,
    keepdim=True) = [[1.0], [2.0]]

    x1 (N, D) and x2 (M, D) with M = N, or one of N and M 1: then that one row is compared to every row of the other.
    With p = p_norm and |v|_p = (sum over d of |v[d]|^p)^(1 / p): a = x1[i] / max(|x1[i]|_p, eps_norm), b likewise from
    x2, and the result is |a - b + eps_distance|_p, where eps_distance is added to every element of the difference. p is
    a number >= 1, or infinity: the largest |v[d]|.

    The result has the shape (max(N, M),), or (max(N, M), 1) with keepdim; it is empty for N = M = 0. Compute in fp32.
    New tensor; inputs may have any strides and are not changed. Norms neither overflow nor vanish in fp32.
    """
    a, b = F.normalize(x1, p_norm, -1, eps_norm), F.normalize(x2, p_norm, -1, eps_norm)
    return F.pairwise_distance(a, b, p_norm, eps_distance, keepdim)
