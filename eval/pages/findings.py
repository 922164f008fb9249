"""Sections on failures by category, speed of correct kernels, and factors that explain correctness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kbx_env.eval import devices, models, stats
from kbx_env.eval.calibration import sentence
from kbx_env.eval.pages import formatting
from kbx_env.eval.pages.blocks import Block, Cell, Column, Heading, Section, Table, Text
from kbx_env.eval.pages.context import Material, evidence_of, figure, rate
from kbx_env.eval.report_data import Row


def where(m: Material) -> Section:
    """Return correctness by category, and the kinds of failure."""
    blocks: list[Block] = [Heading("Where it breaks down"), *figure(m, "categories")]
    table: list[list[Cell | str]] = [
        [c, *(replace(rate(stats.rates(p, c).correct), href=evidence_of(p, i, c)) for i, p in enumerate(m.study.policies))]
        for c in m.study.categories
    ]
    columns = [Column("category"), *(Column(p.name, True) for p in m.study.policies)]
    blocks += [Table(columns, table, "Correct by category", style="shares"), *figure(m, "failures")]
    for p in m.study.policies:
        found = stats.taxonomy(p.rows)
        if found:
            rows = [[stage, kind, far or "", str(n)] for stage, kind, far, n in found[:25]]
            columns = [Column("stage"), Column("kind"), Column("how far off"), Column("answers", True)]
            blocks.append(Table(columns, rows, f"Why answers of {p.name} fail", open=len(m.study.policies) == 1))
    return Section("where", blocks)


def against_compile(rows: Sequence[Row]) -> tuple[stats.Mean, int] | None:
    """Return the geometric mean of the speedups over torch.compile of correct kernels.

    Args:
        rows: the answers.

    Returns:
        The mean and the number of kernels; ``None`` if no such speedup is known.
    """

    def log(r: Row) -> float | None:
        return math.log(r.compiled_speedup) if r.compiled_speedup is not None else None

    known = [r for r in rows if r.correct and not r.masked and r.compiled_speedup is not None]
    logs = stats.mean(*stats.by_task(known, log))
    return None if logs is None else (logs.exp(), len(known))


def speed(m: Material) -> Section | None:
    """Return the speedups of correct kernels; ``None`` if nothing was timed."""
    rows: list[list[Cell | str]] = []
    for p in m.study.policies:
        s = stats.speeds(p.rows)
        if s is not None:
            rows.append(
                [
                    p.name,
                    str(s.n),
                    formatting.times(s.geometric_mean.value),
                    formatting.between(s.geometric_mean.low, s.geometric_mean.high, formatting.times) or formatting.NONE,
                    formatting.times(s.spread.median),
                    f"{formatting.times(s.spread.q1)} to {formatting.times(s.spread.q3)}",
                    formatting.times(s.arithmetic_mean),
                    rate(s.slower),
                    rate(s.slower_surely),
                    rate(s.faster_surely),
                ]
            )
    pictures = [b for name in ("speedups", "fast_p", "roofline", "ceiling") for b in figure(m, name)]
    if not rows and not pictures:
        return None
    names = (
        "policy",
        "timed",
        "geometric mean",
        "95 %",
        "median",
        "quartiles",
        "arithmetic mean (paper)",
        "slower than eager",
        "surely slower",
        "surely faster",
    )
    table = Table([Column(n, i > 0) for i, n in enumerate(names)], rows)
    blocks: list[Block] = [Heading("How fast correct kernels are"), table, *pictures]
    for p in m.study.policies:
        compiled = against_compile(p.rows)
        if compiled is not None:
            interval = formatting.between(compiled[0].low, compiled[0].high, formatting.times)
            text = f"{p.name} against torch.compile: {formatting.times(compiled[0].value)}{f' ({interval})' if interval else ''}, "
            text += f"geometric mean over the {compiled[1]} correct kernels for which it is known."
            blocks.append(Text(text))
    noise = models.noise(m.study)
    if noise is not None and noise.half_widths.median is not None:
        text = f"Half of the 95 % intervals of these speedups are narrower than ±{100 * noise.half_widths.median:.1f} %"
        if noise.half_widths.p90 is not None:
            text += f", nine of ten narrower than ±{100 * noise.half_widths.p90:.1f} %"
        blocks.append(Text(text + ".", quiet=True))
    calibrated = {id(aa): aa for p in m.study.policies if (aa := p.manifest.get("aa"))}
    blocks += [Text(sentence(aa), quiet=True) for aa in calibrated.values()]
    for a in devices.across(m.study):
        means = ", ".join(f"{device} {formatting.times(mean)}" for device, mean in a.geometric_means.items())
        text = f"{a.policy} on {len(a.devices)} devices ({means}): the speedup of a task differs by a factor of {a.median:.2f} "
        text += f"in the median of {a.tasks} tasks, of {a.worst:.1f} at most ({a.worst_task}); "
        text += f"{a.mixed} are faster than eager on one and slower on another."
        blocks.append(Text(text))
    return Section("speed", blocks)


def rounds(m: Material) -> Section | None:
    """Return the effect of further rounds (paper Fig. 3), for policies that submit several times."""
    blocks: list[Block] = []
    for p in m.study.policies:
        found = stats.trajectory(p)
        if found is None:
            continue
        rows: list[list[Cell | str]] = [
            [
                str(r.round + 1),
                rate(r.compiled),
                rate(r.correct),
                formatting.NONE if r.speedup is None else formatting.times(r.speedup),
                str(r.rescued),
                formatting.NONE if r.rescued_speedup is None else formatting.times(r.rescued_speedup),
                str(r.persistent),
                formatting.NONE if r.persistent_speedup is None else formatting.times(r.persistent_speedup),
            ]
            for r in found.rounds
        ]
        names = (
            "round",
            "compiles by now",
            "correct by now",
            "best speedup",
            "rescued",
            "their speedup",
            "correct before",
            "their speedup",
        )
        blocks.append(Table([Column(n, True) for n in names], rows, f"Rounds of {p.name}"))
    return Section("rounds", [Heading("What rounds bring"), *figure(m, "trajectory"), *blocks]) if blocks else None


def why(m: Material) -> Section | None:
    """Return explained deviance of category and policy, with tests (paper abstract)."""
    a = m.analysis
    if a is None or not (a.fits or a.reasons):
        return None
    blocks: list[Block] = [Heading("What explains correctness")]
    if a.fits:
        rows = [
            [
                " and ".join(f.factors),
                formatting.percent(f.explained),
                str(f.df),
                f"{f.adjusted:.3f}",
                f"{f.deviance:.1f} of {f.null:.1f}",
            ]
            for f in a.fits.values()
        ]
        names = ("factor", "explained deviance", "df", "adjusted McFadden", "deviance")
        blocks.append(Table([Column(n, i > 0) for i, n in enumerate(names)], rows, f"Binomial models of {a.n} answers"))
    if a.tests:
        rows = [[t.factor, t.given or "alone", f"{t.chi2:.1f}", str(t.df), _p(t.p).removeprefix("= ")] for t in a.tests]
        names = ("factor", "beside", "chi²", "df", "p")
        blocks.append(Table([Column(n, i > 1) for i, n in enumerate(names)], rows, "Likelihood-ratio tests"))
    if a.mixed is not None:
        rows = [[name, *(f"{v:+.2f}" for v in found)] for name, found in a.mixed.log_odds.items()]
        odds = ("policy", "log-odds on an average task", "low", "high")
        spread = f"tasks differ by a standard deviation of {a.mixed.sd[0]:.2f}"
        blocks.append(Table([Column(n, i > 0) for i, n in enumerate(odds)], rows, f"Tasks as a random effect: {spread}"))
    if a.permutation is not None:
        p = a.permutation
        blocks.append(
            Text(
                f"Exchanging the policies within tasks at random explains {formatting.percent(p.by_chance)} on average; as they "
                "are "
                f"they explain {formatting.percent(p.explained)} (p {_p(p.p)}, {p.draws} draws)."
            )
        )
    for reason in dict.fromkeys(a.reasons.values()):
        left = ", ".join(n for n, other in a.reasons.items() if other == reason)
        blocks.append(Text(f"Left out ({left}): {reason}.", quiet=True))
    return Section("why", blocks)


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def pairs(m: Material) -> Section | None:
    """Return the conclusions on two policies on their common tasks."""
    if not m.comparisons:
        return None
    return Section("pairs", [Heading("Two policies on the same tasks"), *(Text(c.sentence) for c in m.comparisons)])
