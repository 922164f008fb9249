"""matrixmultiply/matmul_bf16."""

import torch
from kbx_env.tasks._matmul import matmul_cases, square
from kbx_env.tasks._varied import matmul

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Cost, Paper, T, task


@task(
    difficulty=2,
    takes={"input": T("*a", "bf16"), "other": T("*b", "bf16")},
    truth=Close(ulps=1.0, k=1.5, scale="element"),
    cost=Cost(flops="2 * numel(input) * N"),
    paper=Paper(rtol=5e-3, atol=5e-3),
    differs="The tolerance is one bf16 step (2^-7 relative); the published 5e-3 is less than one, so a fair rounding failed.",
    cases=matmul_cases("input", "other"),
    varied=matmul(),
    timed=square(2048, 4096, 8192),
)
def matmul_bf16(input, other):
    """Matrix product of bf16 tensors, as torch.matmul: 1-D, 2-D and batched with broadcasting; bf16 result.

    Example: matmul_bf16([[1, 2], [3, 4]], [10, 1]) = [12, 34]

    input and other: (M, K) @ (K, N) -> (M, N); a 1-D operand is a row (left) or column (right) and loses that axis in
    the result (two of them: 0-d); leading axes are batch axes and broadcast. Accumulate in fp32 and round once to bf16:
    each element must be within about one bf16 step of the exact value (elements that cancel to nearly zero: of what
    fp32 accumulation loses). The result is a new tensor; operands may have any strides; M may be 0. Infinities and NaN
    are not tested.
    """
    return torch.matmul(input, other)
