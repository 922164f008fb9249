"""fusion/fused_cos_avg_pool1d."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._varied import longs, sized

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Choice, Cost, Literal, Outlier, Paper, T, Uniform, task

TOY = {"N": 1, "C": 1, "L": 5}
MIDDLE = {"N": 4, "C": 16, "L": 256}
WIDE = Uniform(-20, 20)


def _any_windows(p, s):
    k = p.whole(4, 40)
    # A long axis keeps a long result: its blocks are to be more than one.
    stride = p.among(None, 3, 5, 6, 7, 9) if s["L"] < 1000 else p.among(1, 2)
    args = {"kernel_size": k, "stride": stride, "padding": p.whole(0, k // 2), "ceil_mode": p.chance(),
            "count_include_pad": p.chance()}  # fmt: skip
    return p.like(s | {"L": max(s["L"], k)}, args, draw=Uniform(-20, 20))


@task(
    difficulty=3,
    takes={"input": T("N C L")},
    truth=Close(ulps=8),
    cost=Cost(
        flops="11 * numel(input)",
        reads={
            "input": "N * C * touched(L, first(kernel_size), first(stride, kernel_size), first(padding), 1, ceil_mode)",
        },
        least="numel(input)",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="count_include_pad and windows cut off by the end are judged; timed sizes are larger.",
    cases=(
        Case(TOY, {"kernel_size": 2}, draw=Literal(0, 1, 2, 3, 4)),
        Case(TOY, {"kernel_size": 2, "stride": 1}, draw=WIDE),
        Case(TOY, {"kernel_size": 2, "padding": 1}, draw=WIDE),
        Case(TOY, {"kernel_size": 2, "ceil_mode": True}, draw=WIDE),
        Case(MIDDLE, {"kernel_size": 4, "stride": 2, "padding": 1}),
        Case(MIDDLE, {"kernel_size": 4, "stride": 2, "padding": 2, "count_include_pad": False}, draw=Outlier()),
        Case(MIDDLE, {"kernel_size": 3}, draw=WIDE),
        Case({"N": 3, "C": 5, "L": 101}, {"kernel_size": 7, "stride": 4, "padding": 3, "ceil_mode": True}, draw=WIDE),
        # The windows end with the line: ceil_mode adds none.
        Case({"N": 3, "C": 5, "L": 103}, {"kernel_size": 7, "stride": 4, "padding": 2, "ceil_mode": True,
                                         "count_include_pad": False}, draw=WIDE),
        Case({"N": 2, "C": 3, "L": 50}, {"kernel_size": 2, "stride": 5, "ceil_mode": True}, draw=WIDE),
        Case({"N": 2, "C": 3, "L": 300}, {"kernel_size": 64, "stride": 1, "padding": 32}, draw=Uniform(-1, 1)),
        # More positions in a window than fp16 can count.
        Case({"N": 1, "C": 2, "L": 2110}, {"kernel_size": 2051, "stride": 9}, draw=WIDE),
        Case({"N": 2, "C": 3, "L": 60}, {"kernel_size": 1}, draw=Choice(0.0, 1e4, -3e4, 1e-20, 3.14159265, 1.5707963)),
        Case({"N": 2, "C": 30, "L": 41}, {"kernel_size": 3}, draw=WIDE, layouts={"input": "transposed"}),
        Case({"N": 2, "C": 9, "L": 77}, {"kernel_size": 5, "stride": 2}, draw=WIDE, layouts={"input": "strided"}),
        Case({"N": 0, "C": 9, "L": 20}, {"kernel_size": 5}),
        Case({"N": 5, "C": 7, "L": 211}, {"kernel_size": 6, "stride": 5, "padding": 3, "ceil_mode": True}, draw=WIDE,
             held=True),
        Case({"N": 1, "C": 3, "L": 1033}, {"kernel_size": 3, "padding": 1, "count_include_pad": False}, draw=WIDE,
             held=True),
    ),
    varied=sized(_any_windows, longs({"N": (1, 4), "C": (1, 4), "L": (1, 80)}, {"N": 34, "L": 2200}, most=20_000)),
    timed=tuple(Case({"N": 128, "C": 64, "L": n}, {"kernel_size": 3}, draw=Uniform()) for n in (2304, 6144, 12288)),
)  # fmt: skip
def fused_cos_avg_pool1d(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True):
    """Average over windows of cos(input) along the last axis of an fp32 tensor (N, C, L); the result is (N, C, Lo).

    kernel_size, stride (None: kernel_size) and padding <= kernel_size / 2 are ints. Window j covers the positions from
    a = j * stride - padding to b = min(a + kernel_size, L + padding), b excluded; positions outside [0, L) add 0 (not
    cos 0 = 1). The sum is divided by b - a, or with count_include_pad=False by the number of positions inside [0, L).

    Lo = floor((L + 2 padding - kernel_size) / stride) + 1; ceil_mode=True rounds up instead, but the last window goes
    if it would start at L + padding or later.

    Example: fused_cos_avg_pool1d([[[0, 1, 2, 3, 4]]], 2, ceil_mode=True) = [[[0.770151, -0.703070, -0.653644]]]
    Example: fused_cos_avg_pool1d([[[0, 1, 2, 3, 4]]], 2, padding=1) = [[[0.5, 0.062078, -0.821818]]]

    Compute in fp32; arguments up to 3e4 must be reduced accurately. The result is a new tensor; input may have any
    strides; N or C may be 0.
    """
    return F.avg_pool1d(torch.cos(input), kernel_size, stride, padding, ceil_mode, count_include_pad)
