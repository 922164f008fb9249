"""normalization/normalized_cosine_similarity."""

import torch.nn.functional as F
from kbx_env.tasks._varied import LARGE, TINY, long_axis, reduced, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Literal, Normal, Outlier, Paper, T, Uniform, task

ONE = {"p_norm": 1}


@task(
    difficulty=3,
    takes={"x1": T("*"), "x2": T("*")},
    truth=Close(ulps=16),
    cost=Cost(flops="6 * numel(x1)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="eps_similarity, p_norm=3, other axes and small inputs are exercised; timed with signed values.",
    cases=(
        Case({"*": (2, 2)}, draws={"x1": Literal(1, 2, 3, 4), "x2": Literal(2, -3, 4, 5)}),
        Case({"*": (1, 3)}, {"dim": 0} | ONE),
        Case({"*": (5, 2)}, {"eps_norm": 1e-9, "eps_similarity": 1e-3}, draw=Normal(scale=1e-10)),
        Case({"*": (256, 128)}, draw=Outlier()),
        # 2**17 elements: kernels share each column between two programs.
        Case({"*": (128, 1030)}, {"dim": 0} | ONE),
        Case({"*": (128, 300)}, {"dim": -1} | ONE, draw=Uniform(-1, 3)),
        # With p_norm > 1 a norm shows in the result only where eps_similarity is larger.
        Case({"*": (128, 300)}, {"p_norm": 3, "eps_similarity": 3.0}),
        Case({"*": (64, 130)}, {"eps_norm": 20.0, "eps_similarity": 0.9}),
        Case({"*": (64, 130)}, {"eps_similarity": 0.1} | ONE),
        Case({"*": (3, 20001)}, {"dim": 1}, draw=Uniform(-1, 2)),
        # Columns of so many parts that a block holds the states of few of them.
        Case({"*": (8201, 17)}, {"dim": 0}, draw=Uniform(-1, 2)),
        Case({"*": (5, 37, 6)}, {"dim": 1, "eps_similarity": 1.25}),
        Case({"*": (5, 7, 30)}, {"dim": -1, "p_norm": 3}, draw=Outlier()),
        Case({"*": (33, 65)}, {"dim": 0}, layouts={"x1": "transposed"}),
        Case({"*": (7, 31)}, {"dim": 1} | ONE, layouts={"x1": "strided", "x2": "strided"}),
        Case({"*": (4, 3, 2, 9)}, {"dim": 2}, layouts={"x1": "channels_last", "x2": "channels_last"}),
        Case({"*": (3, 0, 4)}, {"dim": 0}),
        Case({"*": (6, 5, 173)}, {"dim": -1, "eps_similarity": 0.12} | ONE, held=True),
        Case({"*": (29, 6, 17)}, {"dim": 0}, draw=Outlier(), held=True),
    ),
    varied=(
        reduced(
            lambda p: {"p_norm": p.whole(1, 4), "eps_norm": p.real(0.01, 5), "eps_similarity": p.real(0.01, 0.9)},
            draw=Uniform(-1, 2),
        ),
        *(
            sizes(lambda p: {"*": (p.whole(9, 20), p.whole(3, 9))}, lambda p, s: {"dim": 1, "p_norm": 2}, draws=draws)
            for draws in ({"x1": LARGE, "x2": TINY}, {"x1": TINY, "x2": LARGE})
        ),
        long_axis(lambda p: {"p_norm": p.whole(1, 3)}, draw=Uniform(-1, 2), tensors=("x1", "x2")),
    ),
    timed=(
        *(Case({"*": (n, 1024)}, {"dim": 1}) for n in (8192, 32768, 131072)),
        Case({"*": (8192, 4096)}, {"dim": 0}),
    ),
)
def normalized_cosine_similarity(x1, x2, dim=1, eps_similarity=1e-8, p_norm=2, eps_norm=1e-12):
    """Cosine similarity, along axis dim, of x1 and x2 after each of them has been normalised along that axis.

    Example: normalized_cosine_similarity([[1, 2], [0, 3]], [[2, 1], [1, 1]]) = [0.8, 0.707107]

    x1 and x2 are fp32 of one shape, any rank >= 1; dim may be negative. First u = x1 / max(||x1||_p, eps_norm) with
    p = p_norm (an int >= 1), and v from x2 likewise. Then y = sum(u * v) / (max(||u||_2, eps_similarity) *
    max(||v||_2, eps_similarity)): each norm has its own floor. The floors are tested: long vectors with p_norm=1 or a
    large eps_norm make ||u||_2 smaller than eps_similarity. Overflow and elements below 1e-12 in size are not tested.
    fp32 throughout. The result is a new tensor without axis dim. x1 and x2 may have any strides; other sizes than dim's
    may be 0.
    """
    u, v = F.normalize(x1, p_norm, dim, eps_norm), F.normalize(x2, p_norm, dim, eps_norm)
    return F.cosine_similarity(u, v, dim, eps_similarity)
