"""Compare the TTIR executor with the GPU, kernel by kernel, on ordinary and special inputs.

Usage: python benchmarks/ttir_differential.py OUT.json [--quick] [--cpu-only]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
import triton
from _differential_bank import Case, cases, source

from kbx_env.backends.ttir import Meter, Region, launch, parse

TORCH = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "i8": torch.int8, "i16": torch.int16,
    "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8, "u32": torch.uint32, "u64": torch.uint64,
}  # fmt: skip
SIZE = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8, "fp8e4nv": 1, "fp8e5": 1}
#: Largest deviation that is not reported as a mismatch.
BOUND = {"exact": 0.0, "ulp": 0.0, "approx": 4.0, "relative": 1e-5}
_COARSE = {"fp16": 2e-3, "bf16": 2e-2}


def size_of(t: str) -> int:
    """Return the width of an element type in bytes."""
    return SIZE.get(t) or int(t[1:]) // 8


def specials(t: str) -> np.ndarray:
    """Return bit patterns of extremes: zeros, denormals, infinities, NaN, limits, halfway cases."""
    bits = 8 * size_of(t)
    top = (1 << bits) - 1
    if t not in SIZE:
        values = [0, 1, 2, 3, top, top - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << (bits - 1)) + 1, 0x5555 & top]
        return np.array(values, f"u{bits // 8}")
    mantissa = {"fp16": 10, "bf16": 7, "fp32": 23, "fp64": 52, "fp8e4nv": 3, "fp8e5": 2}[t]
    inf = ((1 << (bits - 1)) - 1) >> mantissa << mantissa
    one = inf // 2 >> mantissa << mantissa
    half = 1 << max(mantissa - 8, 0)
    values = [
        0,
        1,
        2,
        (1 << mantissa) - 1,
        1 << mantissa,
        inf - 1,
        inf,
        inf + (1 << (mantissa - 1)),
        one,
        one + 1,
        one + half,
    ]
    return np.array(values + [v | 1 << (bits - 1) for v in values], f"u{bits // 8}")


def make_input(case: Case, t: str, rng: np.random.Generator) -> np.ndarray:
    """Return the bytes of one input."""
    word = f"u{size_of(t)}"
    if t in SIZE:
        values = torch.from_numpy(rng.uniform(*case.finite, case.size)).to(TORCH[t])
        out = values.view(torch.uint8).numpy().view(word).copy()
    elif case.group == "exact" and not case.special:
        out = rng.integers(-100, 100, case.size).astype(f"i{size_of(t)}").view(word)
    else:
        out = rng.integers(0, 1 << 63, case.size, dtype=np.uint64).astype(word)
    if case.special:
        s = specials(t)
        # Random halves of the elements, so that special values meet ordinary numbers and one another.
        at = rng.random(case.size) < 0.5
        out[at] = rng.choice(s, int(at.sum()))
    return out


def module_of(bank: list[Case], folder: str) -> Any:
    """Write the kernels to a module and import it: the compiler reads their source."""
    text = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n\n\n"
    path = Path(folder) / "differential_kernels.py"
    path.write_text(text + "\n\n".join(source(c) for c in bank))
    spec = importlib.util.spec_from_file_location("differential_kernels", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["differential_kernels"] = module
    spec.loader.exec_module(module)
    return module


def on_gpu(fn: Any, case: Case, inputs: list[np.ndarray]) -> tuple[np.ndarray, str]:
    """Launch a kernel; return the bytes of the output and the TTIR that was compiled."""

    def tensor(a: np.ndarray, t: str) -> Any:
        return torch.from_numpy(a.view(np.uint8).copy()).cuda().view(TORCH[t])

    args = [tensor(a, t) for a, t in zip(inputs, case.inputs, strict=True)]
    out = tensor(np.zeros(case.size * size_of(case.output), np.uint8), case.output)
    compiled = fn[(case.programs,)](*args, out, N=case.size)
    torch.cuda.synchronize()
    return out.view(torch.uint8).cpu().numpy(), compiled.asm["ttir"]


def compile_only(fn: Any, case: Case) -> str:
    """Return the TTIR of a kernel without a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sig = {f"p{k}": "*" + t for k, t in enumerate(case.inputs)}
    src = ASTSource(fn=fn, signature={**sig, "o": "*" + case.output, "N": "constexpr"}, constexprs={"N": case.size})
    return triton.compile(src, target=GPUTarget("cuda", 90, 32)).asm["ttir"]


def on_executor(text: str, case: Case, inputs: list[np.ndarray]) -> np.ndarray:
    """Run TTIR on the processor; return the bytes of the output."""
    out = np.zeros(case.size * size_of(case.output), np.uint8)
    buffers = [a.view(np.uint8).copy() for a in inputs] + [out]
    regions = [Region((k + 1) << 32, b, f"arg{k}") for k, b in enumerate(buffers)]
    launch(parse(text), (case.programs, 1, 1), [r.base for r in regions], regions, Meter())
    return out


def _values(raw: np.ndarray, t: str) -> np.ndarray:
    v = torch.from_numpy(raw.copy()).view(TORCH[t])
    return v.double().numpy() if t in SIZE else raw.view(f"{t[0]}{size_of(t)}")


def _ordered(raw: np.ndarray, t: str) -> np.ndarray:
    """Map the bits of floats to integers whose differences are units in the last place."""
    size = size_of(t)
    v = raw.view(f"i{size}").astype(np.int64)
    low = np.int64(np.iinfo(f"i{size}").min)
    return np.where(v < 0, low - v, v)


def compare(case: Case, gpu: np.ndarray, cpu: np.ndarray, inputs: list[np.ndarray]) -> dict[str, Any]:
    """Compare the outputs of a kernel.

    Args:
        case: the kernel.
        gpu: output of the GPU.
        cpu: output of the executor.
        inputs: the inputs.

    Returns:
        The row of the report.
    """
    t = case.output
    a, b = _values(gpu, t), _values(cpu, t)
    row: dict[str, Any] = {}
    if t not in SIZE:
        wrong = a != b
    else:
        nans = np.isnan(a) & np.isnan(b)
        kind = (np.isnan(a) != np.isnan(b)) | (np.isinf(a) != np.isinf(b))
        ok = np.isfinite(a) & np.isfinite(b)
        ulp = np.where(ok, np.abs(_ordered(gpu, t) - _ordered(cpu, t)), 0)
        scale = np.max(np.abs(a), where=ok, initial=1e-30)
        row["max_ulp"] = int(ulp.max())
        row["max_relative"] = float(np.max(np.abs(a - b), where=ok, initial=0.0) / scale)
        row["class_mismatches"] = int(kind.sum())
        row["zero_sign_differs"] = int((ok & (a == 0) & (b == 0) & (np.signbit(a) != np.signbit(b))).sum())
        if case.group == "relative":
            wrong = kind | (np.abs(np.where(ok, a - b, 0)) > scale * _COARSE.get(t, BOUND["relative"]))
        else:
            wrong = ~nans & (kind | (ulp > BOUND[case.group]) | (np.isinf(a) & (a != b)))
    bad = np.nonzero(wrong)[0]
    row["mismatches"] = len(bad)
    if len(bad):
        k = bad[:3].tolist()
        given = [[str(_values(x.view(np.uint8), s)[j]) for x, s in zip(inputs, case.inputs, strict=True)] for j in k]
        row["sample"] = [{"inputs": g, "gpu": str(a[j]), "executor": str(b[j])} for j, g in zip(k, given, strict=True)]
    return row


def main() -> int:
    """Run the bank and write the report."""
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("out")
    ap.add_argument("--quick", action="store_true", help="every fifth elementwise kernel")
    ap.add_argument("--cpu-only", action="store_true", help="check that every kernel executes")
    opts = ap.parse_args()
    bank = cases(opts.quick)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        module = module_of(bank, folder)
        for n, case in enumerate(bank):
            rng = np.random.default_rng(n)
            inputs = [make_input(case, t, rng) for t in case.inputs]
            row: dict[str, Any] = {"name": case.name, "group": case.group}
            try:
                fn = getattr(module, case.name)
                if opts.cpu_only:
                    on_executor(compile_only(fn, case), case, inputs)
                else:
                    gpu, text = on_gpu(fn, case, inputs)
                    row.update(compare(case, gpu, on_executor(text, case, inputs), inputs))
            except Exception as e:  # the other kernels run even if one fails
                row["error"] = f"{type(e).__name__}: {e}"[-400:]
            rows.append(row)
            if row.get("error") or row.get("mismatches"):
                print(json.dumps(row))
    bad = sum(1 for r in rows if r.get("error") or r.get("mismatches"))
    device = "none" if opts.cpu_only else torch.cuda.get_device_name()
    report = {"triton": triton.__version__, "torch": torch.__version__, "device": device, "kernels": rows}
    Path(opts.out).write_text(json.dumps(report, indent=1))
    worst = {r["name"]: r["max_ulp"] for r in rows if r["group"] == "approx" and "max_ulp" in r}
    print(f"{len(rows)} kernels, {bad} with mismatches or errors; approximate functions, ulp: {worst}")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
