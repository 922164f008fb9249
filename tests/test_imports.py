"""The edges between packages: what keeps the trust boundary and the layers true."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    p
    for folder in ("kbx_env", "tasks", "rewards", "baselines", "train", "eval")
    for p in sorted((ROOT / folder).rglob("*.py"))
]
MAPPED = ("tasks", "rewards", "baselines", "train", "eval")
DECLARATIONS = (
    "kbx_env.spec.task", "kbx_env.spec.criteria", "kbx_env.tasks", "kbx_env.tasks._schemes", "kbx_env.tasks._seams",
    "kbx_env.tasks._cases", "kbx_env.tasks._varied", "kbx_env.spec.varied",
    "kbx_env.tasks._conv", "kbx_env.tasks._linear", "kbx_env.tasks._matmul",
)  # fmt: skip
SANDBOX = ("kbx_env.protocol", "kbx_env.device", "kbx_env.confinement", "kbx_env.sandbox", "kbx_env.backends")


def _imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    return found


def _broken(paths: list[Path], allowed: object) -> list[str]:
    """Imports that ``allowed`` (a function of the module's name) refuses, as ``file: name``."""
    assert paths
    assert callable(allowed)
    return [f"{p.relative_to(ROOT)}: {name}" for p in paths for name in _imports(p) if not allowed(name)]


def test_mapped_packages_are_spelled_in_full() -> None:
    """``import tasks`` works in a clone and breaks in the wheel, where it is ``kbx_env.tasks``."""
    assert _broken(SOURCES, lambda name: name.split(".")[0] not in MAPPED) == []


def test_the_sandbox_knows_no_task_and_no_judge() -> None:
    paths = sorted((ROOT / "kbx_env/sandbox").rglob("*.py"))
    assert _broken(paths, lambda name: not name.startswith("kbx_env.") or name.startswith(SANDBOX)) == []


def test_the_trusted_side_imports_nothing_from_the_sandbox() -> None:
    """What both sides need lives in ``device`` and ``protocol``."""
    paths = [
        p for p in SOURCES if p.is_relative_to(ROOT / "kbx_env") and not p.is_relative_to(ROOT / "kbx_env/sandbox")
    ]
    broken = _broken(paths, lambda name: not name.startswith("kbx_env.sandbox"))
    assert broken == []


def test_what_both_sides_share_knows_neither() -> None:
    shared = ("device", "protocol", "backends", "spec")
    paths = [
        p for p in SOURCES if p.is_relative_to(ROOT / "kbx_env") and p.relative_to(ROOT / "kbx_env").parts[0] in shared
    ]
    sides = ("kbx_env.grading", "kbx_env.sandbox", "kbx_env.executor", "kbx_env.envs", "kbx_env.store")
    assert _broken(paths, lambda name: not name.startswith(sides)) == []


def test_a_task_imports_declarations_only() -> None:
    paths = [p for p in SOURCES if p.is_relative_to(ROOT / "tasks")]
    assert _broken(paths, lambda name: not name.startswith("kbx_env") or name in DECLARATIONS) == []


def test_the_trusted_side_never_unpickles_or_executes() -> None:
    paths = sorted((ROOT / "kbx_env/grading").rglob("*.py"))
    pickles = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    assert _broken(paths, lambda name: name.split(".")[0] not in pickles) == []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("exec", "eval", "compile", "torch.load", "__import__"), (
                    f"{path.relative_to(ROOT)}, line {node.lineno}: {called}"
                )
