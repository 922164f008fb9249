"""What names a grader: the libraries and its own code."""

from __future__ import annotations

import sys
from pathlib import Path

from kbx_env.versions import code_digest, environment


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
