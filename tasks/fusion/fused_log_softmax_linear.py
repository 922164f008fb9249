"""fusion/fused_log_softmax_linear."""

import torch.nn.functional as F
from kbx_env.tasks._linear import FLOPS, TAKES, linear_cases, linear_timed
from kbx_env.tasks._varied import LARGE, TINY, linear, plain, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, DtypeArg, Normal, Paper, task


@task(
    difficulty=3,
    takes=TAKES,
    truth=Close(ulps=16, arithmetic="f32"),
    cost=Cost(flops=FLOPS),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="fp16 is rounded once, at the end; as published the product was rounded before the bias was added, and an exact result "
    "failed. dim=0 and dtype are exercised.",
    cases=(
        *linear_cases({}, {"dim": 0}, {"dim": 1}, {"dtype": DtypeArg("f64")}, {"dim": -2}, half=False),
        *(linear_cases({"dtype": DtypeArg("f32")}, half=True)[-2:]),
        *(linear_cases({}, half=True)[-2:]),
        # More rows than a block along the first axis; no rows.
        Case({"B": 70, "K": 3, "O": 5}, {"dim": 0}),
        Case({"B": 0, "K": 3, "O": 5}, {"dim": 0}),
    ),
    varied=(
        # Along the batch a bias has no effect.
        *linear(lambda p: {"dim": p.axis(2)}, for_bias=lambda p: {"dim": p.among(1, -1)}, halves=True),
        sizes(lambda p: {"B": p.whole(3, 9), "K": p.whole(4, 8), "O": p.whole(3, 9)}, lambda p, s: {"dim": p.among(1, -1)},
              where=lambda c: plain(c) and "dtype" not in c.args, full=True, draws={"input": TINY, "weight": LARGE, "bias": TINY}),
        # Without the largest value of each line exp overflows, or gives zeros only.
        sizes(lambda p: {"B": p.whole(5, 12), "K": p.whole(4, 8), "O": p.whole(9, 30)}, lambda p, s: {"dim": p.among(1, -1)},
              where=lambda c: plain(c) and "dtype" not in c.args, full=True,
              draws=lambda p, s: {"bias": Normal(mean=p.among(-300.0, 300.0), scale=9)}),
        # Tiny products: torch's own fp64 results are far better than the fp32 accuracy that is asked for.
        sizes(lambda p: {"B": p.whole(3, 9), "K": p.whole(4, 8), "O": p.whole(3, 9)},
              lambda p, s: {"dim": p.among(1, -1), "dtype": DtypeArg("f64")},
              where=plain, full=True, draws={"input": TINY, "weight": LARGE, "bias": TINY}),
    ),
    timed=linear_timed((32, 8192, 8192), (1024, 1024, 4096), (4096, 4096, 4096)),
)  # fmt: skip
def fused_log_softmax_linear(input, weight, bias=None, dim=-1, dtype=None):
    """log_softmax(input @ weight^T + bias, dim).

    Example: fused_log_softmax_linear([[1, 2]], [[0.5, 0], [0, -1]]) = [[-0.07889, -2.57889]]

    input (B, K), weight (O, K), bias (O,) or None: z = input @ weight^T + bias. Products and sums in IEEE fp32: TF32 is
    too coarse and fails. fp16 inputs (all of them): accumulate in fp32, never round in between.

    y = z - log(sum of exp(z) along dim), without overflow; dim is 0, 1, -1 or -2. dtype is None (the default: the dtype
    of the inputs), torch.float32 or torch.float64, and the dtype of the result; float64 results need fp32 accuracy
    only. A new tensor (B, O) is returned; inputs may have any strides, B may be 0.
    """
    z = F.linear(input, weight, bias)
    return F.log_softmax(z, dim=dim, dtype=dtype)
