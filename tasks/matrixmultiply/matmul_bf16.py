"""matrixmultiply/matmul_bf16."""

import torch
from kbx_env.tasks._matmul import matmul_cases, square
from kbx_env.tasks._varied import adjacent, few_rows, matmul

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Cost, Normal, Paper, T, task


def _beyond_fp16(p, few):
    """Numbers of which fp16 has neither the large nor the small ones; with few rows, for which kernels take another path."""
    m, k, n = few_rows(p, "m", "k", "n").values() if few else (p.whole(3, 9), p.whole(20, 40), p.whole(3, 9))
    large, small = Normal(scale=2.0**18), Normal(scale=2.0**-22)
    draws = dict(zip(p.shuffled(("input", "other")), (large, small), strict=True))
    layouts = adjacent(p, 0, "other") if few else {}
    return p.like({"*a": (m, k), "*b": (k, n), "N": n}, draws=draws, layouts=layouts)


@task(
    difficulty=2,
    takes={"input": T("*a", "bf16"), "other": T("*b", "bf16")},
    truth=Close(ulps=1.0, k=1.5, scale="element"),
    cost=Cost(flops="2 * numel(input) * N"),
    paper=Paper(rtol=5e-3, atol=5e-3),
    differs="The tolerance is one bf16 step (2^-7 relative); the published 5e-3 is less than one, so a fair rounding failed.",
    cases=matmul_cases("input", "other"),
    varied=(*matmul(), lambda p: _beyond_fp16(p, True), lambda p: _beyond_fp16(p, False)),
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
