"""Matrix products with an epilogue: of floating-point matrices (``matmul``), and of int8 weights (``quantized``)."""

from __future__ import annotations

import random

from kbx_env.generate import text
from kbx_env.generate.drafts import Draft, Voice, listed
from kbx_env.generate.expressions import draw, formula, head, leaf, statements

MATMUL = """# parts: gemm
{head}@triton.jit
def epilogue(acc, bias, e, f, where, s, t, MODE: tl.constexpr):
    p = acc{bias}
{body}
    return {result}


def ENTRY({parameters}):
    return gemm(x, {right}{extra})
"""
EMPTY = "M may be 0 (empty tensors)."
WHOLE, SMALL = (-2, -1, 0, 1, 2, 3), (-1, -0.5, 0, 0.5, 1)
"""Numbers of example tensors: of int8 and of floating-point ones."""
SIZES = (
    '{"M": 3, "K": 4, "N": 5}',
    '{"M": 64, "K": 100, "N": 96}',
    '{"M": 33, "K": 257, "N": 70}',
    '{"M": 48, "K": 64, "N": 40}',
    '{"M": 17, "K": 31, "N": 29}',
    '{"M": 1, "K": 130, "N": 200}',
    '{"M": 0, "K": 5, "N": 7}',
    '{"M": 29, "K": 140, "N": 83}',
)
VARIED = (
    'sizes(\n            longs({{"M": (2, 24), "K": (3, 40), "N": (2, 40)}}, {{"M": 270, "K": 700, "N": 530}}),'
    '{law}\n        ),'
)


def matmul(rng: random.Random, level: int) -> Draft:
    """Draw a product with a bias, activations, and up to two more tensors of the result's shape."""
    voice = Voice(rng)
    dtype = rng.choice(("f32", "f16", "bf16"))
    transposed = rng.random() < 0.5
    bias = rng.random() < 0.6
    extra = ("residual", "gate")[: rng.randint(0, min(2, level - 1))]
    tree = draw(
        rng,
        [leaf("p", (-30.0, 30.0)), *(leaf(e) for e in extra)],
        max(len(extra), 2 * level - 2 + rng.randint(0, 1)) or 1,
    )
    names = ("x", "weight", *(("bias",) if bias else ()), *extra)
    lines = statements(tree, dict(zip(extra, "ef")))
    keywords = [*(["bias=bias"] if bias else []), *(f"{k}={e}" for k, e in zip("ef", extra))]
    expert = MATMUL.format(
        head=head("\n".join(lines.body)),
        bias=" + bias" if bias else "",
        body=text.indented(lines.body),
        result=lines.result,
        parameters=", ".join(names),
        right="weight.mT" if transposed else "weight",
        extra="".join(f", {k}" for k in keywords),
    )
    product = ("x @ weight^T" if transposed else "x @ weight") + (" + bias" if bias else "")
    shapes = {
        "x": "(M, K)",
        "weight": "(N, K)" if transposed else "(K, N)",
        "bias": "(N,)",
        "residual": "(M, N)",
        "gate": "(M, N)",
    }
    summary = voice.one(
        f"A linear layer with an epilogue: p = {product}, and the result is {formula(tree)}.",
        f"Return {formula(tree)}, where p = {product}.",
        f"With the product p = {product}, compute {formula(tree)}.",
    )
    details = (
        voice.where(tree.meanings()),
        f"Shapes: {listed([f'{n} {shapes[n]}' for n in names])}; all {voice.dtype(dtype)}. The result is a new tensor "
        f"of shape (M, N) and the "
        f"same dtype.",
        voice.closing(
            "Products and sums have fp32 precision (no TF32)."
            if dtype == "f32"
            else f"Accumulate in fp32, apply everything else in fp32, and round once to {voice.dtype(dtype)}.",
            names,
            EMPTY,
        ),
    )
    axes = {"x": "M K", "weight": "N K" if transposed else "K N", "bias": "N", "residual": "M N", "gate": "M N"}
    cases = [f"Case({s}, draw=Normal(scale=0.3))" for s in SIZES[:3]]
    cases += [f'Case({SIZES[3]}, draw=Normal(scale=0.3), layouts={{"x": "transposed", "weight": "transposed"}})']
    cases += [f'Case({SIZES[4]}, draw=Normal(scale=0.3), layouts={{"x": "strided", "{names[-1]}": "strided"}})']
    cases += [f"Case({s}, draw=Normal(scale=0.3))" for s in SIZES[5:7]]
    cases += [f"Case({SIZES[7]}, draw=Normal(scale=0.3), held=True)"]
    law = '\n            draw=lambda p, s: Normal(scale=round(s["K"] ** -0.25, 3)),'
    fields = {
        "takes": text.mapping({n: f'T("{axes[n]}", "{dtype}")' for n in names}),
        "truth": "Close(ulps=16)",
        "cost": f'Cost(flops="2 * M * N * K + {tree.flops()} * M * N", least="2 * M * N * K")',
        "cases": text.block(cases),
        "varied": "(\n        " + VARIED.format(law=law) + "\n    )",
        "timed": 'tuple(\n        Case({"M": m, "K": k, "N": n}, draw=Normal(scale=round(k**-0.25, 3)))\n'
        "        for m, k, n in ((1024, 1024, 1024), (1024, 4096, 1024), (4096, 4096, 4096))\n    )",
    }
    shown = {
        "x": text.matrix(rng, 2, 3, SMALL),
        "weight": text.matrix(rng, 2, 3, SMALL) if transposed else text.matrix(rng, 3, 2, SMALL),
        "bias": text.vector(rng, 2, SMALL),
    }
    right = "weight.mT" if transposed else "weight"
    return Draft(
        family="matmul",
        category="matrixmultiply",
        words=("linear" if transposed else "matmul", *(("bias",) if bias else ()), *tree.words()[:3]),
        parameters=", ".join(names),
        body=(f"p = torch.matmul(x, {right})" + (" + bias" if bias else ""), f"return {tree.written('torch')}"),
        summary=summary,
        details=details,
        examples=(", ".join(shown.get(n) or text.matrix(rng, 2, 2, SMALL) for n in names),),
        takes=dict.fromkeys(names, dtype),
        fields=fields,
        expert=expert,
        size=tree.count() + 3 + bias + len(extra),
        imports=("from kbx_env.tasks._varied import longs, sizes",),
    )


QUANTIZED = """{head}@triton.jit
def _kernel(
    p_x, p_q, p_scale, p_bias, p_rows, out, M, N, K, xm, xk, qn, qk,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    columns = tl.cdiv(N, BN)
    m = tl.program_id(0) // columns * BM + tl.arange(0, BM)
    n = tl.program_id(0) % columns * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), {kind})
    for k0 in range(0, K, BK):
        here = k0 + k
        inside_x = (m[:, None] < M) & (here[None, :] < K)
        inside_q = (n[None, :] < N) & (here[:, None] < K)
        x = tl.load(p_x + m[:, None].to(tl.int64) * xm + here[None, :] * xk, mask=inside_x, other=0)
        q = tl.load(p_q + n[None, :].to(tl.int64) * qn + here[:, None] * qk, mask=inside_q, other=0)
        acc = {dot}
    scale = tl.load(p_scale + n, mask=n < N, other=0.0).to(tl.float32)
{scaled}
    if BIAS:
        p += tl.load(p_bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
{body}
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(out + m[:, None].to(tl.int64) * N + n[None, :], {result}.to(out.dtype.element_ty), mask=inside)


def ENTRY({parameters}):
    M, K = x.shape
    N = qweight.shape[0]
    scale = scale.contiguous()
{dense}
    out = torch.empty((M, N), dtype={dtype}, device=x.device)
    if out.numel():
        BM, BN, BK = 32, 64, 64
        _kernel[(triton.cdiv(M, BM) * triton.cdiv(N, BN),)](
            x, qweight, scale, {bias}, {rows}, out, M, N, K, *x.stride(), *qweight.stride(), BIAS={has_bias}, BM=BM, BN=BN, BK=BK,
            num_warps=4,
        )
    return out
"""


def quantized(rng: random.Random, level: int) -> Draft:
    """Draw a linear layer with int8 weights, and floating-point or int8 inputs."""
    voice = Voice(rng)
    both = rng.random() < 0.5
    dtype = "i8" if both else rng.choice(("f32", "f16", "bf16"))
    bias = rng.random() < 0.5
    tree = draw(rng, [leaf("p", (-30.0, 30.0))], max(1, 2 * level - 2))
    names = ("x", "qweight", "scale", *(("row_scale",) if both else ()), *(("bias",) if bias else ()))
    lines = statements(tree)
    if both:
        dot, scaled = (
            "tl.dot(x, q, acc, out_dtype=tl.int32)",
            "    rows = tl.load(p_rows + m, mask=m < M, other=0.0)\n    p = acc.to(tl.float32) * rows[:, None] * scale[None, :]",
        )
    elif dtype == "f32":
        dot, scaled = 'tl.dot(x, q.to(tl.float32), acc, input_precision="tf32x3")', "    p = acc * scale[None, :]"
    else:
        dot, scaled = "tl.dot(x, q.to(x.dtype), acc)", "    p = acc * scale[None, :]"
    result = "f32" if both else dtype
    vectors = [*(["row_scale"] if both else []), *(["bias"] if bias else [])]
    expert = QUANTIZED.format(
        head=head("\n".join(lines.body)),
        kind="tl.int32" if both else "tl.float32",
        dot=dot,
        scaled=scaled,
        body=text.indented(lines.body),
        result=lines.result,
        parameters=", ".join(names),
        dense=text.indented(text.contiguous(vectors)),
        dtype="scale.dtype" if both else "x.dtype",
        bias="bias" if bias else "scale",
        rows="row_scale" if both else "scale",
        has_bias=bias,
    )
    product = (
        "p[m, n] = row_scale[m] * scale[n] * sum over k of x[m, k] * qweight[n, k]"
        if both
        else "p[m, n] = scale[n] * sum over k of x[m, k] * qweight[n, k]"
    )
    product += " + bias[n]" if bias else ""
    summary = voice.one(
        f"A linear layer with int8 {'inputs and weights' if both else 'weights'}: {product}; the result is {formula(tree)}.",
        f"Return {formula(tree)}, where {product}.",
    )
    floats = [n for n in names if n not in ("x", "qweight")]
    said = (
        f"x (M, K) and qweight (N, K) are int8, {listed(_shaped(floats))} are fp32; the result is a new fp32 tensor "
        f"of shape (M, N)."
        if both
        else f"x (M, K) is {voice.dtype(dtype)}, qweight (N, K) is int8, {listed(_shaped(floats))} "
        f"{'is' if len(floats) == 1 else 'are'} fp32; the "
        f"result is a new {voice.dtype(dtype)} tensor of shape (M, N)."
    )
    details = (
        voice.where(tree.meanings()),
        said,
        voice.closing(
            "Sum the products of integers exactly, in int32; everything else is in fp32."
            if both
            else "qweight may be converted to x's dtype, which holds int8 values exactly. Accumulate in fp32 (no TF32), apply "
            "everything else in fp32, and round the result once.",
            names,
            EMPTY,
        ),
    )
    takes = {
        "x": 'T("M K", "i8", Ints(-127, 128))' if both else f'T("M K", "{dtype}")',
        "qweight": 'T("N K", "i8", Ints(-127, 128))',
        "scale": 'T("N", "f32", Uniform(0.001, 0.01))',
        "row_scale": 'T("M", "f32", Uniform(0.001, 0.01))',
        "bias": 'T("N", "f32")',
    }
    cases = [f"Case({s})" for s in SIZES[:3]]
    cases += [
        f'Case({SIZES[3]}, layouts={{"x": "transposed", "qweight": "transposed"}})',
        f'Case({SIZES[4]}, layouts={{"x": "strided", "scale": "strided"}})',
    ]
    cases += [*(f"Case({s})" for s in SIZES[5:7]), f"Case({SIZES[7]}, held=True)"]
    fields = {
        "takes": text.mapping({n: takes[n] for n in names}),
        "truth": "Close(ulps=16)",
        "cost": f'Cost(flops="2 * M * N * K + {tree.flops()} * M * N", least="2 * M * N * K")',
        "cases": text.block(cases),
        "varied": "(\n        " + VARIED.format(law="") + "\n    )",
        "timed": 'tuple(\n        Case({"M": m, "K": k, "N": n})\n        for m, k, n in ((1024, 1024, 1024), '
        "(1024, 4096, 1024), (4096, 4096, 4096))\n    )",
    }
    shown = {
        "x": text.matrix(rng, 2, 3, WHOLE if both else SMALL),
        "qweight": text.matrix(rng, 2, 3, WHOLE),
        "scale": "[0.5, 0.25]",
        "row_scale": "[1, 0.5]",
        "bias": "[0.5, -1]",
    }
    body = [
        "q = qweight.to(scale.dtype)",
        f"p = torch.matmul(x.to(scale.dtype), q.mT) * scale{' * row_scale.unsqueeze(-1)' if both else ''}"
        + (" + bias" if bias else ""),
    ]
    body.append(f"return {tree.written('torch')}" if both else f"return ({tree.written('torch')}).to(x.dtype)")
    return Draft(
        family="quantized",
        category="quantization",
        words=("int8" if both else "weight_int8", "linear", *tree.words()[:3]),
        parameters=", ".join(names),
        body=tuple(body),
        summary=summary,
        details=details,
        examples=(", ".join(shown[n] for n in names),),
        takes={"x": dtype, "qweight": "i8"} | dict.fromkeys(floats, "f32"),
        fields=fields,
        expert=expert,
        size=tree.count() + 4 + both + bias + (result == "f32"),
        imports=("from kbx_env.tasks._varied import longs, sizes",),
    )


def _shaped(names: list[str]) -> list[str]:
    """Return names with their shapes."""
    return [f"{n} ({'M' if n == 'row_scale' else 'N'},)" for n in names]


FAMILIES = {"matmul": matmul, "quantized": quantized}
