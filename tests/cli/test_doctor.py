"""What ``kbx doctor`` says of the sandbox."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from kbx_env.cli import doctor

FULL = {"landlock": 7, "processes": True, "files": True, "signals": True, "tcp": True, "network": True, "capabilities": True}


def _rows(monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str = "") -> dict[str, tuple[bool, str]]:
    done = subprocess.CompletedProcess([], 0, stdout, stderr)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: done)
    return {name: (ok, found) for name, ok, found, _ in doctor._confinement()}


@pytest.mark.parametrize(
    ("less", "says"),
    [
        ({}, {"confinement": "Landlock 7; open: nothing"}),
        ({"signals": False, "landlock": 4}, {"confinement": "Landlock 4; open: signals"}),
        (
            {"landlock": 0, "files": False, "signals": False, "tcp": False},
            {"confinement": "no Landlock; open: files, signals, TCP"},
        ),
        ({"network": False, "processes": False}, {"network namespace": "UDP is open", "process namespace": "no"}),
    ],
)
def test_each_part_that_is_not_in_force_is_named(
    less: dict[str, Any], says: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = _rows(monkeypatch, json.dumps(FULL | less))
    assert all(text in rows[name][1] for name, text in says.items())
    assert {name for name, (ok, _) in rows.items() if not ok} == (set(says) if less else set())


def test_a_probe_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _rows(monkeypatch, "", "Traceback\nOSError: nothing works") == {"confinement": (False, "OSError: nothing works")}


def test_this_machine_answers() -> None:
    rows = {name: ok for name, ok, _, _ in doctor._confinement()}
    assert set(rows) == {"confinement", "network namespace", "process namespace"}
