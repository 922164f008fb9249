"""Write the paper's correctness cases, ``tasks/published.json``, from a file of facts about the published benchmark.

    python benchmarks/published_cases.py FACTS.json [--check]

FACTS.json is a list of tasks. Each has ``id``, ``entry`` and ``correctness_cases`` with ``case``, ``shapes``, ``dtypes``,
``scalars``, ``distribution`` and ``repeat``. Where the facts give only the range of a published literal, its values are evenly
spaced, unless ``CORRECTIONS`` names them. With ``--check`` nothing is written; exit status 1 says that the file would change.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "tasks" / "published.json"

_SINGULAR = "listed(1, 2, 2, 4)"
_SYSTEM3 = "listed(1, 2, 3, 0, 1, 4, 5, 6, 0)"
_LDL2 = "listed(5, 2, 2, 4)"
_SPD3 = "listed(6, 2, 1, 2, 5, 2, 1, 2, 4)"
_PLANAR = "listed(1, 0, 0, 0, 1, 0)"
CORRECTIONS: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("fusion/fused_cholesky_solve", "test_case_1"): {"A": "listed(4, 1, 1, 3)"},
    ("fusion/fused_cholesky_solve", "test_case_2"): {"A": _SPD3},
    ("fusion/fused_cholesky_solve", "test_case_3"): {"A": "listed(5, 2, 2, 3)"},
    ("fusion/fused_cholesky_solve", "test_case_4"): {"A": "listed(7, 3, 1, 3, 6, 2, 1, 2, 5)"},
    ("fusion/fused_cross_entropy_log_softmax", "test_case_1"): {"target": "listed(2, 1)"},
    ("fusion/fused_cross_entropy_log_softmax", "test_case_2"): {"target": "listed(2, 1)"},
    ("fusion/fused_cross_entropy_log_softmax", "test_case_3"): {"target": "listed(2, 1)", "weight": "listed(1, 0.5, 2)"},
    ("fusion/fused_cross_entropy_log_softmax", "test_case_4"): {"target": "listed(2, 1)"},
    ("fusion/fused_cross_entropy_softmax_layernorm", "test_case_3"): {"targets": "listed(2, -100)"},
    ("fusion/fused_gelu_min", "test_case_1"): {"input": "listed(0.5, -0.5, 1, -1)"},
    ("fusion/fused_gelu_min", "test_case_2"): {"input": "listed(0.5, -0.5, 1, -1)"},
    ("fusion/fused_gelu_min", "test_case_3"): {"input": "listed(0.5, -0.5, 1, -1)"},
    ("fusion/fused_gelu_min", "test_case_4"): {"input": "listed(0.5, -0.5, 1, -1)"},
    ("fusion/fused_log_tanh", "test_case_3"): {"input": "listed(0.1, 0.01, 0.001)"},
    ("fusion/fused_log_tanh", "test_case_4"): {"input": "listed(-1, 0, 2)"},
    ("fusion/fused_lu_solve", "test_case_1"): {"A": "listed(3, 1, 1, 2)", "b": "listed(9, 8)"},
    ("fusion/fused_lu_solve", "test_case_2"): {"A": _SYSTEM3, "b": "listed(6, 4, 3)"},
    ("fusion/fused_lu_solve", "test_case_3"): {"A": "listed(4, 3, 2, 1, 3, 2, 1, 4, 2, 1, 4, 3, 1, 4, 3, 2)"},
    ("fusion/fused_lu_solve", "test_case_4"): {"A": _SINGULAR, "b": "listed(5, 10)"},
    ("index/scatter", "test_case_1"): {"index": "listed(0, 1, 2, 1, 2, 0)"},
    ("index/scatter", "test_case_2"): {"index": "listed(0, 2, 1, 3, 2, 0)"},
    ("index/scatter", "test_case_3"): {"index": "listed(0, 1, 1, 2, 2, 3, 0, 1, 1, 2, 2, 3)"},
    ("index/scatter", "test_random_standard"): {"index": "first(argsort(uniform(0, 1, wide=256), dim=2), 64)"},
    ("index/scatter", "test_random_outlier"): {"index": "first(argsort(uniform(0, 1, wide=256), dim=2), 64)"},
    ("linearalgebra/determinant_lu", "test_case_1"): {"A": "listed(3, 1, 2, 4)"},
    ("linearalgebra/determinant_lu", "test_case_2"): {"A": _SYSTEM3},
    ("linearalgebra/determinant_lu", "test_case_4"): {"A": "listed(1, 0, 2, -1, 3, 0, 0, 5, 2, 1, 4, -3, 1, 0, 5, 0)"},
    ("linearalgebra/matrix_power_eig", "test_case_1"): {"A": "listed(2, 0, 0, 3)"},
    ("linearalgebra/solve", "test_case_1"): {"A": "listed(3, 1, 1, 2)", "B": "listed(9, 8)"},
    ("linearalgebra/solve", "test_case_2"): {"A": _SYSTEM3, "B": "listed(6, 4, 3)"},
    ("linearalgebra/solve", "test_case_3"): {"A": _SINGULAR, "B": "listed(5, 10)"},
    ("linearalgebra/solve_symmetric_ldl", "test_case_1"): {"A": "listed(4, 1, 1, 3)"},
    ("linearalgebra/solve_symmetric_ldl", "test_case_2"): {"A": "paired(2, 0, 1, 1, 1, -1, 3, 0)"},
    ("linearalgebra/solve_symmetric_ldl", "test_case_3"): {"A": _SPD3},
    ("linearalgebra/solve_symmetric_ldl", "test_case_4"): {"A": "paired(5, 0, 2, 1, 0, 0, 2, -1, 4, 0, 1, 1, 0, 0, 1, -1, 3, 0)"},
    ("linearalgebra/solve_symmetric_ldl", "test_case_5"): {"A": _LDL2},
    ("linearalgebra/solve_symmetric_ldl", "test_case_6"): {"A": "listed(-4, 1, 1, -3)"},
    ("linearalgebra/svd", "test_case_1"): {"A": "listed(3, 1, 1, 3)"},
    ("loss/cross_entropy", "test_case_1"): {"target": "listed(0, 1, 2, 1)"},
    ("loss/cross_entropy", "test_case_2"): {"target": "listed(0, -100, 2, 1)"},
    ("loss/nll_loss", "test_case_1"): {"target": "listed(0, 1, 2, 1)"},
    ("loss/nll_loss", "test_case_2"): {"target": "listed(0, 1, 2, 0)", "weight": "listed(1, 2, 1.5)"},
    ("loss/nll_loss", "test_case_3"): {"target": "listed(0, -100, 2, 1)"},
    ("math/bitwise_and_binomial", "test_case_1"): {"input": "listed(1, 0, 1, 0)", "other": "listed(1, 1, 0, 0)"},
    ("math/bitwise_and_binomial", "test_case_2"): {"total_count": "full(5)"},
    ("math/bitwise_and_binomial", "test_case_3"): {"probs": "full(0.5)"},
    ("math/bitwise_and_binomial", "test_case_4"): {"total_count": "full(10)"},
    ("math/bitwise_and_binomial", "test_random_standard"): {"total_count": "full(10)"},
    ("math/bitwise_and_binomial", "test_random_outlier"): {"total_count": "full(10)"},
    ("math/signbit_bitwise_and", "test_case_1"): {"input": "listed(0.7, -1.2, 0, 2.3)", "other": "listed(1, 0, 1, 1)"},
    ("math/signbit_bitwise_and", "test_case_2"): {"input": "listed(-0.7, -1.2, -0.1, -2.3)"},
    ("math/signbit_bitwise_and", "test_case_3"): {"input": "listed(0, 1.2, 0, 2.3)", "other": "listed(1, 0, 1, 1)"},
    ("math/signbit_bitwise_and", "test_case_4"): {"other": "listed(1, 0, 1, 1)"},
    ("normalization/symmetric_matrix_vector_norm", "test_case_1"): {"A": "listed(2, 1, 1, 2)"},
    ("normalization/symmetric_matrix_vector_norm", "test_case_2"): {"A": "listed(2, 1, 1, 2)"},
    ("normalization/symmetric_matrix_vector_norm", "test_case_3"): {"A": "listed(2, 1, 1, 2)"},
    ("normalization/symmetric_matrix_vector_norm", "test_case_4"): {"A": "listed(4, 1, 2, 1, 3, 1, 2, 1, 3)"},
    ("activation/gelu_bf16", "test_fixed_linspace"): {"input": "literal(-6, 6)"},
    ("activation/gelu_fp16", "test_fixed_linspace"): {"input": "literal(-6, 6)"},
    ("fusion/fused_gather_masked_fill", "test_case_1"): {"index": "listed(0, 1, 1, 0)", "mask": "listed(1, 0, 0, 1)"},
    ("fusion/fused_gather_masked_fill", "test_case_2"): {"index": "listed(0, 2, 1, 0)", "mask": "listed(0, 1, 1, 0)"},
    ("fusion/fused_gather_masked_fill", "test_case_3"): {"index": "listed(1, 0, 0, 1)", "mask": "listed(1, 1, 0, 0)"},
    ("fusion/fused_gather_masked_fill", "test_case_4"): {
        "index": "listed(3, 2, 1, 0, 0, 1, 2, 3)", "mask": "listed(0, 0, 1, 1, 1, 0, 0, 1)",
    },
    ("fusion/fused_index_select_eq", "test_case_2"): {"index": "listed(0, 2)", "other": "listed(1, 3, 4, 6)"},
    ("linearalgebra/cholesky_solve", "test_case_1"): {"L": "listed(2, 0, 1, 1)"},
    ("linearalgebra/cholesky_solve", "test_case_2"): {"L": "listed(2, 1, 0, 1)"},
    ("linearalgebra/cholesky_solve", "test_case_3"): {"L": "listed(2, 0, 1, 1, 3, 0, 1, 2)"},
    ("linearalgebra/cholesky_solve", "test_case_4"): {"L": "listed(2, 1, 0, 1, 3, 1, 0, 2)"},
    ("linearalgebra/eig", "test_case_1"): {"A": "listed(2, 0, 0, 3)"},
    ("linearalgebra/eig", "test_case_2"): {"A": "eye"},
    ("linearalgebra/eig", "test_case_3"): {"A": "listed(0, -1, 0, 1, 0, 0, 0, 0, 1)"},
    ("linearalgebra/eig", "test_case_4"): {"A": "listed(4, 1, 0, 1, 4, 0, 0, 0, 5)"},
    ("linearalgebra/invert_matrix_lu", "test_case_1"): {"A": "listed(4, 3, 6, 3)"},
    ("linearalgebra/invert_matrix_lu", "test_case_2"): {"A": "listed(4, 3, 6, 3)"},
    ("linearalgebra/invert_matrix_lu", "test_case_3"): {"A": "listed(7, 2, 1, 0, 3, -1, -3, 4, 2)"},
    ("linearalgebra/invert_matrix_lu", "test_case_4"): {"A": "listed(7, 2, 1, 0, 3, -1, -3, 4, 2)"},
    ("linearalgebra/ldl_factor", "test_case_1"): {"A": "listed(4, 1, 1, 3)"},
    ("linearalgebra/ldl_factor", "test_case_2"): {"A": "paired(2, 0, 0, 1, 0, -1, 2, 0)"},
    ("linearalgebra/ldl_factor", "test_case_3"): {"A": "listed(4, 1, 1, 3, 2, 0.5, 0.5, 2)"},
    ("linearalgebra/ldl_factor", "test_case_4"): {"A": "paired(2, 0, 0, 1, 0, -1, 2, 0, 3, 0, 0, 0.5, 0, -0.5, 3, 0)"},
    ("linearalgebra/pseudoinverse_svd", "test_case_4"): {"A": _SINGULAR},
    ("linearalgebra/solve_and_add_scaled_vector", "test_case_1"): {"A": "listed(2, 1, 0, 3)"},
    ("linearalgebra/svd", "test_case_4"): {"A": "eye"},
    ("math/bessel_j1", "test_case_4"): {"input": "literal(-5, 5)"},
    ("math/cos", "test_case_4"): {"input_tensor": "literal(-3.14159265, 3.14159265)"},
    ("math/gammaln", "test_case_4"): {"input": "literal(1, 1000)"},
    ("math/mul", "test_case_3"): {"input": "paired(1, 2, 3, 4)", "other": "paired(5, 6, 7, 8)"},
    ("math/polygamma", "test_random_standard"): {"input": "add(abs(standard), 0.1)"},
    ("math/polygamma", "test_random_outlier"): {"input": "add(abs(outlier(p=0.001, scale=10)), 0.1)"},
    ("normalization/spectral_norm_eig", "test_case_4"): {
        "A": "listed(1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 8, 7, 6, 5, 4, 3, 2, 1)",
    },
    ("spatialops/grid_sample_with_affine", "test_case_1"): {"theta": _PLANAR},
    ("spatialops/grid_sample_with_affine", "test_case_2"): {"theta": _PLANAR},
    ("spatialops/grid_sample_with_affine", "test_case_3"): {"theta": _PLANAR},
    ("spatialops/grid_sample_with_affine", "test_case_4"): {"theta": _PLANAR},
    ("reduce/min_gelu", "test_case_1"): {"input": "listed(1, -0.5, 0, 2)"},
    ("reduce/min_gelu", "test_case_2"): {"input": "listed(1, -0.5, 0, 2)"},
    ("reduce/min_gelu", "test_case_3"): {"input": "listed(1, -0.5, 0, 2)"},
    ("reduce/min_gelu", "test_case_4"): {"input": "listed(1, -0.5, 0, 2)"},
}  # fmt: skip
"""Published values of which the facts give the range only, where they matter: systems of equations, labels, ties."""
ON_HOST = "the published reference returns a tensor on the host, and the comparison checks devices"
NO_TENSOR = "the published test compares the options of a torch.optim.Adam, not a tensor"
ENTRIES = {"optimizer/Adam": "Adam"}
DTYPE_WORDS = {"float64": "f64", "float32": "f32", "float16": "f16"}


def _expression(text: str) -> str:
    """Return a distribution of the facts as a formula of ``kbx_env.grading.expressions``."""
    text = text.strip()
    if text.startswith("corner:literal"):
        rest = text.removeprefix("corner:literal").strip()
        if rest == "bool":
            return "alternating()"
        if ".." in rest:
            low, high = rest.split("..")
            return f"literal({low}, {high})"
        return "literal(1, 2)"
    if text in ("corner:empty", "empty", "empty_like"):
        return "zeros"
    if text == "linspace":
        return "literal(0, 1)"
    text = re.sub(r"(?<=[\w])\[([^\[\])]*)\)", r"(\1)", text)  # randint[0,128) -> randint(0,128)
    text = re.sub(r"\bU\(", "uniform(", text)
    text = re.sub(r"to\((randint\([^)]*\)),int8\)", r"\1", text)
    text = re.sub(r"float\((randint\([^)]*\))\)", r"\1", text)
    text = re.sub(r"transpose\(([^(),]*(?:\([^()]*\))?),-1,-2\)", r"T(\1)", text)
    text = text.replace("linalg_cholesky(", "cholesky(")
    ast.parse(text, mode="eval")
    return text


def _value(value: Any) -> Any:
    return {"tuple": [_value(v) for v in value]} if isinstance(value, list) else value


def _tensors(facts: Mapping[str, Any]) -> list[tuple[str, str, Any, str, str]]:
    """Return (parameter, name, shape, dtype, distribution) of each tensor; those of a list have the names ``x.0``, ``x.1``, ..."""
    rows = []
    dtypes, distribution = facts["dtypes"], facts["distribution"]
    for name, shape in facts["shapes"].items():
        if name == "out":
            continue
        dtype = dtypes if isinstance(dtypes, str) else dtypes[name]
        found = distribution[name] if isinstance(distribution, dict) else distribution
        if shape and isinstance(shape[0], list):
            each = found if isinstance(found, list) else [found] * len(shape)
            rows += [(name, f"{name}.{k}", one, dtype, each[k]) for k, one in enumerate(shape)]
        else:
            rows.append((name, name, shape, dtype, found))
    return rows


def _formula(found: str) -> str:
    """Return the formula of a distribution; the facts cut long ones, all of which are positive definite matrices."""
    if "..." not in found:
        return _expression(found)
    base = re.search(r"outlier\([^)]*\)|standard", found)
    assert base is not None
    product = f"matmul({base[0]}, T(conj({base[0]})))"
    matrix = f"add(div(add({product}, T(conj({product}))), 2), mul(eye, 0.001))"
    if "cholesky" not in found:
        return matrix
    return f"T(cholesky({matrix}))" if found.startswith("T(") else f"cholesky({matrix})"


def _argument(name: str, value: Any) -> Any:
    if value == "Generator":
        return {"generator": True}
    if name == "device":
        return {"device": True}
    if name == "dtype" and isinstance(value, str):
        return {"dtype": DTYPE_WORDS[value]}
    return _value(value)


def _special(task: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a case that few cases have."""
    row: dict[str, Any] = {"out": True} if "out" in facts["shapes"] else {}
    if facts.get("noncontiguous"):
        layout = "strided" if task == "index/scatter" else "transposed"
        row["layouts"] = dict.fromkeys(facts["noncontiguous"], layout)
    if facts.get("raises"):
        row["raises"] = facts["raises"]
    if task == "fusion/fused_sum_std" and facts["scalars"].get("dim") is None:
        row["unpassable"] = ON_HOST
    if task == "optimizer/Adam":
        row |= {"unpassable": NO_TENSOR, "attribute": "defaults"}
    if task == "random/rand":
        row["spread"] = "size"
    return row


def _case(task: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    fixed = CORRECTIONS.get((task, facts["case"]), {})
    tensors = _tensors(facts)
    draws = {name: fixed[of] if of in fixed else _formula(found) for of, name, _, _, found in tensors}
    if task == "fusion/fused_index_select_eq" and "index_select" in str(facts["distribution"]):
        draws["other"] = "index_select(argument('input'), 0, argument('index'))"
    return {
        "name": facts["case"], "shapes": {name: shape for _, name, shape, _, _ in tensors},
        "dtypes": {name: dtype for _, name, _, dtype, _ in tensors}, "draws": draws,
        "args": {name: _argument(name, value) for name, value in facts["scalars"].items()}, "repeat": facts["repeat"],
        **_special(task, facts),
    }  # fmt: skip


def cases(facts: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of ``tasks/published.json``.

    Args:
        facts: one row a task.

    Returns:
        JSON, one line a case.
    """
    parts = []
    for task in sorted(facts, key=lambda t: t["id"]):
        rows = [json.dumps(_case(task["id"], c)) for c in task["correctness_cases"]]
        head = {"entry": ENTRIES[task["id"]]} if task["id"] in ENTRIES else {}
        body = ",\n".join(f"   {r}" for r in rows)
        entry = "".join(f'"{k}": {json.dumps(v)}, ' for k, v in head.items())
        parts.append(f' "{task["id"]}": {{{entry}"cases": [\n{body}\n ]}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the file; exit status 1 if ``--check`` finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--check", action="store_true", help="only say whether the file would change")
    a = parser.parse_args(argv)
    text = cases(json.loads(a.facts.read_text()))
    if a.check:
        return int(TARGET.read_text() != text)
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
