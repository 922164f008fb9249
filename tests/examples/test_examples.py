"""The examples run, and print what examples/README.md says. The default tier runs two of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import missing

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAGE = (EXAMPLES / "README.md").read_text()
PRINTED = dict(re.findall(r"^```text\npython examples/(\w+\.py)\n(.*?)^```$", PAGE, re.S | re.M))
ELSEWHERE = {"trl_grpo.py": "test_trl.py", "learn.py": "experiments/test_learning_curve.py"}
"""Examples that other tests run."""
QUICK = ("grade_one.py", "store_and_resume.py")
NOTEBOOKS = sorted(p.name for p in EXAMPLES.glob("*.ipynb"))
NO_DISPLAY = """
import sys, types
sys.modules["IPython"] = sys.modules["IPython.display"] = types.SimpleNamespace(Image=lambda *_, **__: None)
"""
"""Notebooks bring IPython; the tests do not need it."""


def _run(*command: str, cwd: Path) -> str:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in sorted(PRINTED)]
)
def test_an_example_prints_what_the_page_says(name: str, tmp_path: Path) -> None:
    output = _run(f"examples/{name}", *[str(tmp_path)] * ("sys.argv" in (EXAMPLES / name).read_text()), cwd=EXAMPLES.parent)
    assert not missing(PRINTED[name], output), output


@pytest.mark.full
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_cells_of_a_notebook_print_what_they_show(name: str) -> None:
    cells = [c for c in json.loads((EXAMPLES / name).read_text())["cells"] if c["cell_type"] == "code"]
    shown = [o["text"] for c in cells for o in c["outputs"] if o["output_type"] == "stream"]
    output = _run("-c", NO_DISPLAY + "\n".join("".join(c["source"]) for c in cells), cwd=EXAMPLES)
    assert shown and not missing("".join(line for text in shown for line in text), output)


def test_examples_are_short_and_on_the_page() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path.name
        assert path.name in {**PRINTED, **ELSEWHERE} and f"({path.name})" in PAGE, path.name
    assert all(f"({name})" in PAGE for name in NOTEBOOKS)
