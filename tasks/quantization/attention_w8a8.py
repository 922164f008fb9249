"""quantization/attention_w8a8."""

import torch
from kbx_env.tasks._schemes import int8_symmetric, jump, operand, report_slack, rounded, total
from kbx_env.tasks._varied import longs, sizes

from kbx_env.spec.criteria import QuantizationScheme
from kbx_env.spec.task import Case, Constant, Cost, Literal, Normal, Outlier, Paper, T, Uniform, task


def _case(b, s, d, **more):
    return Case({"B": b, "S": s, "D": d}, **more)


def _eager(query, key, value):
    scores = torch.bmm(query, key.mT) * query.shape[-1] ** -0.5
    return torch.bmm(torch.softmax(scores, dim=-1), value)


@task(
    difficulty=4,
    takes={"query": T("B S D"), "key": T("B S D"), "value": T("B S D")},
    truth=QuantizationScheme(operands="int8", accumulate="int32", ulps=32.0, least="4 * numel(result) * S"),
    cost=Cost(flops="4 * B * S * S * D"),
    paper=Paper(cosine=0.9, l1=0.1, rmse=0.15),
    eager=_eager,
    differs="The scheme is stated, with the probabilities' own rounding; judged against it, with evidence of an int8 product. As "
    "published nothing but a plain fp32 attention was compared with, and it passed. The timed baseline is the unquantized "
    "attention.",
    cases=(
        _case(1, 1, 8),
        _case(
            1, 2, 2, draws={"query": Literal(1, 2, -1, 0), "key": Literal(3, 1, 0, 2), "value": Literal(1, -2, 4, 8)}
        ),
        # All scores are negative: keys that are none would have the largest one.
        _case(2, 48, 32, draws={"query": Uniform(-1.5, -0.5), "key": Uniform(0.5, 1.5)}),
        _case(1, 100, 64, draw=Outlier(p=0.01, scale=10)),
        _case(3, 33, 40, draws={"query": Normal(scale=3)}),
        _case(1, 130, 16, draws={"value": Normal(scale=1e-6)}),
        _case(1, 65, 32, draws={"query": Normal(scale=1000), "key": Normal(scale=1e-3), "value": Normal(scale=1000)}),
        _case(2, 19, 12, draws={"query": Normal(scale=1e-5), "key": Normal(scale=1e5)}),
        _case(2, 40, 24, layouts={"query": "transposed", "key": "transposed", "value": "transposed"}),
        _case(2, 17, 20, layouts={"query": "strided", "value": "strided"}),
        _case(1, 20, 32, draws={"query": Constant(0)}),
        _case(0, 4, 8),
        _case(2, 77, 48, held=True),
    ),
    varied=(sizes(longs({"B": (1, 1), "S": (3, 20), "D": (2, 9)}, {"S": 132, "D": 70}, most=3000)),),
    timed=(_case(8, 1024, 64), _case(2, 2048, 64), _case(8, 2048, 64)),
)
def attention_w8a8(query, key, value):
    """Single-head attention of fp32 (B, S, D) tensors, computed with int8 operands and int32 accumulation; fp32 result.

    Example: attention_w8a8([[[2, 0]]], [[[1, 1]]], [[[3, -1]]]) = [[[3, -1]]]

    Every row of query and of key (along D) and every column of value (along S, for each batch) is quantized symmetrically:
    scale = max|x| / 127 (1 if all are zero), q = round(x / scale) to int8, half to even, in fp32. Then, with int8 products
    that accumulate exactly in int32 (tl.dot on int8), for queries i and keys j:

        s[i, j] = (q_query[i] . q_key[j]) * scale_query[i] * scale_key[j] / sqrt(D)
        p[i, j] = exp(s[i, j] - max over j of s[i, j])
        u[i, j] = round(127 * p[i, j]) to int8, half to even
        y[i, d] = (sum over j of u[i, j] * q_value[j, d]) * scale_value[d] / (sum over j of u[i, j])

    The maximum is that of the whole row. Quotients within 4 units in the last place of a half may round either way, and so
    may 127 * p within a relative 1e-5 of a half. A float product fails, and so does a result more exact than the scheme. A
    new tensor is returned; inputs may have any strides; B may be 0.
    """
    (qq, sq), (qk, sk), (qv, sv) = (int8_symmetric(x, dim=d) for x, d in ((query, 2), (key, 2), (value, 1)))
    s = (operand(qq) @ operand(qk).mT) * sq * sk.mT * query.shape[-1] ** -0.5
    u, doubt = rounded(127 * torch.exp(s - s.amax(-1, keepdim=True)), 1e-5)
    values, whole = operand(qv), total(u)
    y = (operand(u) @ values) * sv / whole
    doubt = doubt * jump(u)
    report_slack(1.01 * (doubt @ values.abs() * sv + doubt.sum(-1, keepdim=True) * y.abs()) / whole)
    return y
