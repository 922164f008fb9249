"""Files that a process closes for itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kbx_env.confinement import landlock_version

CLOSES = """
import os, subprocess, sys
from kbx_env.confinement import close_files
closed, beside, below, elsewhere = sys.argv[1:]
kept = open(closed, "w")
assert close_files([closed])
def told(path):
    try:
        open(path, "w")
        return "open"
    except PermissionError:
        return "closed"
print(told(closed), told(beside), told(below), told("/dev/null"), kept.write("x"))
print(subprocess.run(["sh", "-c", f"echo > {closed}"], capture_output=True).returncode != 0)
print(open(closed).read() in ("", "x"))
os.rename(below, os.path.join(elsewhere, "moved"))  # as Triton moves what it has compiled
print(os.listdir(elsewhere))
"""


@pytest.mark.skipif(landlock_version() < 2, reason="this kernel has no Landlock, or its first version")
def test_a_closed_file_cannot_be_opened_for_writing_and_all_others_can(tmp_path: Path) -> None:
    closed, beside, below = tmp_path / "closed", tmp_path / "beside", tmp_path / "folder" / "new"
    for file in (closed, beside):
        file.touch()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    below.parent.mkdir()
    command = [sys.executable, "-c", CLOSES, closed, beside, below, elsewhere]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["closed", "open", "open", "open", "1", "True", "True", "['moved']"]
