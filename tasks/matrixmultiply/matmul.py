"""matrixmultiply/matmul."""

import torch
from kbx_env.tasks._matmul import matmul_cases, square
from kbx_env.tasks._varied import matmul

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Paper, T, task

HALF = {"tensor1": "f16", "tensor2": "f16"}


@task(
    difficulty=4,
    takes={"tensor1": T("*a"), "tensor2": T("*b")},
    truth=Close(ulps=16),
    cost=Cost(flops="2 * numel(tensor1) * N"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="fp16, which the published timings use, is tested as well; fp32 and fp16 are timed.",
    cases=(
        *matmul_cases("tensor1", "tensor2"),
        *(Case(c.axes, dtypes=HALF, held=c.held) for c in matmul_cases("tensor1", "tensor2")[8:10]),
        Case({"*a": (3, 50, 33), "*b": (33, 20), "N": 20}, dtypes=HALF, held=True),
    ),
    varied=matmul(({}, HALF), "tensor2"),
    timed=(*square(1024, 4096), *square(2048, 4096, dtypes=HALF)),
)
def matmul(tensor1, tensor2):
    """Matrix product of fp32 or fp16 tensors, as torch.matmul: 1-D, 2-D and batched with broadcasting.

    Example: matmul([[1, 2], [3, 4]], [10, 1]) = [12, 34]

    tensor1 and tensor2: (M, K) @ (K, N) -> (M, N); a 1-D operand is a row (left) or column (right) and loses that axis
    in the result (two of them: 0-d); leading axes are batch axes and broadcast. fp32: products and sums in IEEE fp32,
    TF32 is too coarse and fails. fp16 (both operands): accumulate in fp32 and round once to fp16. The result is a new
    tensor; operands may have any strides; M may be 0. Infinities and NaN are not tested.
    """
    return torch.matmul(tensor1, tensor2)
