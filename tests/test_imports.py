"""The edges between packages, and the size of files: what keeps the design true."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    p
    for folder in ("kbx_env", "tasks", "rewards", "baselines", "train", "eval")
    for p in sorted((ROOT / folder).rglob("*.py"))
]
MAPPED = ("tasks", "rewards", "baselines", "train", "eval")


def _imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_mapped_packages_are_spelled_in_full(path: Path) -> None:
    for name in _imports(path):
        assert name.split(".")[0] not in MAPPED, f"import kbx_env.{name}: the bare name breaks in the wheel"


@pytest.mark.parametrize("path", sorted((ROOT / "kbx_env/sandbox").glob("*.py")), ids=lambda p: p.name)
def test_the_sandbox_knows_no_task_and_no_judge(path: Path) -> None:
    allowed = ("kbx_env.wire", "kbx_env.sandbox", "kbx_env.backends", "kbx_env")
    for name in _imports(path):
        if name.startswith("kbx_env"):
            assert name in ("kbx_env",) or name.startswith(allowed[:3]), name


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if "tasks" in p.parts[-3:-1] or p.parent.parent.name == "tasks"], ids=lambda p: p.stem
)
def test_a_task_imports_declarations_only(path: Path) -> None:
    for name in _imports(path):
        if name.startswith("kbx_env"):
            assert name in (
                "kbx_env.task",
                "kbx_env.truth",
                "kbx_env.tasks",
                "kbx_env.tasks._schemes",
                "kbx_env.tasks._seams",
                "kbx_env.tasks._cases",
                "kbx_env.tasks._conv",
                "kbx_env.tasks._linear",
                "kbx_env.tasks._matmul",
            ), name


@pytest.mark.parametrize("path", [p for p in SOURCES if "grading" in p.parts], ids=lambda p: p.stem)
def test_the_trusted_side_never_unpickles_or_executes(path: Path) -> None:
    assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & {n.split(".")[0] for n in _imports(path)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("exec", "eval", "compile", "torch.load", "__import__"), (
                f"line {node.lineno}: {called}"
            )


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_outgrows_a_head(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    limit = 100 if path.parent.parent.name == "tasks" else 400
    assert lines <= limit, f"{lines} lines, at most {limit}: split by idea"
