"""Make the tables of docs/measurements from results of benchmarks/expert_speed.py.

    python benchmarks/expert_table.py RESULT.json... > table.md

If several results have a task, the last complete one counts. A speedup is the geometric mean over the timed sizes; the comparison
with torch.compile is at the largest size only.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any


def gmean(values: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def rows(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each task that was timed at all its sizes."""
    found: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        here: dict[str, list[dict[str, Any]]] = {}
        for row in result.get("speed", ()):
            here.setdefault(row["task"], []).append(row)
        found |= {t: rs for t, rs in here.items() if all(r.get("speedup") for r in rs)}
    return dict(sorted(found.items()))


def main() -> None:
    """Print both tables in Markdown."""
    results = [json.loads(Path(p).read_text()) for p in sys.argv[1:]]
    timed = rows(results)
    graded = {r["task"]: r for result in results for r in result.get("graded", ())}
    by: dict[str, list[tuple[float, float | None, str]]] = {}
    lines = []
    for t, rs in timed.items():
        speedup = gmean([r["speedup"] for r in rs])
        last = rs[-1]
        compiled = last["compiled_us"] / last["expert_us"] if last.get("compiled_us") else None
        by.setdefault(t.split("/")[0], []).append((speedup, compiled, t))
        evidence = (graded.get(t) or {}).get("evidence") or {}
        calls = ((graded.get(t) or {}).get("cases") or {}).get("total")
        launches = f"{evidence['launches'] / calls:.1f}" if evidence.get("launches") and calls else ""
        moved = f"{evidence['ideal_bytes'] / evidence['moved_bytes']:.2f}" if evidence.get("moved_bytes") else ""
        pairs = ", ".join(f"{r['expert_us']:.0f}/{r['eager_us']:.0f}" for r in rs)
        lines.append(
            f"| {t} | {pairs} | {speedup:.3f} | {f'{compiled:.2f}' if compiled else ''} | {launches} | {moved} |"
        )
    print(
        "| category | tasks | median | geometric mean | slower than eager | median against torch.compile | slower than it |"
    )
    print("|---|---|---|---|---|---|---|")
    for category, members in by.items():
        speedups = [s for s, _, _ in members]
        against = [c for _, c, _ in members if c]
        slow = [t.split("/")[1] for s, _, t in members if s < 1]
        print(f"| {category} | {len(members)} | {statistics.median(speedups):.2f} | {gmean(speedups):.2f} "
              f"| {len(slow)}{': ' if slow else ''}{', '.join(slow)} "
              f"| {statistics.median(against):.2f} of {len(against)} | {sum(c < 1 for c in against)} |")  # fmt: skip
    print(
        "\n| task | us, expert/eager per size | speedup | against torch.compile | launches a call | ideal / moved bytes |"
    )
    print("|---|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
