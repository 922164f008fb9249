"""The sanitizer finds nothing in our experts, and the faults that are planted in them.

They run in a process of their own: the interceptor replaces parts of Triton.
"""

from __future__ import annotations

import inspect
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kbx_env.backends.ttir import OutOfBounds, Region
from kbx_env.backends.ttir.sanitizer import Sanitizer
from kbx_env.catalog import expert_source, load_task, task_ids

POISON = 0xA5


class _Shim:
    """Stands in for the executor that the interceptor uses: every launch runs sanitized."""

    def __init__(self, real: Any) -> None:
        self.real, self.sanitizer, self.masks, self.fresh = real, Sanitizer(), {}, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def launch(self, module: Any, grid: Any, values: Any, regions: Any, meter: Any, deadline: Any = None) -> None:
        mine = {t.untyped_storage().data_ptr() for t in self.fresh}
        marked = []
        for r in regions:
            if r.base in mine:
                # What the host wrote since shows by not being poison; four bytes of it are hardly a value.
                mask = self.masks.setdefault(r.base, np.zeros(r.data.size, bool))
                whole = r.data.size // 4 * 4
                words = (r.data[:whole] != POISON).reshape(-1, 4).any(axis=1)
                mask[:whole] |= np.repeat(words, 4)
                mask[whole:] |= r.data[whole:] != POISON
                r = Region(r.base, r.data, r.name, mask)
            marked.append(r)
        self.real.launch(module, grid, values, marked, meter, deadline=deadline, sanitizer=self.sanitizer)


@cache
def _interceptor() -> Any:
    from kbx_env.sandbox.launches import Interceptor

    found = Interceptor("cpu")
    found.install()
    return found


def _arguments(task: Any, case: Any, seed: int) -> dict[str, Any]:
    from kbx_env.grading import inputs, reference
    from kbx_env.task import DeviceArg, DtypeArg, GeneratorArg
    from kbx_env.wire import DTYPES

    args = inputs.draw(task, case, seed)
    if case.out:
        args["out"] = torch.empty_like(reference.expect(task, case, args, "cpu").native[0])
    for name, v in args.items():
        if isinstance(v, DtypeArg):
            args[name] = DTYPES[v.name]
        elif isinstance(v, DeviceArg):
            args[name] = torch.device("cpu")
        elif isinstance(v, GeneratorArg):
            args[name] = torch.Generator().manual_seed(1)
    return args


def run_expert(task_id: str, source: str, folder: str, until_found: bool) -> list[tuple[str, str]]:
    """Run a submission on the cases of its task; return (kind, text) of the findings."""
    from kbx_env.backends import ttir

    interceptor = _interceptor()
    shim = _Shim(ttir)
    interceptor._ttir = shim
    real = torch.empty, torch.empty_like

    def poisoned(make: Any) -> Any:
        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            t = make(*args, **kwargs)
            if t.numel():
                torch.as_strided(t, (t.untyped_storage().nbytes() // t.element_size(),), (1,), 0).view(
                    torch.uint8
                ).fill_(POISON)
                shim.fresh.append(t)
            return t

        return empty

    path = Path(folder) / f"m{abs(hash(source))}.py"
    path.write_text(source)
    space: dict[str, Any] = {"__name__": "submission", "__file__": str(path)}
    exec(compile(source, str(path), "exec", dont_inherit=True), space)
    task = load_task(task_id)
    for index, case in enumerate(task.cases):
        args = _arguments(task, case, 11 + index)
        kinds = inspect.Parameter.KEYWORD_ONLY
        params = task.signature.parameters
        first = [n for n, p in params.items() if n in args and p.kind is not kinds and p.default is p.empty]
        interceptor.reset("run")
        torch.empty, torch.empty_like = (poisoned(f) for f in real)
        try:
            space[task.entry](*[args.pop(n) for n in first], **args)
        except (OutOfBounds, RuntimeError):
            # A host may stumble over what a faulty kernel gave it; the findings are what counts.
            pass
        finally:
            torch.empty, torch.empty_like = real
            interceptor._cache.clear()
            shim.fresh.clear()
            shim.masks.clear()
        if until_found and shim.sanitizer.findings:
            break
    return [(f.kind, f.text()) for f in shim.sanitizer.findings]


#: Task, text of the expert, text that replaces it, kinds of which one must be found.
OUT, RAW, CLASH, ORDER = "out_of_bounds", "uninitialised_read", "write_conflict", "order_dependent"
FAULTS = [
    ("activation/gelu_fp16", "tl.load(x + offsets, mask=inside)", "tl.load(x + offsets)", [OUT]),
    ("activation/gelu_fp16", "tl.store(y + offsets, r.to(tl.float16), mask=inside)",
     "tl.store(y + offsets, r.to(tl.float16))", [OUT]),
    ("activation/gelu_fp16", "inside = offsets < n", "inside = offsets <= n", [OUT]),
    ("convolution/conv2d", "mask=o < OG, other=0.0)[None", "mask=o < BN)[None", [OUT]),
    ("convolution/conv2d", "(o[None, :] < OG) & (k[:, None] < K)", "k[:, None] < K", [OUT]),
    ("convolution/conv2d", "(m[:, None] < pixels) & (o[None, :] < OG))", "m[:, None] < pixels)", [OUT, CLASH]),
    ("convolution/conv2d", "(row >= 0) & ", "", [OUT]),
    ("fusion/fused_bmm_dropout_gelu", "mask=(n[:, None] < N) & (q[None, :] < P))", "mask=q[None, :] < P)", [OUT, CLASH]),
    ("fusion/fused_bmm_dropout_gelu", "mask=(k[:, None] < M) & (q", "mask=(k[:, None] <= M) & (q", [OUT]),
    ("index/masked_select", "+ tl.cumsum(flags, 0) - 1", "+ tl.cumsum(flags, 0)", [OUT]),
    ("index/masked_select", "counts + tl.program_id(0), tl", "counts + tl.program_id(0) // 2, tl", [CLASH, RAW]),
    ("index/masked_select", "_count[(blocks,)]", "_count[(blocks - 1,)]", [RAW]),
    ("index/masked_select", "tl.store(starts + b, before", "if blocks < 0: tl.store(starts + b, before", [RAW]),
    ("linearalgebra/svd", "    w += batch * CP * RP\n", "", [ORDER, CLASH]),
    ("linearalgebra/svd", "    tl.store(w + cols[:, None] * RP + rows[None, :], start)\n", "", [RAW]),
    ("linearalgebra/svd", "tl.store(s + batch * C + rank", "tl.store(s + batch * (C - 1) + rank", [CLASH]),
    ("linearalgebra/svd", "_jacobi[(B,)]", "_jacobi[(B + 1,)]", [OUT]),
    ("loss/cross_entropy", "tl.store(share + e, w, mask=valid)", "tl.store(share + e, w)", [OUT]),
    ("loss/cross_entropy", "_rows[(triton.cdiv(n, BS),)]", "_rows[(triton.cdiv(n, BS) - 1,)]", [RAW]),
    ("loss/cross_entropy", "tl.load(target + e, mask=valid, other=0)", "tl.load(target + e)", [OUT]),
    ("loss/cross_entropy", "    tl.store(loss + e, value, mask=valid)\n", "", [RAW]),
    ("math/softmax", "base = (tl.program_id(0) // tiles).to(tl.int64) * n * inner",
     "base = (tl.program_id(0) // tiles).to(tl.int64) * (n - 1) * inner", [CLASH]),
    ("math/softmax", "inside = (r[:, None] < n) &", "inside = (r[:, None] <= n) &", [OUT, CLASH]),
    ("math/softmax", "grid = (triton.cdiv(inner, BI) * outer,)", "grid = (triton.cdiv(inner, BI) * (outer + 1),)", [OUT]),
    ("matrixmultiply/matmul_bf16", "mask=(m[:, None] < M) & (k[None, :] < K - k0), other=0.0", "", [OUT]),
    ("matrixmultiply/matmul_bf16", "acc.to(tl.bfloat16), mask=(m[:, None] < M) & (n[None, :] < N))",
     "acc.to(tl.bfloat16))", [OUT, CLASH]),
    ("normalization/batch_norm", "tl.store(mean + c, mu)", "tl.store(mean, mu)", [CLASH, RAW]),
    ("normalization/batch_norm", "    tl.store(var + c, spread / count)\n", "", [RAW]),
    ("normalization/batch_norm", "_statistics[(C,)]", "_statistics[(C + 1,)]", [OUT]),
    ("normalization/batch_norm", "running_var + c, (1 - momentum) * tl.load(running_var + c)",
     "running_var + c, (1 - momentum) * tl.load(running_var)", [ORDER]),
    ("optimizer/AdamW", "* BLOCK + tl.arange", "* (BLOCK // 2) + tl.arange", [ORDER, CLASH]),
    ("optimizer/AdamW", "tl.store(m + o, first, mask=inside)", "tl.store(m + o, first)", [OUT]),
    ("optimizer/AdamW", "tl.load(v + o, mask=inside)", "tl.load(v + o + 1, mask=inside)", [OUT, ORDER]),
    ("pooling/adaptive_avg_pool2d", "row.to(tl.int64) * OW + j", "row.to(tl.int64) * (OW - 1) + j", [CLASH]),
    ("pooling/adaptive_avg_pool2d", ", mask=j < OW)", ")", [OUT, CLASH]),
    ("pooling/adaptive_avg_pool2d", "tl.store(y + bin, mean)", "tl.store(y + bin // 2, mean)", [CLASH]),
    ("quantization/matmul_w8a8", "_quantize[(M,)]", "_quantize[(M - 1,)]", [RAW]),
    ("quantization/matmul_w8a8", "    tl.store(scales + line, scale)\n", "", [RAW]),
    ("quantization/matmul_w8a8", "tl.store(q + e * q_along", "tl.store(q + e * (q_along + 1)", [OUT, CLASH]),
    ("quantization/matmul_w8a8", "right = tl.load(sb + n, mask=n < N, other=0.0)", "right = tl.load(sb + n)", [OUT]),
    ("random/rand", "mask=o < n", "mask=o < n + 1", [OUT]),
    ("reduce/argmax", "tl.store(indices + place, index, mask=i < inner)", "tl.store(indices + place, index)", [OUT, CLASH]),
    ("reduce/argmax", "_argmax[(columns * outer, splits)]", "_argmax[(columns * outer + 1, splits)]", [OUT]),
    ("reduce/argmax", "tl.store(indices + place,", "tl.store(indices + place // 2,", [CLASH]),
    ("spatialops/grid_sample", "* dims + 1, mask=valid, other=0.0)", "* dims + 1)", [OUT]),
    ("spatialops/grid_sample", "(cx >= 0) & ", "", [OUT]),
    ("spatialops/grid_sample", "e % per_image, total, mask=valid)", "e % 2, total, mask=valid)", [CLASH]),
]  # fmt: skip


@pytest.fixture(scope="module")
def other_process():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def _source(task: str) -> str:
    source = expert_source(task)
    assert source
    return source if isinstance(source, str) else bytes(source).decode()


@pytest.mark.parametrize("task", task_ids())
def test_no_expert_has_findings(other_process, tmp_path: Path, task: str) -> None:
    assert other_process.submit(run_expert, task, _source(task), str(tmp_path), False).result() == []


def test_faults_planted_in_experts_are_found(other_process, tmp_path: Path) -> None:
    missed = []
    for task, old, new, kinds in FAULTS:
        source = _source(task)
        assert source.count(old) >= 1, (task, old)
        got = other_process.submit(run_expert, task, source.replace(old, new), str(tmp_path), True).result()
        if not {k for k, _ in got} & set(kinds):
            missed.append((task, new, got))
    assert len(missed) <= 0.05 * len(FAULTS), missed
