"""What names a grader: the libraries and its own code."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from kbx_env import versions
from kbx_env.spec.catalog import task_ids, task_set_hash
from kbx_env.versions import code_digest, environment

ROOT = Path(__file__).resolve().parents[1]


def test_the_environment_names_what_decides_a_verdict() -> None:
    found = environment("cpu")
    assert {"device", "torch", "triton", "kbx_env", "python", "numpy", "grader"} <= set(found) and all(found.values())
    assert found["device"] == "cpu" and found["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}")


def test_the_digest_follows_the_graders_code_and_nothing_else(tmp_path: Path) -> None:
    for name in ("grading/judge/close.py", "sandbox/runner.py", "backends/cost/data/h200.json", "envs/prompt.py", "envs/answer.py",
                 "protocol/wire.py", "device/driver.py", "spec/task.py"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    for name in ("outcome.py", "confinement.py"):
        (tmp_path / name).write_text("1")
    seen = [code_digest.__wrapped__(tmp_path)]
    for name in ("envs/prompt.py", "grading/judge/close.py", "sandbox/runner.py", "backends/cost/data/h200.json",
                 "protocol/wire.py", "device/driver.py", "spec/task.py", "envs/answer.py"):  # fmt: skip
        (tmp_path / name).write_text("2")
        seen.append(code_digest.__wrapped__(tmp_path))
    assert seen[0] == seen[1] and len(set(seen)) == 8


def test_a_change_of_the_tasks_raises_the_version_of_the_task_set() -> None:
    found = task_set_hash()
    assert found == versions.TASK_SET_HASH, (
        f"the tasks changed since task set {versions.TASK_SET}. In kbx_env/versions.py raise N of TASK_SET if a verdict, a "
        f"speedup or a prompt may change, else X, set TASK_SET_HASH to {found!r}, and add a line with {found[:12]} to the "
        "table of docs/task_set.md; name the new version in README.md"
    )
    rows = re.findall(r"^\| (\d+-\d+) \| \d{4}-\d\d-\d\d \| `(\w{12})` \| .+ \|$", (ROOT / "docs/task_set.md").read_text(), re.M)
    assert rows[-1] == (versions.TASK_SET, found[:12]), "the last line of docs/task_set.md is not the current task set"
    known = [tuple(map(int, version.split("-"))) for version, _ in rows]
    assert known == sorted(set(known)), "versions in docs/task_set.md rise line by line"
    assert f"[task set {versions.TASK_SET}](docs/task_set.md)" in (ROOT / "README.md").read_text()


def test_other_tasks_are_not_passed_off_as_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.task_set().version == versions.TASK_SET
    assert versions.task_set(("math/pack.own",)).entries() == {"task_set": None, "task_set_hash": None}
    assert versions.task_set(("math/pack.own", task_ids()[0])).digest == versions.TASK_SET_HASH
    monkeypatch.setattr(versions, "TASK_SET_HASH", "0" * 64)
    assert versions.task_set().version == f"{versions.TASK_SET}+modified"
