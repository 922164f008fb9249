"""Check that a report graded every expert as correct: python .ci/check_demo.py runs/demo/report.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kbx_env.spec.catalog import task_ids

SHOWN = 20
"""Experts that are not correct and named in the message, at most."""


def problem(report: dict) -> str:
    """Say what is wrong with a report of ``eval/report.py``.

    Args:
        report: the content of ``report.json``; a report of several policies lists them under ``policies``.

    Returns:
        The text of an error message; empty if every expert is correct.
    """
    policies = {p["policy"]: p for p in report.get("policies", [report])}
    if "expert" not in policies:
        return f"the report has no policy 'expert', only {', '.join(policies)}"
    verdicts: dict[str, list[str]] = {task: [] for task in task_ids()}
    for graded in policies["expert"]["tasks"]:
        verdicts.setdefault(graded["task"], []).append(graded["verdict"])
    wrong = {task: found for task, found in verdicts.items() if found != ["correct"]}
    if not wrong:
        return ""
    lines = [f"{len(verdicts) - len(wrong)} of {len(verdicts)} experts are correct; every expert must be"]
    lines += [f"  {task}: {', '.join(found) or 'not graded'}" for task, found in sorted(wrong.items())[:SHOWN]]
    return "\n".join(lines + ["  ..."] * (len(wrong) > SHOWN))


if __name__ == "__main__":
    file = Path(sys.argv[1])
    if not file.is_file():
        sys.exit(f"error: no {file}; make demo writes it")
    if text := problem(json.loads(file.read_text(encoding="utf-8"))):
        sys.exit(f"error: {file}: {text}")
    print(f"{file}: {len(task_ids())} of {len(task_ids())} experts are correct")
