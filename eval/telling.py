"""Keeps the list of the declared cases that say something about a kernel up to date (``kbx_env/grading/telling.py``).

    python eval/telling.py --write      # computes the entries of tasks whose declaration has changed
    python eval/telling.py --check      # exit status 1 if an entry is out of date
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from kbx_env.grading import telling
from kbx_env.spec.catalog import load_task, task_ids
from kbx_env.spec.task import Task


def entry(task: Task) -> dict[str, str]:
    """Return the entry of a task, computed by the judge."""
    flags = (telling.computed(task, i) for i in range(len(task.cases)))
    return {"fingerprint": task.fingerprint, "telling": "".join("1" if t else "0" for t in flags)}


def stale() -> list[str]:
    """Return the ids of tasks whose entry is missing or out of date."""
    known = json.loads(telling.FILE.read_text()) if telling.FILE.exists() else {}
    return [t for t in task_ids() if known.get(t, {}).get("fingerprint") != load_task(t).fingerprint]


def write() -> list[str]:
    """Compute what is out of date and write the file.

    Returns:
        The ids of the tasks that were computed.
    """
    known = json.loads(telling.FILE.read_text()) if telling.FILE.exists() else {}
    changed = stale()
    new = {t: entry(load_task(t)) if t in changed else known[t] for t in task_ids()}
    rows = ",\n".join(f"  {json.dumps(t)}: {json.dumps(e)}" for t, e in new.items())
    telling.FILE.write_text("{\n" + rows + "\n}\n")
    return changed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 1 if ``--check`` finds an entry that is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="compute the entries of changed tasks")
    parser.add_argument("--check", action="store_true", help="list the entries that are out of date")
    a = parser.parse_args(argv)
    if a.write:
        print(f"{len(write())} tasks computed")
    if old := stale():
        print(f"{', '.join(old)}: tasks/telling.json is out of date; run eval/telling.py --write", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
