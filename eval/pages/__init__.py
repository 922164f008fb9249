"""Writes a report: JSON, Markdown, one self-contained HTML page, figures, tables, and a page for each task."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kbx_env.eval import report_data as studies
from kbx_env.eval.pages.context import ANSWERS
from kbx_env.eval.pages.document import Material, document
from kbx_env.eval.pages.render import render

from kbx_env.errors import UsageError

FILES = "report.files.json"
"""Lists the files that a report wrote into subfolders, for ``--overwrite``."""
PAIRS = 6
"""The most comparisons of two policies: all pairs of up to four policies; of more policies, each with the first."""


def import_ahead() -> threading.Thread:
    """Import in the background what ``write`` needs: two to five seconds, for which a run of gradings need not wait at its end.

    Returns:
        The thread.
    """

    def work() -> None:
        for name in ("kbx_env.eval.task_pages", "matplotlib.backends.backend_agg", "matplotlib.patches", "statsmodels.api"):
            with contextlib.suppress(ImportError):  # ``write`` says what is not installed
                importlib.import_module(name)

    thread = threading.Thread(target=work, name="imports of the report", daemon=True)
    thread.start()
    return thread


def write(
    out: Path, reports: Sequence[Mapping[str, Any]], *, compare: Sequence[studies.Study] = (), store: Path | None = None,
    step: Callable[[str], None] = lambda part: None,
) -> None:  # fmt: skip
    """Write a report; each file is replaced as a whole.

    Args:
        out: the folder.
        reports: JSON of each policy of this run.
        compare: earlier runs to show as well, read from their folders.
        store: the run's gradings, for the sources on the tasks' pages.
        step: called with the name of each part before it is written.
    """
    step("report.json")
    _replace(out / "report.json", _json(reports))
    own = studies.from_reports(reports)
    study = studies.joined([own, *compare])
    missing: list[str] = []
    step("tables")
    _optional(missing, lambda: _tables(own, out))
    step("figures")
    figures = _optional(missing, lambda: _figures(study, out)) or {}
    files = [f"figures/{name}{end}" for name in figures for end in (".png", ".svg")]
    step("statistics")
    analysis = _optional(missing, lambda: _analysis(study))
    step("task pages")
    pages = _task_pages(own, store, out)
    kernels = _kernels(own, out)
    material = Material(
        study, {p.name: r["beside"] for p, r in zip(own.policies, reports) if "beside" in r}, figures, pages, kernels, analysis,
        _pairs(study), _portability(own), tuple(missing),
    )  # fmt: skip
    files += [f"sources/{Path(p).stem}/{s.name}" for p in pages.values() for s in _in(out / "sources" / Path(p).stem)]
    files += pages.values()
    _replace(out / FILES, [json.dumps(sorted(files), indent=0)])
    step("report.html")
    blocks = document(material)
    title = " · ".join(p.name for p in study.policies)
    _replace(out / "report.md", [render("report.md.j2", blocks=blocks)])
    _replace(out / "report.html", [render("report.html.j2", blocks=blocks, title=title[:200])])


def remove(out: Path) -> None:
    """Remove the files that an earlier report left in subfolders, and folders that are then empty.

    Only files on the earlier report's list are removed: the folder may contain other files of the user.

    Args:
        out: the folder of the report.
    """
    try:
        listed = json.loads((out / FILES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    parents = set()
    for name in listed if isinstance(listed, list) else ():
        path = out / str(name)
        if ".." not in path.parts and path.resolve().is_relative_to(out.resolve()):
            path.unlink(missing_ok=True)
            parents |= {path.parent, path.parent.parent} - {out, out.parent}
    for folder in sorted(parents, key=lambda p: -len(p.parts)):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    (out / FILES).unlink()


def _in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _optional(missing: list[str], make: Callable[[], Any]) -> Any:
    try:
        return make()
    except UsageError as e:  # a package of the extra "report" is not installed
        missing.append(str(e))
        return None


def _json(reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the text of ``report.json``, with one answer a line.

    The keys of the first policy are at the top. With several policies, all are under ``policies``, and answers are
    there only. Not a single ``json.dumps``: it has no layout with one row a line, and the text of a large run does not
    fit into memory twice.
    """
    if len(reports) == 1:
        yield from _object(reports[0])
        return
    head = {k: v for k, v in reports[0].items() if k != "tasks"}
    yield json.dumps(head, indent=1, allow_nan=False)[:-2] + ',\n "policies": [\n'
    for i, r in enumerate(reports):
        yield from _object(r)
        yield ",\n" if i + 1 < len(reports) else "\n]}\n"


def _object(r: Mapping[str, Any]) -> Iterator[str]:
    head = {k: v for k, v in r.items() if k != "tasks"}
    yield json.dumps(head, indent=1, allow_nan=False)[:-2] + ',\n "tasks": ['
    for i, row in enumerate(r["tasks"]):
        yield ("\n" if i == 0 else ",\n") + json.dumps(row, allow_nan=False)
    yield "\n]}"


def _replace(path: Path, pieces: Sequence[str] | Iterator[str]) -> None:
    new = path.with_name(f"{path.name}.new")
    with new.open("w", encoding="utf-8", errors="backslashreplace") as f:
        f.writelines(pieces)
    new.replace(path)


def _tables(study: studies.Study, out: Path) -> None:
    from kbx_env.eval.tables import write_tables

    write_tables(study, out)


def _figures(study: studies.Study, out: Path) -> dict[str, tuple[str, str]]:
    from kbx_env.eval import plots

    made = plots.figures(study)
    plots.save(made, out / "figures")
    # HTML needs no namespace for SVG.
    bare = {name: re.sub(r' xmlns(?::\w+)?="[^"]*"', "", plots.inline_svg(figure)) for name, figure in made.items()}
    return {name: (svg, plots.CAPTIONS[name]) for name, svg in bare.items()}


def _analysis(study: studies.Study) -> Any:
    from kbx_env.eval import models

    return models.analyse(models.answers(study))


def _pairs(study: studies.Study) -> list[Any]:
    from kbx_env.eval import models

    few = len(study.policies) <= 4
    pairs = itertools.combinations(study.policies, 2) if few else ((study.policies[0], p) for p in study.policies[1:])
    return [c for a, b in itertools.islice(pairs, PAIRS) if (c := models.paired(a, b)).tasks]


def _task_pages(study: studies.Study, store: Path | None, out: Path) -> Mapping[str, str]:
    from kbx_env.eval.task_pages import write_task_pages

    return write_task_pages(study, store, out)


def _kernels(study: studies.Study, out: Path) -> dict[tuple[str, str, int], str]:
    from kbx_env.eval.task_pages import source_file

    found = ((p.name, r.task, r.sample) for p in study.policies for r in p.rows[:ANSWERS])
    return {key: file for key in found if (out / (file := source_file(*key))).is_file()}


def _portability(study: studies.Study) -> Sequence[Any]:
    from kbx_env.eval.portability import portability

    return portability(study)
