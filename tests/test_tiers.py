"""The two tiers: names in its table exist, and what changed is found."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiers

from kbx_env.spec.catalog import task_ids


def test_every_slow_test_exists() -> None:
    """A renamed test or fixture would slip back into the default tier."""
    missing = []
    sampled = [(file.removeprefix("tests/"), [function]) for file, _, function in (s.partition("::") for s in tiers.SAMPLED)]
    for name, functions in [*tiers.SLOW.items(), *tiers.SLOW_FIXTURES.items(), *sampled]:
        file = tiers.ROOT / "tests" / name
        tree = ast.parse(file.read_text() if file.is_file() else "")
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        missing += [f"{name}::{function}" for function in functions if function not in defined]
    assert missing == []


def test_each_category_has_one_representative() -> None:
    categories = [task.split("/")[0] for task in tiers.representatives()]
    assert sorted(categories) == sorted({task.split("/")[0] for task in task_ids()})
    assert set(task_ids()) >= tiers.DEAR and not tiers.representatives() & tiers.DEAR


def test_thirds_of_the_representatives_are_different_and_together_all() -> None:
    thirds = [tiers.sample(function) for function in tiers.SAMPLED]
    assert frozenset().union(*thirds) == tiers.representatives() and sum(map(len, thirds)) == len(tiers.representatives())
    assert tiers.sample("tests/integration/test_experts.py::test_the_expert_is_correct") == tiers.representatives()


def test_changed_files_name_tasks_and_specimens() -> None:
    files = [
        "tasks/math/softmax.py", "baselines/experts/loss/mse_loss.py", "tests/zoo/exploits/hang.py", "tasks/splits.json",
        "tasks/_schemes.py", "tasks/math/was_deleted.py", "README.md",
    ]  # fmt: skip
    assert tiers.changed_names(files) == ["hang", "loss/mse_loss", "math/softmax"]
    names = tiers.changed_names(["tasks/math/softmax.py", "baselines/experts/_parts/losses.py"])
    assert names[0] == "math/softmax" and "loss/mse_loss" in names[1:], (
        "experts that begin with a changed part come last"
    )


@pytest.mark.parametrize(("test", "module", "mirrored"), [
    ("tests/grading/timing/test_paired.py", "kbx_env/grading/timing/paired.py", True),
    ("tests/grading/timing/test_task_timing_attacks.py", "kbx_env/grading/timing/task_timing.py", True),
    ("tests/train/test_ppo.py", "train/ppo.py", True),
    ("tests/test_outcome.py", "kbx_env/outcome.py", True),
    ("tests/test_outcome.py", "tests/test_outcome.py", True),
    ("tests/grading/timing/test_paired.py", "kbx_env/device/paired.py", False),
    ("tests/grading/timing/test_pairedness.py", "kbx_env/grading/timing/paired.py", False),
    ("tests/train/test_ppo.py", "train/configs/ppo.yaml", False),
    ("tests/experiments/test_evidence.py", "experiments/learning_evidence/evidence.py", True),
    ("tests/experiments/test_true_reward.py", "experiments/true_reward/data.py", True),
    ("tests/experiments/test_true_reward.py", "experiments/timed_rewards/data.py", False),
    ("tests/experiments/test_true_reward.py", "experiments/__init__.py", False),
])  # fmt: skip
def test_test_files_mirror_modules(test: str, module: str, mirrored: bool) -> None:
    assert tiers.mirrors(test, frozenset([module])) is mirrored


def _item(name: str, file: str, fixtures: tuple[str, ...] = (), markers: tuple[str, ...] = (), **params: object) -> Any:
    """What the tiers read of a collected test."""
    callspec = SimpleNamespace(params=params, id="-".join(map(str, params.values())))
    return SimpleNamespace(
        path=tiers.ROOT / "tests" / file, nodeid=f"tests/{file}::{name}", name=name, originalname=name, fixturenames=fixtures,
        get_closest_marker=lambda marker: marker if marker in markers else None, **({"callspec": callspec} if params else {}),
    )  # fmt: skip


@pytest.mark.parametrize(("changed", "kept"), [
    ((), ["quick", "quick-2", "test_it_learns_what_is_rewarded"]),
    (("experiments/small_models/line_tokens.py",), ["quick", "quick-2", "fixture", "test_it_learns_what_is_rewarded"]),
    (("train/ppo.py",), ["quick", "quick-2", "test_it_learns_what_is_rewarded", "test_the_whole_way_on_the_cpu"]),
])  # fmt: skip
def test_what_is_slow_runs_where_its_module_changed(
    changed: tuple[str, ...], kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "changed_files", lambda: frozenset(changed))
    option = SimpleNamespace(all=False, keyword="", markexpr="")
    chosen = tiers.Tiers(cast(Any, SimpleNamespace(option=option, args=["tests"])))
    lines = "experiments/test_line_tokens.py"
    items = [
        _item("quick", lines), _item("quick-2", lines, ("tmp_path",)), _item("fixture", lines, ("tokenizer",)),
        _item("server", "baselines/llm/test_serve.py", markers=("serve",)),
        _item("test_it_learns_what_is_rewarded", "train/test_ppo.py"),
        _item("test_the_whole_way_on_the_cpu", "train/test_ppo.py"),
    ]  # fmt: skip
    run, left = chosen.split(items)
    assert [item.name for item in run] == kept and {*map(id, run), *map(id, left)} == {*map(id, items)}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_what_git_says_changed(tmp_path: Path) -> None:
    assert tiers.changed_files(tmp_path) == frozenset(), "not a repository"

    def git(*args: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *args], check=True)

    def commit(name: str) -> None:
        (tmp_path / name).touch()
        git("add", "-A")
        git("commit", "-q", "-m", name)

    git("init", "-q", "-b", "main")
    commit("old")
    commit("last of main")
    assert tiers.changed_files(tmp_path) == {"last of main"}
    git("checkout", "-q", "-b", "branch")
    commit("first of branch")
    commit("second of branch")
    (tmp_path / "new").touch()
    (tmp_path / "old").write_text("edited")
    assert tiers.changed_files(tmp_path) == {"first of branch", "second of branch", "new", "old"}
