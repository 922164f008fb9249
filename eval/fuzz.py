"""Feeds random and mutated sources to the grader: it must give each a verdict with a reason, and never fail.

    python eval/fuzz.py [--count N] [--workers N] [--seed N] [--wall SECONDS] [--json FILE]

Sources are mutations of the experts and of the zoo (lines and tokens deleted, doubled, swapped; constants changed;
functions of two files put together; stray Unicode; the text cut off), and random sequences of tokens. Each source
depends on seed and number alone. ``FILE`` gets one JSON object a line; an interrupted run goes on where its file ends.
Exit status 1 if the grader failed, or gave a verdict without a reason.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from rich.progress import Progress

from kbx_env import jsonl
from kbx_env.executor import Executor, ProcessPool, Request
from kbx_env.outcome import Fault, FaultKind, Outcome
from kbx_env.spec.catalog import expert_source, load_task, task_ids

ZOO = Path(__file__).resolve().parent.parent / "tests" / "zoo"
NUMBERS = "0 1 -1 2 3 7 16 64 1024 65536 1048577 2147483648 -9223372036854775808 1e308 1e-45 0.5 True None".split()
STRAY = "\x00\x0b\x0c\ufeff\u202e\u2028\ud800\u0660\u00aa\U0001f4a3\u1d00\u017f\r\x85\u3000"
WORDS = """
def return if else for while in lambda class yield import from try except with as raise del global assert async await match
case pass break continue is not and or None True False self x y n pid offs mask input out N BLOCK @triton.jit tl torch triton
tl.load tl.store tl.arange tl.program_id tl.constexpr tl.sum tl.dot tl.where tl.zeros torch.empty_like torch.empty grid [ ] (
) { } : ; , . = == += -> + - * ** / // % @ & | ^ ~ << >> < > 0 1 2 128 1e9 0x7fffffff 'a' "b" f'{x}' \n \n \n\x20\x20\x20\x20 \t
""".split()  # fmt: skip


@cache
def seeds() -> tuple[tuple[str, str], ...]:
    """Return (task, text) of every expert and of every file of the zoo."""
    found = [(task, text) for task in task_ids() if (text := expert_source(task))]
    for path in sorted(ZOO.glob("*/*.py")):
        text = path.read_text()
        head = re.search(r"^# task:\s*(\S+)", text, re.M)
        if head:
            found.append((head.group(1), text))
    return tuple(found)


def _tokens(text: str) -> list[tokenize.TokenInfo]:
    """Return a text's names, numbers, operators and strings of one line, up to the first token that cannot be read."""
    kinds = (tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING)
    found: list[tokenize.TokenInfo] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in kinds and token.start[0] == token.end[0]:
                found.append(token)
    except (tokenize.TokenError, SyntaxError, SystemError):  # SystemError: what Python 3.12 makes of null bytes
        pass
    return found


def _replace(text: str, at: tokenize.TokenInfo, new: str) -> str:
    lines = text.split("\n")
    if at.start[0] > len(lines):
        return text
    line = lines[at.start[0] - 1]
    lines[at.start[0] - 1] = line[: at.start[1]] + new + line[at.end[1] :]
    return "\n".join(lines)


def _lines(rng: random.Random, text: str) -> str:
    lines = text.split("\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(3):
        case 0:
            del lines[i]
        case 1:
            lines.insert(j, lines[i])
        case _:
            lines[i], lines[j] = lines[j], lines[i]
    return "\n".join(lines)


def _token(rng: random.Random, text: str) -> str:
    found = _tokens(text)
    if not found:
        return text
    a, b = rng.choice(found), rng.choice(found)
    match rng.randrange(3):
        case 0:
            return _replace(text, a, "")
        case 1:
            return _replace(text, a, f"{a.string} {a.string}")
        case _:
            return _replace(text, a, b.string)


def _constant(rng: random.Random, text: str) -> str:
    found = [t for t in _tokens(text) if t.type == tokenize.NUMBER]
    return _replace(text, rng.choice(found), rng.choice(NUMBERS)) if found else text


def _name(rng: random.Random, text: str) -> str:
    """Replace a name by another name of the text, which usually leaves a program."""
    found = [t for t in _tokens(text) if t.type == tokenize.NAME]
    return _replace(text, rng.choice(found), rng.choice(found).string) if found else text


def _splice(rng: random.Random, text: str) -> str:
    """Add a function of another file, before or after."""
    _, other = rng.choice(seeds())
    parts = re.split(r"(?m)^(?=@triton|def )", other)
    part = rng.choice(parts)
    return f"{part}\n{text}" if rng.random() < 0.3 else f"{text}\n{part}"


def _stray(rng: random.Random, text: str) -> str:
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        new = rng.choice(STRAY) if rng.random() < 0.7 else chr(rng.randrange(0x110000))
        text = text[:at] + new + text[at:]
    return text


def _cut(rng: random.Random, text: str) -> str:
    return text[: rng.randrange(len(text) + 1)]


def _deep(rng: random.Random, text: str) -> str:
    """Add a deeply nested expression: parsers and code that walks over the tree recurse over it."""
    n = rng.choice((50, 95, 150, 1000, 5000))
    a, b = rng.choice((("(", ")"), ("[", "]"), ("-", ""), ("not ", ""), ("lambda: ", ""), ("x.", "x"), ("1+", "")))
    return f"{text}\nz = {a * n}1{b * n}\n"


MUTATIONS: tuple[tuple[Callable[[random.Random, str], str], int], ...] = (
    (_lines, 5), (_token, 4), (_constant, 6), (_name, 6), (_splice, 3), (_stray, 1), (_cut, 1), (_deep, 1),
)  # fmt: skip


def soup(rng: random.Random, entry: str) -> str:
    """Return random tokens, half of the time as the body of a function.

    Args:
        rng: draws them.
        entry: name of the function.

    Returns:
        The source.
    """
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(0, 120))).replace("\\n", "\n").replace("\\x20", " ")
    if rng.random() < 0.5:
        body = "\n".join("    " + line.strip() for line in text.split("\n"))
        return f"import torch\nimport triton\nimport triton.language as tl\n\n\ndef {entry}(*args, **kwargs):\n{body}\n"
    return text


def source(seed: int, number: int) -> tuple[str, str, str]:
    """Return one source.

    Args:
        seed: of the run.
        number: of the source in the run.

    Returns:
        Task, text, and the names of the mutations, joined by ``+``.
    """
    rng = random.Random(f"{seed}:{number}")
    task, text = rng.choice(seeds())
    if rng.random() < 0.08:
        return task, soup(rng, load_task(task).entry), "soup"
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
        how = rng.choices([m for m, _ in MUTATIONS], [w for _, w in MUTATIONS])[0]
        text = how(rng, text)
        done.append(how.__name__.lstrip("_"))
    return task, text, "+".join(done)


def encoded(text: str) -> bytes:
    """Return a text as the bytes of a policy's file; lone surrogates become bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogatepass")


def problem(outcome: Outcome) -> str:
    """Return the kind of problem with a verdict: ``crash``, ``silent``, ``infra``, or empty for none."""
    if outcome.fault is Fault.INFRA:
        return "crash" if outcome.fault_kind in (FaultKind.GRADER_FAILED, FaultKind.WORKER_LOST) else "infra"
    if not outcome.correct and not outcome.message.strip():
        return "silent"
    return ""


def _row(number: int, task: str, how: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "number": number, "task": task, "how": how, "verdict": str(outcome.verdict), "stage": str(outcome.stage),
        "problem": problem(outcome), "message": outcome.message[:400], "seconds": outcome.seconds.get("total", 0.0),
    }  # fmt: skip


def _known(path: Path | None, seed: int) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    return [r for r in jsonl.read(path, skip_broken=True) if r.get("seed") == seed]  # a kill may have cut a line off


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return counts of the gradings, and every problem with its message."""
    return {
        "sources": len(rows), "verdicts": dict(Counter(r["verdict"] for r in rows).most_common()),
        "seconds_per_source": round(sum(r["seconds"] for r in rows) / max(1, len(rows)), 3),
        "slowest": max((r["seconds"] for r in rows), default=0.0),
        "problems": {k: sum(r["problem"] == k for r in rows) for k in ("crash", "silent", "infra")},
        "messages": dict(Counter(f"{r['problem']}: {r['message'][:160]}" for r in rows if r["problem"]).most_common(40)),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Grade, as the top of this file describes; return the exit status."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--count", type=int, default=10_000)
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--wall", type=float, default=3.0, help="seconds of wall time of one source")
    p.add_argument("--json", type=Path, metavar="FILE")
    p.add_argument("--show", type=int, metavar="NUMBER", help="print one source and end")
    a = p.parse_args(argv)
    if a.show is not None:
        task, text, how = source(a.seed, a.show)
        sys.stdout.buffer.write(f"# {task} {how}\n".encode() + encoded(text))
        return 0
    rows = _known(a.json, a.seed)
    known = {r["number"] for r in rows}
    options = {"backend": "cpu", "targets": [], "wall": a.wall}
    todo = (n for n in range(a.count) if n not in known)
    flight: dict[Future[Outcome], tuple[int, str, str]] = {}
    with Executor(ProcessPool(a.workers), attempts=1) as executor, Progress() as bar:
        line = bar.add_task("fuzzing", total=a.count, completed=len(known))

        def feed(count: int) -> None:
            """Submit the next sources, at most so many."""
            for n in islice(todo, count):
                task, text, how = source(a.seed, n)
                flight[executor.submit(Request(task, encoded(text), options))] = n, task, how

        feed(2 * a.workers)
        while flight:
            for job in wait(flight, return_when=FIRST_COMPLETED).done:
                n, task, how = flight.pop(job)
                row = _row(n, task, how, job.result()) | {"seed": a.seed}
                rows.append(row)
                if a.json:
                    jsonl.append(a.json, row)
                if row["problem"] in ("crash", "silent"):
                    bar.console.print(f"{row['problem']} {n} {task} {how}: {row['message']}", markup=False)
                bar.advance(line)
                feed(1)
    totals = summary([r for r in rows if r["number"] < a.count])
    print(json.dumps(totals, indent=1, ensure_ascii=False))
    return 1 if totals["problems"]["crash"] or totals["problems"]["silent"] else 0


if __name__ == "__main__":
    sys.exit(main())
