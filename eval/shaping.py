"""Compares the rewards of the shaped presets with those of ``default``.

    python eval/shaping.py [--replays FILE.jsonl ...] [--category fusion|quantization] [--json FILE]

Grades replayed answers, broken copies of our own kernels, and the zoo on the CPU backend. Prints, for each source of
answers, the number of distinct rewards of failing answers, and every attack to which a shaped preset gives more reward
than ``default`` (there should be none), with its verdict. Exit status 1 if there is one, or if a wrong kernel gets as
much reward as a right one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kbx_env.baselines.replay import source_of
from kbx_env.eval.zoo import specimens
from kbx_env.rewards.compose import load_preset
from rich.progress import track

from kbx_env import jsonl
from kbx_env.executor.direct import retrying
from kbx_env.grading.grader import Grader
from kbx_env.outcome import Verdict
from kbx_env.spec.catalog import expert_source, task_ids

CATEGORIES = ("fusion", "quantization")
BREAKS: tuple[tuple[str, str, str], ...] = (
    ("truncates", "((tl.div_rn(v, scale) + 12582912.0) - 12582912.0)", "tl.div_rn(v, scale)"),
    ("rounds up", "(v * inverse + 12582912.0)", "(v * inverse + 12582912.5)"),
    ("top of 128", "127.0, tl.float32)", "128.0, tl.float32)"),
    ("no scales", "acc.to(tl.float32) * left[:, None] * right[None, :]", "acc.to(tl.float32)"),
    ("one scale of two", "* left[:, None] * right[None, :]", "* left[:, None]"),
    ("halves swapped", "(low & 15) | (high << 4)", "(high & 15) | (low << 4)"),
    ("float product", "tl.dot(x, w, acc, out_dtype=tl.int32)", "acc + tl.dot(x.to(tl.float32), w.to(tl.float32)).to(tl.int32)"),
    ("small results zero", "return y\n", "return y if y.numel() > 64 or y.numel() < 1 else torch.zeros_like(y)\n"),
    ("first block only", "tl.program_id(0)", "0 * tl.program_id(0)"),
    ("no mask on loads", "other=0.0", "other=1.0"),
    ("max for sum", "tl.sum(", "tl.max("),
    ("strict bound", " < N", " < N - 1"),
)
"""(name, what is replaced, by what): faults that an honest writer may make."""


def answers(replays: Sequence[Path], categories: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the answers to grade.

    Args:
        replays: files of recorded answers.
        categories: of tasks.

    Yields:
        (source of the answer, its name, task, text).
    """
    for path in replays:
        for i, row in enumerate(jsonl.read(path)):
            if row["task"].split("/")[0] in categories:
                yield path.stem, f"{row['task']} {i}", row["task"], source_of(row)
    for task in task_ids():
        if task.split("/")[0] in categories:
            text = expert_source(task) or ""
            yield "experts", task, task, text
            for name, old, new in BREAKS:
                if old in text:
                    yield "broken experts", f"{task}, {name}", task, text.replace(old, new)
    for s in specimens():
        if s.task.split("/")[0] in categories and s.backend != "cuda":
            yield "honest oddities" if s.honest else "attacks", s.name, s.task, s.path.read_text()


def row(grader: Grader, group: str, name: str, task: str, text: str) -> dict[str, Any]:
    """Grade one answer, and compute its reward under both presets.

    Args:
        grader: the grader.
        group: source of the answer.
        name: of the answer.
        task: the task.
        text: source code.

    Returns:
        The row of the result.
    """
    outcome = retrying(grader.grade)(task, text, backend="cpu", targets=(), wall=15.0)
    default, shaped = load_preset("default"), load_preset(task.split("/")[0])
    return {
        "group": group, "name": name, "task": task, "verdict": str(outcome.verdict), "default": default(outcome),
        "shaped": shaped(outcome), "terms": {t.name: t(outcome) for t in shaped.hints}, "message": outcome.message[:200],
        "recognised": outcome.verdict is Verdict.REJECTED or bool(outcome.violations),
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a text table of the levels of reward among failing answers, by category and group."""
    lines = ["| category | answers | failing | masked | levels, default | levels, shaped | paid more | most more | highest wrong |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for category in CATEGORIES:
        for group in dict.fromkeys(r["group"] for r in rows):
            members = [r for r in rows if r["group"] == group and r["task"].startswith(category)]
            wrong = [r for r in members if r["default"] is not None and r["verdict"] != "correct"]
            masked = sum(r["default"] is None for r in members)
            if not members:
                continue
            levels = [len({round(r[k], 4) for r in wrong}) for k in ("default", "shaped")]
            more = [r["shaped"] - r["default"] for r in wrong if r["shaped"] > r["default"]]
            top = max((r["shaped"] for r in wrong), default=0.0)
            lines.append(
                f"| {category} | {len(members)} {group} | {len(wrong)} | {masked} | {levels[0]} | {levels[1]} | {len(more)} "
                f"| {max(more, default=0.0):.3f} | {top:.3f} |"
            )
    return "\n".join(lines)


def misjudged(rows: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return (reason, row) of each answer to which a shaped preset gives the wrong reward."""
    right = min((r["shaped"] for r in rows if r["verdict"] == "correct"), default=1.0)
    found = list[tuple[str, dict[str, Any]]]()
    for r in rows:
        if r["verdict"] != "correct" and (r["shaped"] or 0.0) >= right:
            found.append(("as much as a right kernel", r))
        elif r["group"] == "attacks" and (r["shaped"] or 0.0) > (r["default"] or 0.0):
            found.append(("recognised, and paid more" if r["recognised"] else "not recognised, and paid more", r))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Grade and compare, as the top of this file describes; return the exit status."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--replays", nargs="*", type=Path, default=[])
    p.add_argument("--category", choices=CATEGORIES)
    p.add_argument("--json", type=Path)
    a = p.parse_args(argv)
    chosen = list(answers(a.replays, (a.category,) if a.category else CATEGORIES))
    grader = Grader()
    rows = [row(grader, *one) for one in track(chosen, "grading")]
    grader.close()
    print(table(rows))
    bad = misjudged(rows)
    for reason, r in bad:
        print(f"PAID {r['name']} ({r['task']}): {r['verdict']} {r['default']} -> {r['shaped']}, {reason}")
    if a.json:
        a.json.write_text(json.dumps(rows, indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
