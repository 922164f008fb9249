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
    (out / "report.json").write_text(json.dumps(whole, indent=1, allow_nan=False))
    (out / "report.md").write_text("\n\n".join(map(_markdown, reports)) + "\n")
    template = Template((Path(__file__).parent / "report.html").read_text())
    body = "\n".join(map(_section, reports))
    (out / "report.html").write_text(template.substitute(body=body, manifest=_manifest(reports[0]["manifest"])))


def _manifest(manifest: Mapping[str, Any]) -> str:
    keys = ("device", "backend", "torch", "triton", "grading", "task_split", "seed_policy")
    return html.escape(" · ".join(f"{k.replace('_', ' ')}: {manifest[k]}" for k in keys if k in manifest))


def _traffic(row: Mapping[str, Any]) -> str:
    e = row.get("evidence") or {}
    if not e.get("moved_bytes") or not e.get("ideal_bytes") or not row["correct"]:
        return "-"
    return f"{e['moved_bytes'] / e['ideal_bytes']:.2f}"


def _markdown(r: Mapping[str, Any]) -> str:
    s = r["summary"]
    lines = [
        f"# {r['policy']}", "", _manifest(r["manifest"]), "",
        f"- tasks: {s['n']}" + (f" (and {s['infra_faults']} not judged)" if s["infra_faults"] else ""),
        f"- compiles: {percent(s['compile_rate'])}", f"- correct: {percent(s['correct_rate'])}",
        f"- faster than eager: {percent(s['faster_than_eager_rate'])}",
        f"- geometric mean speedup of correct kernels: {times(s['geomean_speedup'])}", "",
        "| task | verdict | cases | moved / ideal bytes | speedup | reason |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in r["tasks"]:
        c = row["cases"]
        cases = f"{c['passed']}/{c['total']}" if c else "-"
        why = reason(row).replace("|", "\\|")
        speed = times(row["speedup"]) if row["speedup"] is not None else "-"
        lines.append(f"| {row['task']} | {row['verdict']} | {cases} | {_traffic(row)} | {speed} | {why} |")
    return "\n".join(lines)


def _bar(rate: float | None) -> str:
    width = 0 if rate is None else 100 * rate
    return f'<span class="bar"><span style="width:{width:.0f}%"></span></span>'


def _section(r: Mapping[str, Any]) -> str:
    s = r["summary"]
    cards = [
        ("tasks", str(s["n"])), ("compiles", percent(s["compile_rate"])), ("correct", percent(s["correct_rate"])),
        ("faster than eager", percent(s["faster_than_eager_rate"])), ("geomean speedup", times(s["geomean_speedup"])),
    ]  # fmt: skip
    shown = "".join(f"<div><b>{v}</b><small>{k}</small></div>" for k, v in cards)
    categories = "".join(
        f"<tr><td>{html.escape(c)}</td><td>{v['n']}</td><td>{_bar(v['correct_rate'])} {percent(v['correct_rate'])}</td></tr>"
        for c, v in r["by_category"].items()
    )
    rows = "".join(map(_row, r["tasks"]))
    return f"""<section><h2>{html.escape(r["policy"])}</h2><div class="cards">{shown}</div>
<details><summary>by category</summary><div class="wide"><table><tr><th>category</th><th>tasks</th><th>correct</th></tr>
{categories}</table></div></details>
<div class="wide"><table><tr><th>task</th><th>verdict</th><th>cases</th><th title="bytes moved / compulsory bytes">traffic</th>
<th>launches</th><th>speedup</th><th>seconds</th><th>reason</th></tr>{rows}</table></div></section>"""


def _row(row: Mapping[str, Any]) -> str:
    c, e, t = row["cases"], row.get("evidence") or {}, row["timing"]
    speed = f"{t['speedup']:.3f}x <small>{t['low']:.3f}–{t['high']:.3f}</small>" if t else "-"
    cells = [
        html.escape(row["task"]), f'<span class="v {row["verdict"]}">{row["verdict"].replace("_", " ")}</span>',
        f"{c['passed']}/{c['total']}" if c else "-", _traffic(row), str(e.get("launches", "-")), speed,
        f"{row['seconds'].get('total', 0):.2f}" if row["seconds"] else "-", f"<small>{html.escape(reason(row))}</small>",
    ]  # fmt: skip
    return "<tr>" + "".join(f"<td>{x}</td>" for x in cells) + "</tr>"
