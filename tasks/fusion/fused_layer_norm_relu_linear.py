"""fusion/fused_layer_norm_relu_linear."""

import torch.nn.functional as F
from kbx_env.tasks._linear import GIVEN
from kbx_env.tasks._varied import LARGE, SHARE, adjacent, few_rows, large_factor, longs, sized

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Normal, Outlier, Paper, T, task


def _case(lead, k, o, shape=None, scale=0.3, **more):
    args = more.pop("args", {})
    return Case({"*": lead, "K": k, "O": o}, {"normalized_shape": o if shape is None else shape} | args,
                **({"draw": Normal(scale=scale)} | more))  # fmt: skip


def _rows(p):
    shape, o = p.shape(2, 3, 40), p.whole(4, 30)
    whole = p.chance()
    return p.like({"*": shape, "K": p.whole(2, 30), "O": o}, {"normalized_shape": (shape[-1], o) if whole else p.among(o, (o,))},
                  draw=Normal(scale=0.3))  # fmt: skip


def _long(p, s, **more):
    return p.like(
        {"*": (s["B"],), "K": s["K"], "O": s["O"]},
        {"normalized_shape": s["O"], "eps": p.real(0.001, 0.5)},
        **({"draw": Normal(scale=0.3)} | more),
    )


def _vector(p):
    s = few_rows(p, "B", "K", "O")
    return _long(p, s, draw=Normal(scale=0.1), layouts=adjacent(p, 1, "weight"), full=True)


def _large_right_factor(p):
    return _long(p, large_factor(p, "B", "K", "O"), draw=Normal(scale=0.1))


@task(
    difficulty=4,
    takes={"input": T("* K"), "weight": T("O K"), "bias": T("O", optional=True)},
    truth=Close(ulps=32),
    cost=Cost(flops="2 * numel(input) * O"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="normalized_shape is always given (as published None, the default, raised); elementwise_affine is said to have "
    "no effect. Batches are timed beside the published few rows.",
    cases=(
        _case((3,), 4, 5),
        _case((4,), 2, 3, given=GIVEN),
        _case((2, 5), 33, 40, (40,), given=GIVEN),
        _case((64,), 100, 96, given=GIVEN, draw=Outlier(scale=3)),
        # Many rows: kernels walk the tiles in groups of rows, of which the last one is not full. Results of one product.
        _case((270,), 1, 520, given=GIVEN),
        # Two rows: kernels multiply vectors.
        _case((2,), 1030, 9, scale=0.1),
        _case((3, 7, 2), 16, 130, [130], args={"eps": 0.1}),
        _case((6,), 40, 24, (6, 24), given=GIVEN),
        _case((4, 3), 40, 24, (3, 24), args={"elementwise_affine": False}),
        _case((40,), 64, 48, layouts={"input": "transposed", "weight": "transposed"}, given=GIVEN),
        _case((9,), 30, 31, layouts={"input": "strided", "bias": "strided"}, given=GIVEN),
        _case((), 30, 50, given=GIVEN),
        _case((0,), 4, 8),
        _case((2, 9), 77, 83, given=GIVEN, held=True),
    ),
    varied=(
        _rows,
        _vector,
        _large_right_factor,
        *(
            sized(lambda p, s, draws=draws: _long(p, s, draws=draws, full=True),
                  (lambda p: {"B": p.whole(3, 9), "K": p.whole(4, 8), "O": p.whole(9, 20)},))
            for draws in ({"input": LARGE, "weight": SHARE}, {"input": SHARE, "weight": LARGE, "bias": LARGE})
        ),
        sized(_long, longs({"B": (2, 12), "K": (3, 30), "O": (4, 30)}, {"B": 140, "K": 560, "O": 1050}, most=10_000_000)),
    ),
    timed=tuple(
        _case((b,), k, o, scale=k**-0.25, given=GIVEN) for b, k, o in ((32, 16384, 8192), (1024, 1024, 4096), (4096, 4096, 4096))
    ),
)  # fmt: skip
def fused_layer_norm_relu_linear(input, weight, bias=None, normalized_shape=None, eps=1e-5, elementwise_affine=True):
    """layer_norm(relu(input @ weight^T + bias), normalized_shape) without affine weights, fp32.

    Example: fused_layer_norm_relu_linear([[1, 2]], [[0.5, 0], [0, -1], [1, 1]], normalized_shape=3) =
        [[-0.508001, -0.889002, 1.397003]]

    input (*, K), weight (O, K), bias (O,) or None; z = max(input @ weight^T + bias, 0) has the shape (*, O). Products
    and sums in IEEE fp32: TF32 is too coarse and fails. normalized_shape (its default None is not tested) is an int or
    a sequence equal to the last axes of z: over these axes y = (z - mean) / sqrt(variance + eps), the variance divided
    by their number of elements. elementwise_affine is accepted and has no effect. A new tensor is returned; inputs may
    have any strides and rows may be 0.
    """
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    return F.layer_norm(F.relu(F.linear(input, weight, bias)), shape, eps=eps)
