"""What the child side of a script is made of; its behaviour: tests/grading/runtime/test_policy_script.py."""

from __future__ import annotations

import os
from pathlib import Path

from kbx_env.confinement import around
from kbx_env.protocol.script_process import remove


def test_removing_is_not_fooled(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    gone = tmp_path / "gone"
    (gone / "a" / "b").mkdir(parents=True)
    for place in (gone, gone / "a", gone / "a" / "b"):
        (place / "link").symlink_to(tmp_path / "kept", target_is_directory=True)
    remove(str(gone))
    assert not gone.exists() and (tmp_path / "kept" / "file").exists()
    remove(str(gone))


def test_what_is_around(tmp_path: Path) -> None:
    for name in ("a/b/hidden/x", "a/b/c", "a/d", "e"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a/b/link").symlink_to("hidden")
    found = sorted(os.path.relpath(p, tmp_path) for p in around(str(tmp_path), str(tmp_path / "a/b/hidden")))
    assert found == ["a/b/c", "a/d", "e"]
