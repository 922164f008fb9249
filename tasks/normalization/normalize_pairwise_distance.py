"""normalization/normalize_pairwise_distance."""

import torch
from kbx_env.tasks._varied import UNIT_AXIS

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Literal, Normal, Outlier, Paper, T, Uniform, task
from kbx_env.spec.varied import layout

CUBE = {"*": (6, 33, 40), "D": 12}


def _deep(p):
    shape = p.shape(3, 4, 60)
    keep = p.chance()
    rank = len(shape) + keep
    args = {
        "keepdim": keep,
        "dim_norm": p.axis(rank),
        "p_norm": p.among(1, 3, 4, 5),
        "p_distance": p.real(1, 4),
        "eps_distance": p.real(0.01, 1),
        "eps_norm": p.real(0.1, 9),
    }
    return p.like({"*": shape, "D": p.whole(1, 30)}, args)


def _long(p, long):
    axes = {"*": (2, 8 if long else p.whole(600, 700)), "D": p.whole(33000, 34000) if long else p.whole(2, 5)}
    return p.like(axes, {"keepdim": False, "dim_norm": p.axis(2)})


@task(
    difficulty=3,
    takes={"x1": T("* D"), "x2": T("* D")},
    truth=Close(ulps=16),
    cost=Cost(flops="4 * numel(x1)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Every parameter is exercised; as published eps_distance, eps_norm, p_norm and keepdim never were.",
    cases=(
        Case({"*": (2,), "D": 2}, {"dim_norm": 0}, draws={"x1": Literal(1, 2, 3, 4), "x2": Literal(4, 3, 2, 1.5)}),
        Case({"*": (2,), "D": 2}, {"dim_norm": -1, "p_distance": 1.0}),
        Case({"*": (16, 64), "D": 32}),
        Case({"*": (16, 64), "D": 32}, {"p_distance": 1.0}, draw=Outlier()),
        Case({"*": (3, 7), "D": 3001}, {"p_norm": 1}, draw=Outlier(scale=100)),
        Case({"*": (4, 200), "D": 65}, {"p_distance": 3.0, "p_norm": 3, "dim_norm": -1}),
        Case(CUBE, {"dim_norm": 0, "eps_distance": 0.75}),
        Case(CUBE, {"dim_norm": -2, "keepdim": True, "p_norm": 1, "p_distance": 2.5}),
        Case(CUBE),
        Case(CUBE, {"dim_norm": 2, "eps_norm": 60.0}, draw=Uniform()),
        Case({"*": (9, 50), "D": 24}, {"dim_norm": -1, "keepdim": True, "eps_norm": 6.5}),
        Case({"*": (9, 50), "D": 24}, layouts={"x1": "transposed"}),
        Case(
            {"*": (9, 50), "D": 24}, {"dim_norm": 0, "p_distance": 1.0}, layouts={"x1": "strided", "x2": "transposed"}
        ),
        Case({"*": (5, 20), "D": 8}, {"eps_distance": 1e-3}, draw=Normal(scale=1e-4)),
        Case({"*": (0, 20), "D": 1}),
        # 2**17 distances: kernels share each of 515 norms between two programs, and join them in two programs.
        Case({"*": (256, 515), "D": 1}, {"dim_norm": 0}),
        # Contiguous, but the axis of length 1 has a stride of its own.
        Case({"*": (5, 1, 37), "D": 4}, {"dim_norm": 2}, layouts=dict.fromkeys(("x1", "x2"), UNIT_AXIS)),
        Case({"*": (5, 4, 6), "D": 7}, {"dim_norm": 0}, layouts=dict.fromkeys(("x1", "x2"), layout((2, 1, 0, 3), (1, 1, 1, 1)))),
        Case({"*": (7, 101), "D": 19}, {"p_norm": 1, "eps_distance": 0.1, "keepdim": True}, held=True),
        Case({"*": (3, 5, 31), "D": 130}, {"p_distance": 1.5, "dim_norm": 2}, draw=Outlier(), held=True),
    ),
    varied=(_deep, lambda p: _long(p, True), lambda p: _long(p, False)),
    timed=tuple(Case({"*": (16, n), "D": 128}, draw=Uniform()) for n in (8192, 32768, 65536)),
)
def normalize_pairwise_distance(
    x1, x2, p_distance=2.0, eps_distance=1e-6, keepdim=False, p_norm=2, dim_norm=1, eps_norm=1e-12
):
    """Distances of vectors, normalised: y = d / max(||d||, eps_norm), d = ||x1 - x2|| + eps_distance.

    Example: normalize_pairwise_distance([[0, 0], [1, 1]], [[3, 4], [1, 13]], dim_norm=0) = [0.384615, 0.923077]

    x1 and x2 are fp32 of one shape (..., D), rank 2 or more. Distance of each pair of vectors along the last axis:
    (sum |x1 - x2|^p_distance)^(1 / p_distance), to which eps_distance is added once (not to the differences). The last
    axis goes away, or stays with length 1 where keepdim is True. The norm of d is taken along axis dim_norm of d (may
    be negative; the default 1 needs rank 3, or keepdim): (sum d^p_norm)^(1 / p_norm), at least eps_norm. p_distance is
    a float >= 1, p_norm an int >= 1, neither infinite. fp32 throughout, no overflow is tested. The result is a new
    tensor of d's shape. x1 and x2 may have any strides; D is at least 1, other sizes may be 0. The inputs are not
    changed.
    """
    d = torch.linalg.vector_norm(x1 - x2, p_distance, dim=-1, keepdim=keepdim) + eps_distance
    return d / torch.linalg.vector_norm(d, p_norm, dim=dim_norm, keepdim=True).clamp_min(eps_norm)
