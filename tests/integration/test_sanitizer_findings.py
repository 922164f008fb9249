"""The sanitizer finds the faults that are planted in our experts, through the whole grader (in the experts as they are it
finds nothing: test_experts)."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbx_env.envs.prompt import feedback
from kbx_env.grading.runtime import engine_client
from kbx_env.outcome import Outcome, Verdict
from kbx_env.spec.catalog import expert_source

ZOO = Path(__file__).parents[1] / "zoo"
#: Task, text of the expert, text that replaces it, kinds of which one must be found.
OUT, RAW, CLASH, ORDER = "out_of_bounds", "uninitialised_read", "write_conflict", "order_dependent"
FAULTS = [
    ("activation/gelu_fp16", "op(tl.load(x + offsets, mask=inside)", "op(tl.load(x + offsets)", [OUT]),
    ("activation/gelu_fp16", "tl.load(x + offsets, mask=inside), s, t, MODE), mask=inside)",
     "tl.load(x + offsets, mask=inside), s, t, MODE))", [OUT]),
    ("activation/gelu_fp16", "inside = offsets < n", "inside = offsets <= n", [OUT]),
    ("convolution/conv2d", "shift = tl.load(b + c, mask=o < OG, other=0.0)", "shift = tl.load(b + c)", [OUT]),
    ("convolution/conv2d", "(o[None, :] < OG) & (k[:, None] < K)", "k[:, None] < K", [OUT]),
    ("convolution/conv2d", "inside = (m[:, None] < pixels) & (o[None, :] < OG)", "inside = m[:, None] < pixels", [OUT, CLASH]),
    ("convolution/conv2d", "(row >= 0) & ", "", [OUT]),
    ("fusion/fused_bmm_dropout_gelu", "inside = (m[:, None] < M) & (n[None, :] < N)", "inside = n[None, :] < N", [OUT, CLASH]),
    ("fusion/fused_bmm_dropout_gelu", "mask=k[None, :] < K - k0", "mask=k[None, :] <= K - k0", [OUT]),
    ("index/masked_select", "+ tl.cumsum(flags, 0) - 1", "+ tl.cumsum(flags, 0)", [OUT]),
    ("index/masked_select", "counts + tl.program_id(0), tl", "counts + tl.program_id(0) // 2, tl", [CLASH, RAW]),
    ("index/masked_select", "_count[(blocks,)]", "_count[(blocks - 1,)]", [RAW]),
    ("index/masked_select", "tl.store(starts + b, before", "if blocks < 0: tl.store(starts + b, before", [RAW]),
    ("linearalgebra/svd", "    w += batch * CP * RP\n", "", [ORDER, CLASH]),
    ("linearalgebra/svd", "    tl.store(w + cols[:, None] * RP + rows[None, :], start)\n", "", [RAW]),
    ("linearalgebra/svd", "tl.store(s + batch * C + rank", "tl.store(s + batch * (C - 1) + rank", [CLASH]),
    ("linearalgebra/svd", "kernel[(B,)](", "kernel[(B + 1,)](", [OUT]),
    ("loss/cross_entropy", "tl.store(share + e, w, mask=valid)", "tl.store(share + e, w)", [OUT]),
    ("loss/cross_entropy", "rows[(triton.cdiv(n, BS),)]", "rows[(triton.cdiv(n, BS) - 1,)]", [RAW]),
    ("loss/cross_entropy", "tl.load(target + e, mask=valid, other=0)", "tl.load(target + e)", [OUT]),
    ("loss/cross_entropy", "    tl.store(loss + e, value, mask=valid)\n", "", [RAW]),
    ("math/softmax", "base = (tl.program_id(0) // tiles).to(tl.int64) * n * inner",
     "base = (tl.program_id(0) // tiles).to(tl.int64) * (n - 1) * inner", [CLASH]),
    ("math/softmax", "inside = (r[:, None] < n) &", "inside = (r[:, None] <= n) &", [OUT, CLASH]),
    ("math/softmax", "grid = (triton.cdiv(inner, BI) * outer,)", "grid = (triton.cdiv(inner, BI) * (outer + 1),)", [OUT]),
    ("matrixmultiply/matmul_bf16", "x = tl.load(pa, mask=k[None, :] < K - k0, other=0.0)", "x = tl.load(pa)", [OUT]),
    ("matrixmultiply/matmul_bf16", "inside = (m[:, None] < M) & (n[None, :] < N)", "inside = m[:, None] < M", [OUT, CLASH]),
    ("normalization/batch_norm", "tl.store(mean + c, mu)", "tl.store(mean, mu)", [CLASH, RAW]),
    ("normalization/batch_norm", "    tl.store(var + c, spread / count)\n", "", [RAW]),
    ("normalization/batch_norm", "statistics[(C,)]", "statistics[(C + 1,)]", [OUT]),
    ("normalization/batch_norm", "tl.store(running_var, (1 - momentum) * tl.load(running_var)",
     "tl.store(running_var, (1 - momentum) * tl.load(running_var - c * rv)", [ORDER]),
    ("optimizer/AdamW", "* BLOCK + tl.arange", "* (BLOCK // 2) + tl.arange", [ORDER, CLASH]),
    ("optimizer/AdamW", "tl.store(m + o, first, mask=inside)", "tl.store(m + o, first)", [OUT]),
    ("optimizer/AdamW", "tl.load(v + o, mask=inside)", "tl.load(v + o + 1, mask=inside)", [OUT, ORDER]),
    ("pooling/adaptive_avg_pool2d", "row.to(tl.int64) * OW + j", "row.to(tl.int64) * (OW - 1) + j", [CLASH]),
    ("pooling/adaptive_avg_pool2d", ", mask=j < OW)", ")", [OUT, CLASH]),
    ("pooling/adaptive_avg_pool2d", "tl.store(y + bin, mean)", "tl.store(y + bin // 2, mean)", [CLASH]),
    ("quantization/matmul_w8a8", "kernel[(triton.cdiv(B * M, BR),)]",
     "kernel[(triton.cdiv(B * M, BR) - 1,)]", [RAW]),
    ("quantization/matmul_w8a8", "    tl.store(scales + r, scale, mask=r < lines)\n", "", [RAW]),
    ("quantization/matmul_w8a8", "r[:, None] * L + e[None, :], _round8", "r[:, None] * (L + 1) + e[None, :], _round8",
     [OUT, CLASH]),
    ("quantization/matmul_w8a8", "right = tl.load(sb + batch * N + n, mask=n < N, other=0.0)",
     "right = tl.load(sb + batch * N + n)", [OUT]),
    ("random/rand", "mask=o < n", "mask=o < n + 1", [OUT]),
    ("reduce/argmax", "tl.store(ys[k] + where, state[k].to(ys[k].dtype.element_ty), mask=kept < columns)",
     "tl.store(ys[k] + where, state[k].to(ys[k].dtype.element_ty))", [OUT, CLASH]),
    ("reduce/argmax", "kernel[(grid, splits)](", "kernel[(grid, splits + 1)](", [CLASH]),
    ("spatialops/grid_sample", "* dims + 1, mask=valid, other=0.0)", "* dims + 1)", [OUT]),
    ("spatialops/grid_sample", "(cx >= 0) & ", "", [OUT]),
    ("spatialops/grid_sample", "e % per_image, total, mask=valid)", "e % 2, total, mask=valid)", [CLASH]),
    ("index/masked_select", "tl.load(x + offsets, mask=chosen), mask=chosen)", "tl.load(x + offsets), mask=chosen)", [OUT]),
    ("linearalgebra/svd",
     "tl.store(v + cols[:, None] * CP + cols[None, :], tl.where(cols[:, None] == cols[None, :], 1.0, 0.0))", "pass", [RAW]),
    ("linearalgebra/svd", "tl.store(u + cols, square)", "pass", [RAW]),
    ("linearalgebra/svd", "turned, mask=real)", "turned)", [OUT]),
    ("linearalgebra/svd", "basis, mask=wanted)", "basis)", [OUT]),
    ("linearalgebra/svd", "tl.store(u + rows[:, None] * RP + rows[None, :], tl.zeros((RP, RP), tl.float32))", "pass", [RAW]),
    ("math/softmax", "(e / tl.sum(e, 0)[None, :]).to(kind), mask=inside)", "(e / tl.sum(e, 0)[None, :]).to(kind))", [OUT]),
    ("math/softmax", "total[None, :]).to(kind), mask=inside)", "total[None, :]).to(kind))", [OUT]),
    ("normalization/batch_norm", "v.to(y.dtype.element_ty), mask=s < S)", "v.to(y.dtype.element_ty))", [OUT]),
    ("optimizer/AdamW", "grad = tl.load(g + o, mask=inside)", "grad = tl.load(g + o)", [OUT]),
    ("optimizer/AdamW", "beta1 * tl.load(m + o, mask=inside)", "beta1 * tl.load(m + o)", [OUT]),
    ("optimizer/AdamW", "param = tl.load(p + o, mask=inside)", "param = tl.load(p + o)", [OUT]),
    ("optimizer/AdamW", "tl.store(p + o, param, mask=inside)", "tl.store(p + o, param)", [OUT]),
    ("optimizer/AdamW", "tl.store(v + o, second, mask=inside)", "tl.store(v + o, second)", [OUT]),
]  # fmt: skip


@pytest.mark.parametrize("task", sorted({f[0] for f in FAULTS}))
def test_faults_planted_in_an_expert_are_found(grader, task: str) -> None:
    source = expert_source(task) or ""
    for _, old, new, kinds in (f for f in FAULTS if f[0] == task):
        assert source.count(old) >= 1, old
        outcome = grader.grade(task, source.replace(old, new), backend="cpu", targets=())
        found = outcome.evidence.findings
        assert {f.kind for f in found} & set(kinds), (new, outcome.message, found)
        assert Outcome.from_dict(outcome.to_dict()) == outcome
        assert found[0].text in feedback(outcome)
        if found[0].kind == OUT:
            assert outcome.verdict is Verdict.RUNTIME_ERROR
            assert found[0].line > 0 and found[0].file == "submission.py" and found[0].tensor
            assert (found[0].index is None) == found[0].indirect


HEAD = "import torch\nimport triton\nimport triton.language as tl\n\n\n"
POINTS_ASTRAY = HEAD + '''@triton.jit
def kernel(x, t, y, n, blocks, B: tl.constexpr):
    p = tl.program_id(0)
    o = p % blocks * B + tl.arange(0, B)
    if p < blocks:
        tl.store(t + o, o, mask=o < n)
    else:
        v = tl.load(x + tl.load(t + o, mask=o < n, other=0), mask=o < n)
        tl.store(y + o, tl.maximum(v, 0, propagate_nan=tl.PropagateNan.ALL), mask=o < n)


def relu(input, inplace=False):
    x = input.contiguous()
    n, y = x.numel(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    t = torch.full((max(1, n),), -(1 << 30), dtype=torch.int32, device=x.device)
    if n:
        blocks = triton.cdiv(n, 256)
        kernel[(2 * blocks,)](x, t, y, n, blocks, B=256)
    return input.copy_(y) if inplace else y
'''


def test_an_error_in_another_order_of_programs_is_told(grader) -> None:
    outcome = grader.grade("activation/relu", POINTS_ASTRAY, backend="cpu", targets=())
    assert outcome.verdict is Verdict.RUNTIME_ERROR and "in another order of the programs" in outcome.message
    assert ORDER in {f.kind for f in outcome.evidence.findings} and "kernel, line " in feedback(outcome)


def test_a_race_is_only_told_once_no_time_is_left_for_other_orders(grader, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program after the other takes long where there are many: a right kernel must not run out of time for it."""
    monkeypatch.setattr(engine_client, "REORDERED_SECONDS", 0.0)
    source = (ZOO / "honest" / "k_sink_nobody_reads.py").read_text()
    outcome = grader.grade("activation/relu", source, backend="cpu", targets=())
    assert outcome.correct and CLASH in {f.kind for f in outcome.evidence.findings}
