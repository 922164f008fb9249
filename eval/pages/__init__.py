"""Writes a report as JSON, Markdown and one self-contained HTML page."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any


def percent(value: float | None) -> str:
    """A rate for people; missing is said, never 0."""
    return "not measured" if value is None else f"{100 * value:.1f} %"


def times(value: float | None) -> str:
    """A speedup for people."""
    return "not measured" if value is None else f"{value:.3f}x"


def reason(row: Mapping[str, Any]) -> str:
    """Why a task was not solved, in one line."""
    return "" if row["correct"] else str(row["message"]).split("\n")[0][:160]


def write(out: Path, reports: Sequence[Mapping[str, Any]]) -> None:
    """``report.json`` (the first policy's keys on top, all under ``policies``), ``report.md``, ``report.html``."""
    whole = {**reports[0], "policies": list(reports)} if len(reports) > 1 else dict(reports[0])
    template = Template((Path(__file__).parent / "report.html").read_text(encoding="utf-8"))
    body = "\n".join(map(_section, reports))
    texts = {
        "report.json": json.dumps(whole, indent=1, allow_nan=False),
        "report.md": "\n\n".join(map(_markdown, reports)) + "\n",
        "report.html": template.substitute(body=body, manifest=_manifest(reports[0]["manifest"])),
    }
    for name, text in texts.items():
        (out / f"{name}.new").write_text(text, encoding="utf-8", errors="backslashreplace")
    for name in texts:
        (out / f"{name}.new").replace(out / name)


def _manifest(manifest: Mapping[str, Any]) -> str:
    keys = ("device", "backend", "torch", "triton", "grading", "task_split", "seed_policy")
    return html.escape(" · ".join(f"{k.replace('_', ' ')}: {manifest[k]}" for k in keys if k in manifest))


def _label(row: Mapping[str, Any]) -> str:
    return row["task"] + (f" #{row['sample'] + 1}" if row.get("sample") else "")


def _ratio(row: Mapping[str, Any]) -> float | None:
    e = row.get("evidence") or {}
    if not row["correct"] or not e.get("moved_bytes") or not e.get("ideal_bytes"):
        return None  # a wrong kernel moves too little for free
    return e["moved_bytes"] / e["ideal_bytes"]


def _size(value: int | None) -> str:
    if value is None:
        return "–"
    size, units = float(value), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _markdown(r: Mapping[str, Any]) -> str:
    s = r["summary"]
    lines = [
        f"# {r['policy']}", "", html.unescape(_manifest(r["manifest"])), "",
        f"- gradings: {s['n']} over {s['tasks']} tasks" + (f" (and {s['infra_faults']} not judged)" if s["infra_faults"] else ""),
        f"- compiles: {percent(s['compile_rate'])}", f"- correct: {percent(s['correct_rate'])}",
        f"- tasks solved at least once: {percent(s['solved_rate'])}",
        f"- faster than eager: {percent(s['faster_than_eager_rate'])}",
        f"- geometric mean speedup of correct kernels: {times(s['geomean_speedup'])}", "",
        "| task | verdict | cases | moved / ideal bytes | launches | speedup | reason |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in r["tasks"]:
        c, e, ratio = row["cases"], row.get("evidence") or {}, _ratio(row)
        cells = [
            _label(row), row["verdict"], f"{c['passed']}/{c['total']}" if c else "-",
            "-" if ratio is None else f"{ratio:.2f}", str(e.get("launches", "-")),
            "-" if row["speedup"] is None else times(row["speedup"]), reason(row).replace("|", "\\|"),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _bar(parts: Sequence[tuple[str, int]]) -> str:
    """One row of a stacked bar as SVG; widths are shares of the gradings of the category."""
    total, x, rects = sum(k for _, k in parts), 0.0, []
    for name, k in parts:
        width = 100 * k / total if total else 0
        rects.append(f'<rect class="{name}" x="{x:.2f}%" width="{width:.2f}%" height="100%"/>')
        x += width
    said = ", ".join(f"{k} {name}" for name, k in parts if k)
    return f'<svg class="bar" role="img" aria-label="{said}"><title>{said}</title>{"".join(rects)}</svg>'


def _category(name: str, s: Mapping[str, Any]) -> str:
    correct, unknown = s["verdicts"].get("correct", 0), s["infra_faults"]
    bar = _bar([("good", correct), ("bad", s["n"] - correct), ("unknown", unknown)])
    return (
        f"<tr><th scope=row>{html.escape(name)}</th><td>{bar}</td><td class=num>{correct} of {s['n']}</td>"
        f"<td class=num>{times(s['geomean_speedup']) if s['geomean_speedup'] is not None else '–'}</td></tr>"
    )


def _section(r: Mapping[str, Any]) -> str:
    s = r["summary"]
    cards = [
        ("gradings", str(s["n"])), ("compiles", percent(s["compile_rate"])), ("correct", percent(s["correct_rate"])),
        ("faster than eager", percent(s["faster_than_eager_rate"])), ("geomean speedup", times(s["geomean_speedup"])),
    ]  # fmt: skip
    if s["infra_faults"]:
        cards.insert(1, ("not judged", str(s["infra_faults"])))
    shown = "".join(f"<div><b>{v}</b><small>{k}</small></div>" for k, v in cards)
    categories = "".join(_category(c, v) for c, v in r["by_category"].items())
    rows = "".join(map(_row, r["tasks"]))
    return f"""<section><h2>{html.escape(r["policy"])}</h2><div class="cards">{shown}</div>
<details open><summary>Correct by category</summary><div class="wide"><table class="categories">
<tr><th>category</th><th></th><th class=num>correct</th><th class=num>speedup</th></tr>{categories}</table></div></details>
<details open><summary>Every grading</summary><div class="wide"><table>
<tr><th>task</th><th>verdict</th><th class=num>cases</th><th class=num title="bytes that the launches moved">moved</th>
<th class=num title="bytes that any kernel must move">ideal</th><th class=num>ratio</th><th class=num>launches</th>
<th class=num>speedup</th><th class=num>seconds</th><th>reason</th></tr>{rows}</table></div></details></section>"""


def _row(row: Mapping[str, Any]) -> str:
    c, e, t, ratio = row["cases"], row.get("evidence") or {}, row["timing"], _ratio(row)
    speed = f"{t['speedup']:.3f}x <small>{t['low']:.3f} to {t['high']:.3f}</small>" if t else "–"
    seconds = row["seconds"].get("total")
    numbers = [
        f"{c['passed']}/{c['total']}" if c else "–", _size(e.get("moved_bytes")), _size(e.get("ideal_bytes")),
        "–" if ratio is None else f"{ratio:.2f}", str(e.get("launches", "–")), speed,
        "–" if seconds is None else f"{seconds:.2f}",
    ]  # fmt: skip
    verdict = f'<span class="v {row["verdict"]}">{row["verdict"].replace("_", " ")}</span>'
    return (
        f"<tr><td>{html.escape(_label(row))}</td><td>{verdict}</td>" + "".join(f"<td class=num>{x}</td>" for x in numbers)
        + f"<td class=why>{html.escape(reason(row))}</td></tr>"
    )  # fmt: skip
