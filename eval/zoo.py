"""Grades every attack and every honest oddity of the zoo.

    python eval/zoo.py [--backend cpu|cuda] [--only GLOB] [--naive] [--layers [NAME ...]] [--json FILE]
    python eval/zoo.py --table RESULT.json... > docs/zoo.md

Prints, for each family, how many attacks succeed (none should) and how many honest kernels are rejected (none should
be). ``--naive`` also runs each attack against the naive grader of ``tests/zoo/naive.py``, which shows the reward of the
attack elsewhere. ``--layers`` leaves out one layer of defence after the other, and lists the attacks that then pass.
``--table`` writes docs/zoo.md from saved results.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from kbx_env.errors import KbxError, UsageError
from kbx_env.executor.direct import retrying
from kbx_env.grading.ablations import DefenceLayer
from kbx_env.grading.grader import Grader
from kbx_env.options import resolve_backend
from kbx_env.outcome import Outcome

ZOO = Path(__file__).resolve().parent.parent / "tests" / "zoo"
FIELDS = ("task", "tries", "shows", "family", "backend", "harm", "worth", "open")
"""Fields in the first comment lines of a file."""
NAIVE = "naive grader"
"""In the place of a layer: grade with the naive grader."""
CUDA_LAYERS = (DefenceLayer.PROOF, DefenceLayer.ABLATION)
"""Layers of CUDA gradings only."""


@dataclass(frozen=True)
class Specimen:
    """One file of the zoo, as its first comment lines describe it.

    Attributes:
        path: the file.
        honest: whether it must be judged correct.
        task: the task it is graded as.
        family: kind of attack, or of oddity.
        backend: ``any``, or ``cuda`` if it needs a GPU.
        harm: aim of an attack that does not aim at a verdict.
        text: what it tries or shows.
        worth: for attacks on the clock, which are timed: the largest speedup over eager that its kernel may be given.
        open: for attacks that the CPU tier cannot tell and a GPU does: the reason.
    """

    path: Path
    honest: bool
    task: str
    family: str
    backend: str
    harm: str
    text: str
    worth: float | None = None
    open: str = ""

    @property
    def name(self) -> str:
        """File name without ending."""
        return self.path.stem


def specimen(path: Path) -> Specimen:
    """Read the head of a file of the zoo.

    Args:
        path: the file.

    Returns:
        Its description.

    Raises:
        ValueError: a line is missing.
    """
    found: dict[str, str] = {}
    for line in path.read_text().splitlines()[:8]:
        m = re.match(r"#.*?\b(" + "|".join(FIELDS) + r"):\s*(.*)", line)
        if m:
            found.setdefault(m.group(1), m.group(2).strip())
    honest = path.parent.name == "honest"
    text = found.get("shows" if honest else "tries", "")
    if not (found.get("task") and found.get("family") and text):
        raise ValueError(
            f"{path}: the first lines must be '# task:', '# family:' and '# {'shows' if honest else 'tries'}:'"
        )
    backend, harm = found.get("backend", "any"), found.get("harm", "")
    worth = float(found["worth"]) if "worth" in found else None
    return Specimen(path, honest, found["task"], found["family"], backend, harm, text, worth, found.get("open", ""))


def specimens(pattern: str = "*", honest: bool | None = None) -> list[Specimen]:
    """Return the zoo, sorted by family.

    Args:
        pattern: glob over file names without ending.
        honest: honest kernels only, attacks only, or ``None`` for both.

    Returns:
        The specimens.

    Raises:
        UsageError: kbx_env is no clone.
    """
    if not ZOO.is_dir():
        raise UsageError(f"no folder {ZOO}: the zoo belongs to the tests, which are not installed; run this from a clone")
    files = sorted(ZOO.glob("exploits/*.py")) + sorted(ZOO.glob("honest/*.py"))
    found = [specimen(p) for p in files if fnmatch.fnmatch(p.stem, pattern)]
    return sorted((s for s in found if honest in (None, s.honest)), key=lambda s: (s.honest, s.family, s.name))


def naive(s: Specimen, device: str = "cpu") -> float | None:
    """Grade with the naive grader.

    Args:
        s: the specimen.
        device: ``cpu`` or ``cuda``.

    Returns:
        Its reward; ``None`` if it crashes or hangs.
    """
    command = [sys.executable, str(ZOO / "naive.py"), s.task, str(s.path), device]
    # Some attacks write files into the current folder.
    with tempfile.TemporaryDirectory(prefix="kbx-naive-") as folder:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=folder, env=_with_us())
            return float(json.loads(done.stdout.strip().splitlines()[-1])["reward"])
        except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
            return None


def _with_us() -> dict[str, str]:
    """Return the environment variables with which this project is found from any folder."""
    root = str(Path(__file__).resolve().parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


def graded(grader: Grader, s: Specimen, backend: str, wall: float | None = None) -> Outcome:
    """Grade a specimen with the default options.

    Args:
        grader: the grader.
        s: the specimen.
        backend: ``cpu`` or ``cuda``.
        wall: limit in seconds; by default 30 for honest kernels and attacks on the clock, 10 for others, because some
            wait for it.

    Returns:
        The grading.
    """
    timing = s.worth is not None and backend == "cuda"
    return retrying(grader.grade)(
        s.task,
        s.path.read_bytes(),
        backend=backend,
        targets=(),
        timing=timing,
        wall=wall or (30.0 if s.honest or timing else 10.0),
    )


def paid(s: Specimen, outcome: Outcome) -> bool:
    """Return whether a specimen reached its aim.

    Args:
        s: the specimen.
        outcome: its grading.

    Returns:
        Whether it is judged correct; for an attack on the clock also with a speedup that it does not have.
    """
    if not outcome.correct or s.worth is None or outcome.timing is None:
        return outcome.correct
    return outcome.timing.speedup > s.worth


def row(s: Specimen, outcome: Outcome) -> dict[str, Any]:
    """Return one grading as a row of the result.

    Args:
        s: the specimen.
        outcome: its grading.

    Returns:
        Plain JSON types.
    """
    return {
        "name": s.name, "family": s.family, "honest": s.honest, "task": s.task, "verdict": str(outcome.verdict),
        "stage": str(outcome.stage), "paid": paid(s, outcome), "message": outcome.message[:300],
        "rules": sorted({v.rule for v in outcome.violations}), "tries": s.text,
        "seconds": outcome.seconds.get("total"),
        "speedup": outcome.timing.speedup if outcome.timing else None, "open": s.open,
    }  # fmt: skip


_graders: dict[str, Grader] = {}


def _work(job: tuple[Specimen, str, str]) -> dict[str, Any]:
    """Grade one specimen, or run the naive grader, in a worker process that keeps its graders."""
    s, backend, layer = job
    if layer == NAIVE:
        return {"naive": naive(s, backend)}
    if layer not in _graders:
        _graders[layer] = Grader(without=[layer] if layer else ())
    return row(s, graded(_graders[layer], s, backend))


def _all(pool: Executor, chosen: Sequence[Specimen], backend: str, layer: str, what: str) -> list[dict[str, Any]]:
    work = pool.map(_work, [(s, backend, layer) for s in chosen])
    return list(track(work, what, len(chosen)))


def table(rows: Sequence[dict[str, Any]], backend: str) -> str:
    """Return Markdown tables of recall and false rejections by family, and of each attack.

    Args:
        rows: of the result.
        backend: of the result.

    Returns:
        Markdown.
    """
    lines = [
        f"## Attacks ({backend})\n",
        "| family | attacks | tasks | paid | naive reward | ended by |",
        "|---|---|---|---|---|---|",
    ]
    attacks = [r for r in rows if not r["honest"]]
    for family in sorted({r["family"] for r in attacks}):
        members = [r for r in attacks if r["family"] == family]
        ended = sorted({x for r in members for x in (r["rules"] or [r["verdict"]])})
        earned = [r["naive"] for r in members if r.get("naive") is not None]
        top = f"{min(earned):.2f} to {max(earned):.2f}" if earned else ""
        paid = sum(r["paid"] for r in members)
        lines.append(
            f"| {family} | {len(members)} | {len({r['task'] for r in members})} | {paid} | {top} | {', '.join(ended)} |"
        )
    lines += [
        f"| **all** | {len(attacks)} | {len({r['task'] for r in attacks})} | {sum(r['paid'] for r in attacks)} | | |\n",
        f"## Honest oddities ({backend})\n", "| family | kernels | rejected |", "|---|---|---|",
    ]  # fmt: skip
    fair = [r for r in rows if r["honest"]]
    for family in sorted({r["family"] for r in fair}):
        members = [r for r in fair if r["family"] == family]
        lines.append(f"| {family} | {len(members)} | {sum(not r['paid'] for r in members)} |")
    lines.append(f"| **all** | {len(fair)} | {sum(not r['paid'] for r in fair)} |\n")
    for r in attacks:
        if r["paid"] and r.get("open") and backend == "cpu":
            lines.append(f"Known to pass on the CPU tier: **{r['name']}**.\n" + textwrap.fill(f"Reason: {r['open']}.", 120) + "\n")
    lines += ["## Each attack\n", "| attack | task | tries | naive | ended by |", "|---|---|---|---|---|"]
    for r in attacks:
        earns = "" if r.get("naive") is None else f"{r['naive']:.2f}"
        why = ", ".join(r["rules"]) or r["verdict"]
        lines.append(f"| {r['name']} | {r['task']} | {r['tries']} | {earns} | {why} |")
    return "\n".join(lines) + "\n"


def page(results: Sequence[dict[str, Any]]) -> str:
    """Return docs/zoo.md: the tables of each result, and the attacks that each layer of defence holds back alone."""
    parts = ["# The zoo\n", "Written by `python eval/zoo.py`. An attack that passes without a layer is held back by that layer "
             "alone.\n"]  # fmt: skip
    for r in results:
        parts.append(f"Graded on {r['device']}, {r['date']}.\n")
        parts.append(table(r["rows"], r["backend"]))
        if r.get("without"):
            parts += [f"## Without a layer ({r['backend']})\n", "| left out | attacks that pass | |", "|---|---|---|"]
            parts += [f"| {layer} | {len(names)} | {', '.join(names)} |" for layer, names in r["without"].items()]
            parts.append("")
    return "\n".join(parts)


def _device(backend: str) -> str:
    import torch
    import triton

    device = torch.cuda.get_device_name(0) if backend == "cuda" else "the CPU tier"
    return f"{device} (torch {torch.__version__}, triton {triton.__version__})"


def main(argv: Sequence[str] | None = None) -> int:
    """Grade the zoo; return exit status 1 if an attack succeeded or an honest kernel was rejected."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--backend", default="cpu", choices=("cpu", "cuda"))
    p.add_argument("--only", default="*", metavar="GLOB", help="names of files, without ending")
    p.add_argument("--naive", action="store_true")
    p.add_argument("--layers", nargs="*", metavar="NAME", help="leave out these layers, one at a time; default: all")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--json", type=Path)
    p.add_argument("--table", nargs="+", type=Path, metavar="RESULT", help="print the page of saved results")
    a = p.parse_args(argv)
    if a.table:
        print(page([json.loads(f.read_text()) for f in a.table]))
        return 0
    try:
        backend = resolve_backend(a.backend)
        chosen = [s for s in specimens(a.only) if backend == "cuda" or s.backend != "cuda"]
    except (KbxError, ValueError) as e:
        print(f"zoo: {e}", file=sys.stderr)
        return 2
    if not chosen:
        print(f"zoo: no file matches {a.only!r}; see {ZOO}", file=sys.stderr)
        return 2
    attacks = [x for x in chosen if not x.honest]
    result: dict[str, Any] = {"backend": backend, "device": _device(backend), "date": time.strftime("%Y-%m-%d")}
    # Set before torch starts in a worker: workers with a thread for every core keep each other from working.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // a.workers)))
    with ProcessPoolExecutor(a.workers, multiprocessing.get_context("spawn")) as pool:
        rows = result["rows"] = _all(pool, chosen, backend, "", "grading")
        if a.naive:
            for r, n in zip(
                [r for r in rows if not r["honest"]], _all(pool, attacks, backend, NAIVE, "naive"), strict=True
            ):
                r |= n
        if a.layers is not None:
            layers = a.layers or [d.value for d in DefenceLayer if backend == "cuda" or d not in CUDA_LAYERS]
            result["without"] = {}
            for layer in layers:
                got = _all(pool, attacks, backend, layer, f"without {layer}")
                # An attack that passes all layers does not count against one.
                through = {r["name"] for r in rows if r["paid"]}
                result["without"][layer] = [r["name"] for r in got if r["paid"] and r["name"] not in through]
                print(f"without {layer}: {len(result['without'][layer])} pass", flush=True)
    known = [r for r in rows if r["paid"] and r["open"] and backend == "cpu"]
    wrong = [r for r in rows if r["paid"] != r["honest"] and r not in known]
    for r in known:
        print(f"known to pass here: {r['name']} ({r['task']}): {r['open']}")
    for r in wrong:
        print(f"{'REJECTED' if r['honest'] else 'PAID'} {r['name']} ({r['task']}): {r['verdict']} {r['message']}")
    attacks_count = sum(not r["honest"] for r in rows)
    print(f"{attacks_count} attacks, {sum(r['paid'] and not r['honest'] for r in rows)} paid; "
          f"{len(rows) - attacks_count} honest, {sum(r['honest'] and not r['paid'] for r in rows)} rejected")  # fmt: skip
    if a.json:
        a.json.write_text(json.dumps(result, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
