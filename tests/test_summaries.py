"""Lists and prompts come from a file that is kept true, so that their commands start without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kbx_env import summaries
from kbx_env.envs.prompt import instruction
from kbx_env.spec.catalog import load_task, task_ids
from kbx_env.store import Store

COMMANDS = (
    ["tasks"], ["tasks", "--json", "--split", "eval", "--category", "math"], ["prompt", "softmax"], ["expert", "softmax"],
    ["store", "show", "STORE"], ["store", "prune", "STORE", "--infra", "--dry-run"], ["calls", "CALLS", "--total"],
    ["eval", "--help"], ["train", "--help"], ["--help"], ["serve", "--help"], ["check-pack", "--help"],
)  # fmt: skip
SCRIPT = """
import contextlib, io, sys
from kbx_env.__main__ import main
for command in {commands!r}:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            status = main(command)
        except SystemExit as stopped:
            status = stopped.code
    loaded = [m for m in ("torch", "triton", "scipy", "transformers", "ray") if m in sys.modules]
    assert status == 0 and said.getvalue() and not loaded, (command, status, loaded)
"""


def test_the_file_says_what_the_declarations_say() -> None:
    assert summaries.FILE.read_text() == summaries.text(), "run python docs/generate.py"
    for task in map(load_task, task_ids("builtin")):
        assert summaries.summary(task.id) == summaries.summarised(task)
        assert instruction(summaries.summary(task.id), "cpu") == instruction(task, "cpu")


def test_a_row_of_another_declaration_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.loads(summaries.FILE.read_text())
    rows["math/abs"] |= {"difficulty": 99, "fingerprint": "of an earlier declaration"}
    del rows["math/log1p"]
    rows["math/cos"]["difficulty"] = 99
    (tmp_path / "s.json").write_text(json.dumps(rows))
    monkeypatch.setattr(summaries, "FILE", tmp_path / "s.json")
    summaries._rows.cache_clear()
    try:
        read = {t: summaries.summary(t).difficulty for t in ("math/abs", "math/log1p", "math/cos")}
    finally:
        summaries._rows.cache_clear()
    assert read == {t: load_task(t).difficulty for t in ("math/abs", "math/log1p")} | {"math/cos": 99}


def test_commands_that_need_no_torch_do_not_import_it(tmp_path: Path) -> None:
    from kbx_env.baselines.llm.log import CallLog

    Store(tmp_path / "s.sqlite").close()
    CallLog(tmp_path / "c.sqlite").close()
    paths = {"STORE": str(tmp_path / "s.sqlite"), "CALLS": str(tmp_path / "c.sqlite")}
    commands = [[paths.get(word, word) for word in command] for command in COMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(commands=commands)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
