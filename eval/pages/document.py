"""The content of a report: its blocks in order, from data that is computed elsewhere."""

from __future__ import annotations

from kbx_env.eval import stats
from kbx_env.eval.pages import formatting
from kbx_env.eval.pages.blocks import Block, Cards, Cell, Column, Heading, Section, Table, Text
from kbx_env.eval.pages.context import ANSWERS, Material, figure, kernel, label, mean, rate, total
from kbx_env.eval.pages.evidence import beside, fusion, portable, quantization, spent
from kbx_env.eval.pages.findings import pairs, rounds, speed, where, why
from kbx_env.eval.report_data import PolicyStudy, Row


def document(m: Material) -> list[Block]:
    """Return all sections that the material supports."""
    parts = [
        _summary(m),
        where(m),
        speed(m),
        rounds(m),
        why(m),
        pairs(m),
        fusion(m),
        quantization(m),
        spent(m),
        portable(m),
        beside(m),
        *(_answers(m, p, i) for i, p in enumerate(m.study.policies)),
        unbelieved(m),
        _notes(m),
    ]
    return [p for p in parts if p is not None]


def _summary(m: Material) -> Section:
    rows: list[list[Cell | str]] = []
    sentences = []
    for i, p in enumerate(m.study.policies):
        r, speed = stats.rates(p), stats.speeds(p.rows)
        tokens = dict(formatting.took(total(p)))
        rows.append(
            [
                Cell(p.name, href=f"#policy-{i}"),
                rate(r.compiled),
                rate(r.correct),
                formatting.between(r.correct.low, r.correct.high) or formatting.NONE,
                _best_pass(p),
                Cell(formatting.NONE) if speed is None else mean(speed.geometric_mean),
                formatting.NONE if speed is None else formatting.times(speed.spread.median),
                Cell(formatting.NONE) if speed is None else rate(speed.slower),
                tokens["LLM calls"],
                tokens["tokens"],
                tokens["gradings"],
                tokens["wall time"],
            ]
        )
        sentences.append(Text(_sentence(p, r, speed)))
    names = (
        ("policy", ""),
        ("compiles", ""),
        ("correct", "of all judged answers"),
        ("95 %", "Wilson interval of the correct rate"),
        ("pass@k", "unbiased, largest k"),
        ("speedup", "geometric mean over eager of correct kernels"),
        ("median", "speedup"),
        ("slower", "correct kernels slower than eager"),
        ("LLM calls", ""),
        ("tokens", ""),
        ("gradings", "verdicts the policy was given"),
        ("wall", "summed over answers"),
    )
    table = Table([Column(n, i > 0, t) for i, (n, t) in enumerate(names)], rows)
    return Section("summary", [Heading("In short"), *sentences, table, *figure(m, "rates")])


def _sentence(p: PolicyStudy, r: stats.Rates, speed: stats.Speeds | None) -> str:
    if r.correct.rate is None:
        return f"{p.name}: no answer could be judged ({r.masked} were lost to infrastructure faults)."
    text = f"{p.name} answers {r.correct.k} of {r.correct.n} correctly ({formatting.percent(r.correct.rate)}"
    text += f", 95 % {formatting.between(r.correct.low, r.correct.high)}); {r.compiled.k} compile"
    if r.masked:
        text += f"; {r.masked} more were not judged"
    if speed is not None:
        text += f". Of {speed.n} correct kernels that were timed {speed.slower.k} are slower than eager"
        text += f"; the geometric mean is {formatting.times(speed.geometric_mean.value)}"
    elif not p.timed:
        text += ". Nothing was timed on this machine"
    return text + "."


def _best_pass(p: PolicyStudy) -> str:
    found = stats.pass_at(p.rows)
    k = max(found, default=1)
    return f"pass@{k} {formatting.percent(found[k].value)}" if k > 1 else formatting.NONE


def _answers(m: Material, p: PolicyStudy, index: int) -> Section:
    r = stats.rates(p)
    cards = [
        ("answers", str(r.correct.n)),
        ("compiles", formatting.percent(r.compiled.rate)),
        ("correct", formatting.percent(r.correct.rate)),
    ]
    if r.masked:
        cards.insert(1, ("not judged", str(r.masked)))
    speed = stats.speeds(p.rows)
    cards.append(("geomean speedup", formatting.times(speed.geometric_mean.value if speed else None)))
    summed = {"wall time": "wall time, all answers"}  # a sum: several answers are made at a time
    cards += [(summed.get(k, k), v) for k, v in formatting.took(total(p)) if v != formatting.NONE]
    passes = stats.pass_at(p.rows)
    texts = [Text(line, quiet=True) for line in (formatting.manifest_line(p.manifest), formatting.about_line(p.about)) if line]
    if len(passes) > 1:
        intervals = (
            f"pass@{k} {formatting.percent(v.value)} ({formatting.between(v.low, v.high) or 'no interval'})"
            for k, v in passes.items()
        )
        texts.append(Text(", ".join(intervals)))
    names = (
        ("task", ""),
        ("verdict", ""),
        ("cases", ""),
        ("moved", "bytes that the launches moved"),
        ("ideal", "bytes that any kernel must move"),
        ("ratio", ""),
        ("launches", ""),
        ("speedup", "over eager"),
        ("seconds", "of the last grading"),
        ("calls", "of a language model"),
        ("tokens", ""),
        ("gradings", "verdicts that the policy was given"),
        ("wall", ""),
        ("kernel", "as it was submitted"),
        ("reason", ""),
    )
    columns = [Column(n, n not in ("task", "verdict", "kernel", "reason"), t) for n, t in names]
    more = f"; the first {ANSWERS} of {len(p.rows)}, all are in tasks.csv" if len(p.rows) > ANSWERS else ""
    shown, seen = [_answer(m, p, row) for row in p.rows[:ANSWERS]], set[str]()
    for row, cells in zip(p.rows, shown):
        if row.category not in seen:  # links of the tables above lead here
            seen.add(row.category)
            cells[1] = Cell(row.verdict.replace("_", " "), style=f"v {row.verdict}", anchor=f"policy-{index}-{row.category}")
    table = Table(columns, shown, f"Every answer{more}", open=len(m.study.policies) == 1)
    return Section(f"policy-{index}", [Heading(p.name), *texts, Cards([(v, k) for k, v in cards]), table])


def _answer(m: Material, p: PolicyStudy, r: Row) -> list[Cell | str]:
    raw = r.raw
    c, e = raw.get("cases"), raw.get("evidence") or {}
    seconds = (raw.get("seconds") or {}).get("total")
    resources = dict(formatting.took(r.spent))
    return [
        Cell(label(r), href=m.pages.get(r.task)),
        Cell(r.verdict.replace("_", " "), style=f"v {r.verdict}"),
        f"{c['passed']}/{c['total']}" if c else formatting.NONE,
        formatting.size(e.get("moved_bytes")),
        formatting.size(e.get("ideal_bytes")),
        formatting.NONE if r.traffic is None else f"{r.traffic:.2f}",
        formatting.NONE if r.launches is None else str(r.launches),
        Cell(formatting.NONE)
        if r.speedup is None
        else Cell(formatting.times(r.speedup), title=f"95 %: {formatting.between(r.low, r.high, formatting.times)}"),
        formatting.NONE if seconds is None else f"{seconds:.2f}",
        resources["LLM calls"],
        resources["tokens"],
        resources["gradings"],
        resources["wall time"],
        kernel(m, p.name, r.task, r.sample),
        Cell(formatting.reason(r.message, r.correct), style="why"),
    ]


def unbelieved(m: Material) -> Section | None:
    """List kernels whose times are too fast to be believed; a person has to explain them before they count."""
    lines = [f"{p.name}, {label(r)}: {why}" for p in m.study.policies for r in p.rows for why in r.void]
    if not lines:
        return None
    intro = (f"{len(lines)} {'time is' if len(lines) == 1 else 'times are'} nearer to the physical roofline than any known kernel. "
             "They are in no speed figure, and training masks them, until a person has explained them.")  # fmt: skip
    return Section("void", [Heading("Times that are not believed"), Text(intro), *(Text(line, quiet=True) for line in lines)])


def _notes(m: Material) -> Section | None:
    return Section("notes", [Heading("Left out"), *(Text(t, quiet=True) for t in m.missing)]) if m.missing else None
