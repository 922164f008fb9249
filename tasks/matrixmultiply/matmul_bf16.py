"""matrixmultiply/matmul_bf16."""

import torch

from kbx_env.task import Case, Cost, Eye, Normal, Outlier, Paper, T, task
from kbx_env.truth import Close


def _case(left, right, **more):
    # N belongs to no tensor on its own; the count of operations needs it.
    return Case({"*a": left, "*b": right, "N": right[-1] if len(right) > 1 else 1}, **more)


def _square(n):
    return _case((n, n), (n, n))


@task(
    difficulty=2,
    takes={"input": T("*a", "bf16"), "other": T("*b", "bf16")},
    truth=Close(ulps=1.0, k=1.5, scale="element"),
    cost=Cost(flops="2 * numel(input) * N"),
    paper=Paper(rtol=5e-3, atol=5e-3),
    differs="The tolerance is one bf16 step (2^-7 relative); the published 5e-3 is less than one, so a fair rounding failed.",
    cases=(
        _case((64, 128), (128, 256)),
        _case((4, 64, 128), (4, 128, 64)),
        _case((128,), (128, 96)),
        _case((96, 128), (128,)),
        _case((300,), (300,)),
        _case((40,), (3, 40, 24)),
        _case((128, 512), (512, 128)),
        _case((64, 128), (128, 64), draw=Normal(clamp=5)),
        _case((4, 33, 65), (4, 65, 17), draw=Outlier(clamp=5)),
        _case((37, 53), (53, 71)),
        _case((2, 3, 16, 40), (3, 40, 24)),
        _case((48, 64), (64, 40), layouts={"input": "transposed", "other": "transposed"}),
        _case((40, 40), (40, 40), draws={"other": Eye()}),
        _case((1, 1), (1, 1)),
        _case((0, 8), (8, 4)),
        _case((5, 29, 130), (130, 67), held=True),
    ),
    timed=(_square(512), _square(2048), _square(4096)),
)
def matmul_bf16(input, other):
    """Matrix product of bf16 tensors, as torch.matmul: 1-D, 2-D and batched with broadcasting; bf16 result.

    (M, K) @ (K, N) -> (M, N); a 1-D operand is a row (left) or column (right) and loses that axis in the result (two of
    them: 0-d); leading axes are batch axes and broadcast. Accumulate in fp32 and round once to bf16: each element must
    be within about one bf16 step of the exact value (elements that cancel to nearly zero: of what fp32 accumulation
    loses). The result is a new tensor; operands may have any strides; M may be 0. Infinities and NaN are not tested.
    """
    return torch.matmul(input, other)
