"""fusion/attention."""

import torch
from kbx_env.tasks._varied import LARGE, SHARE, TINY, longs, plain, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Normal, Outlier, Paper, T, Uniform, task

HALF = {"q": "f16", "k": "f16", "v": "f16"}
CAUSAL = {"causal": True}


def _case(b, h, s, d, args=None, **more):
    return Case({"B": b, "H": h, "S": s, "D": d}, args or {}, **more)


def _eager(q, k, v, causal=False, softmax_scale=None, *, out=None):
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
    return y if out is None else out.copy_(y)


@task(
    difficulty=5,
    takes={"q": T("B H S D"), "k": T("B H S D"), "v": T("B H S D")},
    truth=Close(ulps=16),
    cost=Cost(
        flops="4 * B * H * S * S * D",
        reads={"q": "numel(q) - causal * B * H * D"},
        least="4 * B * H * S * S * D - causal * 2 * B * H * S * (S - 1) * D",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The timed baseline is torch's own scaled_dot_product_attention, not a matrix of scores written to memory; full and "
    "causal, fp32 and fp16 are timed. Operations are counted without the causal half.",
    cases=(
        _case(1, 2, 5, 8),
        _case(2, 3, 64, 32),
        _case(1, 2, 127, 64, CAUSAL),
        _case(1, 2, 127, 64, CAUSAL, dtypes=HALF),
        _case(2, 2, 70, 40, {"softmax_scale": 0.5}, draw=Outlier(scale=5)),
        _case(1, 1, 130, 16, {"softmax_scale": 2.0, "causal": True}, draw=Normal(scale=2)),
        _case(2, 1, 33, 128, out=True),
        _case(1, 2, 48, 24, CAUSAL, layouts={"q": "transposed", "k": "transposed", "v": "transposed"}),
        _case(1, 3, 31, 16, layouts={"q": "strided", "v": "strided"}, dtypes=HALF),
        _case(1, 1, 1, 8, CAUSAL),
        _case(2, 2, 100, 64, {"softmax_scale": 0.1}, dtypes=HALF, out=True),
        _case(0, 2, 4, 8),
        _case(2, 2, 77, 48, CAUSAL, held=True),
        _case(1, 2, 83, 64, dtypes=HALF, held=True),
    ),
    varied=(
        sizes(
            longs(
                {"B": (1, 2), "H": (1, 2), "S": (3, 20), "D": (2, 24)}, {"B": 9, "H": 9, "S": 140, "D": 70}, most=20_000
            ),
            lambda p, s: {"causal": p.chance(), "softmax_scale": p.among(None, p.real(0.1, 1))},
            out=True,
            draw=Normal(),
        ),
        # Large tensors, in one case with more queries than a block has: kernels choose other blocks. There all scores are
        # negative, so that a key beyond the last one, whose score would be 0, takes most of the weight.
        *(
            sizes(make, lambda p, s, causal=causal: {"causal": causal, "softmax_scale": None}, where=plain, dtypes=dtypes,
                  draws=draws)
            for make, causal, dtypes, draws in (
                (lambda p: {"B": 4, "H": 8, "S": p.whole(129, 140), "D": 128}, False, HALF,
                 {"q": Uniform(0.1, 1.5), "k": Uniform(-1.5, -0.1)}),
                (lambda p: {"B": 64, "H": 8, "S": p.whole(17, 20), "D": p.whole(61, 64)}, True, {}, {}),
            )
        ),
        *(
            sizes(
                lambda p: {"B": 1, "H": 2, "S": p.whole(5, 9), "D": p.whole(4, 8)},
                lambda p, s: {"causal": p.chance(), "softmax_scale": None}, where=plain, draws=draws,
            )
            for draws in ({"q": LARGE, "k": SHARE, "v": LARGE}, {"q": SHARE, "k": LARGE, "v": TINY})
        ),
    ),
    timed=(
        _case(2, 8, 1024, 64, CAUSAL),
        _case(2, 8, 2048, 64),
        _case(4, 16, 4096, 64, CAUSAL, dtypes=HALF),
        _case(4, 16, 2048, 128, dtypes=HALF),
    ),
)
def attention(q, k, v, causal=False, softmax_scale=None, *, out=None):
    """Scaled dot-product attention for every head of a batch: softmax(softmax_scale * q @ k^T) @ v.

    Example: attention([[[[0.0], [2]]]], [[[[1], [0]]]], [[[[10], [20]]]]) = [[[[15], [11.192]]]]

    q, k and v (B, H, S, D), all fp32 or all fp16. softmax over the keys, without overflow. softmax_scale is a number,
    or None (the default), which means 1 / sqrt(D). causal=True: query i sees keys 0 .. i only. fp32: products and sums
    in IEEE fp32, TF32 is too coarse and fails. fp16: scores, softmax and sums in fp32, the result rounded once;
    probabilities may be rounded to fp16 before the second product. out: None (the default: a new tensor), or a tensor
    of the result's shape and dtype with any strides and any contents, which is filled and returned. Inputs may have any
    strides; B may be 0.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.matmul(q, k.mT) * scale
    if causal:
        later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    y = torch.matmul(torch.softmax(scores, dim=-1), v)
    return y if out is None else out.copy_(y)
