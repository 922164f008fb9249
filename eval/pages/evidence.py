"""Sections on traffic, quantization, cost, other GPUs and the other grading."""

from __future__ import annotations

from kbx_env.eval import stats
from kbx_env.eval.pages import formatting
from kbx_env.eval.pages.blocks import Cell, Column, Heading, Section, Table, Text
from kbx_env.eval.pages.context import ANSWERS, Material, figure, kernel, label, total

_STAGES = ("scale", "rounding", "packed operands", "integer product", "result")
"""Parts of a quantization scheme, in the order of the table."""


def fusion(m: Material) -> Section | None:
    """Return bytes and launches of correct kernels by category: the effect of fusion."""
    rows: list[list[Cell | str]] = []
    for p in m.study.policies:
        for c in m.study.categories:
            t = stats.traffic(p, c)
            if t.ratio is not None:
                launches = formatting.NONE if t.launches.median is None else f"{t.launches.median:.1f}"
                rows.append([p.name, c, str(t.ratios.n), f"{t.ratio:.2f}", f"{t.ratios.median:.2f}", launches])
    if not rows:
        return None
    names = ("policy", "category", "correct kernels", "moved / ideal bytes", "median", "launches a call")
    columns = [Column(n, i > 1) for i, n in enumerate(names)]
    table = Table(columns, rows, "Memory traffic and launches of correct kernels", open=False)
    return Section("traffic", [Heading("Traffic"), *figure(m, "traffic"), table])


def quantization(m: Material) -> Section | None:
    """Return the parts of its scheme that each answer to a quantized task gets right."""
    rows: list[list[Cell | str]] = []
    for p in m.study.policies:
        for r in p.judged:
            found = stats.scheme(r)
            if found is not None:
                stages = [{True: "yes", False: "no", None: "not known"}[found.reached.get(s)] for s in _STAGES]
                rows.append([p.name, Cell(label(r), href=m.pages.get(r.task)), r.verdict.replace("_", " "), *stages])
    if not rows:
        return None
    columns = [Column(n) for n in ("policy", "task", "verdict", *_STAGES)]
    table = Table(columns, rows[:ANSWERS], "What each answer shows of its scheme")
    return Section("quantization", [Heading("Quantization, stage by stage"), table])


def spent(m: Material) -> Section | None:
    """Return calls, tokens, dollars, own tests, gradings and wall time of policies that ask a model."""
    rows = [
        [p.name, *(v for _, v in formatting.took(total(p)))] for p in m.study.policies if any(r.spent.get("calls") for r in p.rows)
    ]
    if not rows:
        return None
    columns = [Column(n, i > 0) for i, n in enumerate(("policy", *(k for k, _ in formatting.took(total(m.study.policies[0])))))]
    return Section("spent", [Heading("What it took"), Table(columns, rows), *figure(m, "cost"), *figure(m, "pass_at_k")])


def portable(m: Material) -> Section | None:
    """Return the ahead-of-time builds for other GPUs."""
    if not m.portable:
        return None
    names = (
        "policy",
        "target",
        "category",
        "builds",
        "registers",
        "most",
        "spilling kernels",
        "shared memory, most",
        "of",
        "too much",
        "occupancy, median",
        "least",
    )
    rows = [
        [
            p.policy,
            p.target,
            p.category or "all",
            formatting.NONE if p.portable is None else f"{p.portable} of {p.answers}",
            formatting.amount(p.registers_median),
            formatting.amount(p.registers_max),
            formatting.amount(p.spilling),
            formatting.size(p.shared_max),
            formatting.size(p.shared_limit),
            formatting.amount(p.over_limit),
            formatting.amount(p.occupancy_median),
            formatting.amount(p.occupancy_min),
        ]
        for p in m.portable
        if p.answers
    ]
    if not rows:
        return None
    text = "Correct kernels compiled ahead of time for other GPUs, without one. Registers are a thread's; occupancy is what "
    text += "registers and shared memory allow with the warps that a program was compiled with."
    totals = [p for p in m.portable if p.answers and not p.category]
    if assumed := sum(p.assumed or 0 for p in totals):
        builds = sum(p.kernels or 0 for p in totals)
        text += f" {assumed:,} of {builds:,} builds do not say them: {m.portable[0].warps} are assumed there."
    columns = [Column(n, i > 2) for i, n in enumerate(names)]
    all_categories = [r for r in rows if r[2] == "all"]
    parts = Table(columns, [r for r in rows if r[2] != "all"], "By category", open=False)
    return Section("portability", [Heading("On other GPUs"), Text(text), Table(columns, all_categories), parts])


def beside(m: Material) -> Section | None:
    """Return the results of the same answers under the second grading, and why the two differ."""
    rows: list[list[Cell | str]] = []
    reasons: list[list[Cell | str]] = []
    rates: list[list[Cell | str]] = []
    for name, b in m.beside.items():
        sums = {k: sum(c[k] for c in b["by_category"].values()) for k in ("n", "contract", "paper")} if b["by_category"] else None
        if sums is not None:
            shares = [f"{formatting.percent(sums[g] / sums['n'])} ({sums[g]} of {sums['n']})" for g in ("paper", "contract")]
            rates.append([name, *shares, str(len(b["differs"]))])
        for grading, found in b["reasons"].items():
            reasons += [[name, f"not by the {grading}" if grading == "contract" else "not by the paper's check", why, str(n)]
                        for why, n in found.items()]  # fmt: skip
        for d in b["differs"]:
            message = formatting.reason(d["message"], False)
            link = Cell(d["task"], href=m.pages.get(d["task"]))
            source = kernel(m, name, d["task"], d["sample"])
            rows.append([name, link, d["paper"], d["contract"], d["why"], source, Cell(message, style="why")])
    if not m.beside:
        return None
    text = "The same answers, graded twice. The paper's check has the published cases and tolerances, and lets torch do the work."
    names = ("policy", "paper's check", "contract", "differ")
    tables = [Table([Column(n, i > 0) for i, n in enumerate(names)], rates)] if rates else []
    if reasons:
        tables.append(Table([Column(n, n == "answers") for n in ("policy", "accepted", "first reason", "answers")], reasons, "Why"))
    if rows:
        columns = [Column(n) for n in ("policy", "task", "paper's check", "contract", "why", "kernel", "message")]
        tables.append(Table(columns, rows[:ANSWERS], "Answers whose verdict differs", open=False))
    return Section("beside", [Heading("Under two gradings"), Text(text), *tables, *figure(m, "gradings")])
