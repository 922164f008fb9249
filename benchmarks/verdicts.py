"""Record the verdicts of many known sources on the CPU tier, and compare two records: a refactoring must change no verdict.

    python benchmarks/verdicts.py record OUT.json [--replays FILE.jsonl ...] [--workers 2]
    python benchmarks/verdicts.py compare BEFORE.json AFTER.json

A record has the experts, the zoo's attacks and honest oddities, and recorded answers. A seed fixes the inputs, so that two records
differ only if the grader does. Seconds, versions and fingerprints are left out. ``compare`` names the outcomes that differ and then
ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

from kbx_env.eval.workload import rows_of
from kbx_env.eval.zoo import specimens

import kbx_env
from kbx_env.errors import UsageError
from kbx_env.spec.catalog import expert_source, task_ids

SEED = 20261123
LEFT_OUT = ("seconds", "manifest", "source_sha256", "compile")
"""Parts of an outcome that do not belong to the verdict, or change from run to run."""


def sources(replays: Sequence[Path]) -> list[tuple[str, str, bytes]]:
    """Return name, task and source of everything that is graded.

    Args:
        replays: files of recorded answers.

    Returns:
        Tuples of name, task and source.
    """
    found = [(f"expert {t}", t, text.encode()) for t in task_ids() if (text := expert_source(t))]
    for honest in (False, True):
        kind = "honest" if honest else "attack"
        found += [
            (f"{kind} {s.path.stem}", s.task, s.path.read_bytes()) for s in specimens(honest=honest) if s.backend != "cuda"
        ]
    for file in replays:
        pieces, _ = rows_of(file)
        found += [(f"{file.stem} {k} {p.task}", p.task, p.source) for k, p in enumerate(pieces)]
    return found


def record(out: Path, replays: Sequence[Path], workers: int) -> None:
    """Grade everything and write the outcomes by name.

    Args:
        out: the file.
        replays: files of recorded answers.
        workers: gradings at a time.
    """
    every = sources(replays)
    outcomes = kbx_env.grade_many(
        [(task, source) for _, task, source in every], workers=workers, backend="cpu", targets=(), seed=SEED
    )
    by_name: dict[str, Any] = {}
    for (name, _, _), outcome in zip(every, outcomes, strict=True):
        by_name[name] = {k: v for k, v in outcome.to_dict().items() if k not in LEFT_OUT}
    out.write_text(json.dumps(by_name, indent=1, sort_keys=True) + "\n")
    print(f"{len(by_name)} outcomes in {out}")


def compare(before: Path, after: Path) -> int:
    """Print every difference between two records.

    Args:
        before: a record.
        after: another one.

    Returns:
        The number of outcomes that differ or are in one record only.
    """
    a, b = json.loads(before.read_text()), json.loads(after.read_text())
    different = 0
    for name in sorted(set(a) | set(b)):
        if a.get(name) == b.get(name):
            continue
        different += 1
        one, other = a.get(name) or {}, b.get(name) or {}
        parts = {k: (one.get(k), other.get(k)) for k in sorted(set(one) | set(other)) if one.get(k) != other.get(k)}
        print(f"{name}: {json.dumps(parts)[:1500]}")
    print(f"{different} of {len(set(a) | set(b))} outcomes differ")
    return different


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0, 1 if records differ, 2 on bad usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record", help="grade everything and write the outcomes")
    recording.add_argument("out", type=Path)
    recording.add_argument("--replays", type=Path, nargs="*", default=[], help="files of recorded answers")
    recording.add_argument("--workers", type=int, default=2)
    comparing = actions.add_parser("compare", help="print what differs")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    a = parser.parse_args(argv)
    try:
        if a.action == "compare":
            return 1 if compare(a.before, a.after) else 0
        record(a.out, a.replays, a.workers)
    except (UsageError, OSError, ValueError) as e:
        print(f"verdicts.py: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
