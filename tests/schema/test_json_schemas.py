"""The published JSON Schemas describe what the project writes: outcomes of all verdicts, and a report."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from kbx_env.eval import report
from referencing import Registry, Resource

from kbx_env import schema
from kbx_env.__main__ import main
from kbx_env.cli.selfcheck import ATTACK, WRONG
from kbx_env.errors import UnknownName
from kbx_env.outcome import (
    Build,
    CaseEstimate,
    CaseFailure,
    Cases,
    CaseTime,
    Estimate,
    Evidence,
    Fault,
    FaultKind,
    Finding,
    KernelTraffic,
    Outcome,
    Passing,
    Stage,
    Timing,
    Verdict,
    Violation,
)
from kbx_env.spec.catalog import expert_source

ROOT = Path(__file__).resolve().parents[2]
HEAD = "import triton\nimport triton.language as tl\nimport torch\n\n\n@triton.jit\ndef k(x, n):\n    {kernel}\n\n\n"
RUN = HEAD + "def relu(input, inplace=False):\n    {host}\n    k[(1,)](input, input.numel())\n    return input\n"
LOAD = "tl.store(x, tl.load(x))"


def _validator(name: str) -> Draft202012Validator:
    found = {n: schema.load(n) for n in schema.NAMES}
    for one in found.values():
        Draft202012Validator.check_schema(one)
    registry: Any = Registry().with_resources([(f"{n}.json", Resource.from_contents(s)) for n, s in found.items()])
    return Draft202012Validator(found[name], registry=registry)


def _unknown(data: Any, described: dict[str, Any], root: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the keys of a value that its schema does not describe."""
    for option in described.get("anyOf", [described]):
        ref = option.get("$ref")
        option = root["$defs"][ref.rsplit("/", 1)[1]] if ref else option
        if "properties" in option and isinstance(data, dict):
            for key, value in data.items():
                if key not in option["properties"]:
                    yield f"{path}.{key}"
                else:
                    yield from _unknown(value, option["properties"][key], root, f"{path}.{key}")
        elif "items" in option and isinstance(data, list):
            for value in data:
                yield from _unknown(value, option["items"], root, f"{path}[]")


def _check(outcome: Outcome) -> None:
    data = json.loads(outcome.to_json(reward=0.5))
    _validator("outcome").validate(data)
    del data["reward"]
    assert not list(_unknown(data, schema.load("outcome"), schema.load("outcome")))


def _full(verdict: Verdict = Verdict.CORRECT, **more: Any) -> Outcome:
    """An outcome in which every part has a value."""
    finding = Finding("out_of_bounds", "k", 3, "a.py", (0, 1), "x", 4, 8, "beyond", text="line 3")
    traffic = KernelTraffic("k", 1, 2, 3, 32, 0, {"x": (1, 2, 3)}, {"fp32": 7})
    evidence = Evidence(
        1, None, ("mul",), 10, 8, ("dot",), (finding,), 32, 0, {"fp32": 7}, 1.0, ("x",), (traffic,), Passing(1, 1, 2, 3, 4, 5),
        {"scale": 1.0},
    )  # fmt: skip
    wrong = Cases(1, 2, (CaseFailure("n", "off"),), 1, 2, 2, "n")
    cases = Cases(2, 2, telling_passed=1, telling=2) if verdict is Verdict.CORRECT else wrong
    builds = (Build("k", "sm_90", True, None, 8, 0, 0, 9),)
    return Outcome(
        "math/softmax", verdict, Stage.TIME, "cuda", "contract", cases=cases, compile=builds,
        evidence=evidence, seconds={"total": 1.5}, manifest={"torch": "2"}, source_sha256="0" * 64, slips=("x",), **more,
    )  # fmt: skip


@pytest.mark.parametrize("verdict", list(Verdict))
def test_every_verdict_with_every_part(verdict: Verdict) -> None:
    if verdict is Verdict.CORRECT:
        case = CaseTime("n", 2.0, 1.0, 2.0, 1.9, 2.1, 40, None, "paired")
        _check(_full(timing=Timing(2.0, 1.9, 2.1, None, (case,), "H200", {"clock": 1}, None, ("note",), 1.5, {"peak": 1})))
        _check(_full(estimate=Estimate("H200", 3.0, 0.5, (CaseEstimate("n", 3.0, 1.5, 1, "memory"),), "datasheet")))
    elif verdict is Verdict.INFRA_FAULT:
        _check(_full(verdict, fault=Fault.INFRA, message="no memory", fault_kind=FaultKind.SANDBOX))
    else:
        _check(_full(verdict, fault=Fault.POLICY, message="off", violations=(Violation("torch_compute", "clamp"),)))


def test_an_invalid_outcome_is_told() -> None:
    data = json.loads(_full().to_json())
    for wrong in ({"verdict": "right"}, {"cases": {"passed": 1}}, {"correct": "yes"}):
        assert not _validator("outcome").is_valid(data | wrong)
    assert not _validator("outcome").is_valid({k: v for k, v in data.items() if k != "speedup"})


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        (expert_source("activation/relu"), Verdict.CORRECT), (WRONG, Verdict.INCORRECT), (ATTACK, Verdict.REJECTED),
        (RUN.format(kernel="y = missing + x", host="pass"), Verdict.COMPILE_ERROR),
        (RUN.format(kernel=LOAD, host="raise ValueError('no')"), Verdict.RUNTIME_ERROR),
        (RUN.format(kernel=LOAD, host="while True: pass"), Verdict.TIMEOUT), ("def relu(:", Verdict.MALFORMED),
        ((ROOT / "tests/zoo/honest/k_relu_inline_asm.py").read_text(), Verdict.INFRA_FAULT),
    ],
    ids=lambda v: str(v) if isinstance(v, Verdict) else "",
)  # fmt: skip
def test_real_outcomes_of_every_verdict(source: str, verdict: Verdict, grader: Any) -> None:
    outcome = grader.grade("activation/relu", source, backend="cpu", targets=("sm_90",), wall=3.0, estimate="h200")
    assert outcome.verdict is verdict, outcome.message
    _check(outcome)


@pytest.mark.usefixtures("no_figures")
def test_a_real_report_of_two_policies_and_two_gradings(tmp_path: Path) -> None:
    def grade(task: str, source: bytes, **options: Any) -> Outcome:
        common = (Stage.CORRECT, "cpu", options["grading"])
        if options["grading"] == "paper" or task.startswith("math/"):
            return Outcome(task, Verdict.CORRECT, *common, cases=Cases(2, 2), source_sha256="1" * 64)
        return Outcome(task, Verdict.INCORRECT, *common, Fault.POLICY, "off", Cases(1, 2), source_sha256="1" * 64)

    argv = ["--policy", "expert", "--policy", "zeros", "--backend", "cpu", "--tasks", "softmax,argmax"]
    out = report.run(report.parser().parse_args([*argv, "--gradings", "contract,paper", "--out", str(tmp_path / "r")]), grade=grade)
    data, validator = json.loads((out / "report.json").read_text()), _validator("report")
    validator.validate(data)
    (one, _) = data["policies"]
    validator.validate(one)
    root = schema.load("report")
    for name in ("summary", "manifest"):
        known = root["$defs"][name]["properties"]
        assert name == "manifest" or set(one[name]) <= set(known), "every figure of a summary is described"
    rows = set(root["$defs"]["row"]["allOf"][1]["properties"]) | set(schema.load("outcome")["properties"])
    assert set(one["tasks"][0]) <= rows and set(one) <= set(root["properties"])
    assert not validator.is_valid(one | {"summary": {}}) and not validator.is_valid(data | {"tasks": []})


def test_the_schemas_are_up_to_date_shipped_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs/generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert json.loads(module.outcome_schema()) == schema.load("outcome"), "run python docs/generate.py"
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "kbx_env.schema" in packaged["packages"] and packaged["package-data"]["kbx_env.schema"] == ["*.json"]
    assert main(["schema", "report"]) == 0 and json.loads(capsys.readouterr().out) == schema.load("report")
    assert main(["schema", "reprot"]) == 2 and "outcome, report" in capsys.readouterr().err
    with pytest.raises(UnknownName, match="outcome, report"):
        schema.load("rewards")
