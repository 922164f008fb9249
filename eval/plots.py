"""The figures of a report. A figure is left out if a study has no data for it."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbx_env.eval import plot_style as style
from kbx_env.eval.plot_style import CAPTIONS as CAPTIONS
from kbx_env.eval.plot_style import TITLES, VERDICTS
from kbx_env.eval.report_data import PolicyStudy, Row, Study


@dataclass(frozen=True)
class _Drawn:
    """A policy with its colour and label, the same in every figure."""

    study: PolicyStudy
    label: str
    colour: str
    marker: str

    @property
    def judged(self) -> tuple[Row, ...]:
        """The judged answers."""
        return self.study.judged

    @property
    def timed(self) -> list[Row]:
        """The correct answers with a time."""
        return [r for r in self.judged if r.correct and r.speedup]


def figures(study: Study) -> dict[str, Any]:
    """Draw all figures for which a study has data.

    Args:
        study: the answers.

    Returns:
        Name -> figure, in the order of a report.

    Raises:
        UsageError: matplotlib is not installed.
    """
    style.check()
    names = style.labels([p.name for p in study.policies])
    looks = [*zip(style.PALETTE, style.MARKERS, strict=True), *[(style.GREY, "o")] * len(names)]
    drawn = [_Drawn(p, name, *look) for p, name, look in zip(study.policies, names, looks)]
    with style.themed():
        found = {name: _DRAW[name](drawn) for name in TITLES} if any(p.judged for p in drawn) else {}
        return {name: style.settled(figure) for name, figure in found.items() if figure is not None}


def save(figures: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Write each figure as PNG and SVG.

    Args:
        figures: name -> figure.
        folder: of the files.

    Returns:
        The files.

    Raises:
        UsageError: the folder cannot be written.
    """
    return [file for name, figure in figures.items() for file in style.write(figure, Path(folder), name)]


def inline_svg(figure: Any, prefix: str = "kbx") -> str:
    """Return a figure as a self-contained ``<svg>`` for an HTML page: as wide as its place, in the page's text colour.

    Args:
        figure: matplotlib figure.
        prefix: of its ids; a page that shows the same figure of two studies needs two prefixes.

    Returns:
        The markup.
    """
    return style.svg(figure, f"{prefix}-{figure.get_label()}-", inline=True)


def _share(rows: Sequence[Row], name: str = "correct") -> float:
    return sum(getattr(r, name) for r in rows) / len(rows)


def _speedup(row: Row) -> float:
    return float(row.speedup or 1)


def _void(row: Row) -> bool:
    return any(c.get("void") for c in (row.raw.get("timing") or {}).get("cases") or ())


def _rates(ps: Sequence[_Drawn]) -> Any:
    from scipy.stats import binomtest

    figure = style.sheet("rates", 0.75 + 0.3 * len(ps))
    for axes, name, title in zip(figure.subplots(1, 2, sharey=True), ("compiled", "correct"), ("compiles", "correct"), strict=True):
        style.rows(axes, [p.label for p in ps])
        axes.set_title(title)
        style.shares(axes)
        for y, p in enumerate(ps):
            n, k = len(p.judged), sum(getattr(r, name) for r in p.judged)
            if not n:
                style.say(axes, y, "no answer judged", dim=True)
                continue
            interval = binomtest(k, n).proportion_ci(method="wilson")
            axes.plot([interval.low, interval.high], [y, y], color=p.colour, linewidth=2.4, alpha=0.55)
            axes.plot([k / n], [y], "o", color=p.colour, markersize=7, clip_on=False)
            style.say(axes, y, f"{style.percent(k / n)} ({k}/{n})")
    return figure


def _categories(ps: Sequence[_Drawn]) -> Any:
    from matplotlib.patches import Rectangle

    names = sorted({r.category for p in ps for r in p.study.rows})
    figure = style.sheet("categories", 1.35 + 0.3 * len(ps))
    axes = figure.subplots()
    style.rows(axes, [p.label for p in ps])
    axes.grid(False)
    axes.set_xlim(-0.5, max(len(names), 6) - 0.5)
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(names)), [style.shorten(c, 20) for c in names], rotation=35, ha="left", rotation_mode="anchor")
    axes.tick_params(axis="x", length=0, pad=3)
    axes.spines[["top", "bottom"]].set_visible(False)
    for y, p in enumerate(ps):
        for x, name in enumerate(names):
            of = [r for r in p.judged if r.category == name]
            if not of:
                axes.text(x, y, "–", ha="center", va="center", alpha=style.DIM)
                continue
            rate, text = _share(of), f"{sum(r.correct for r in of)}/{len(of)}"
            fill: Any = {"facecolor": style.PALETTE[0], "alpha": 0.04 + 0.92 * rate}
            axes.add_patch(Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, linewidth=0, **fill))
            colour = "#ffffff" if rate > 0.7 else style.TEXT
            axes.text(x, y, text, ha="center", va="center", color=colour, fontsize=8.5 if len(text) < 6 else 7)
    return figure


def _failures(ps: Sequence[_Drawn]) -> Any:
    figure = style.sheet("failures", 0.85 + 0.34 * len(ps))
    axes = figure.subplots()
    style.rows(axes, [p.label for p in ps])
    axes.set(xlim=(0, 1), xticks=[])
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    named, short = set[str](), set[str]()
    for y, p in enumerate(ps):
        n, masked, left = len(p.judged), len(p.study.rows) - len(p.judged), 0.0
        counts = Counter(r.verdict for r in p.judged)
        for verdict in [v for v in VERDICTS if counts[v]]:
            (name, colour), width = VERDICTS[verdict], counts[verdict] / n
            axes.barh(y, width, left=left, height=0.72, color=colour, linewidth=0)
            texts = (f"{name} {counts[verdict]}", str(counts[verdict]), "")
            text = next(t for t in texts if not t or width > 0.0145 * len(t) + 0.006)
            (named if text == texts[0] else short).add(verdict)
            axes.text(left + width / 2, y, text, ha="center", va="center", fontsize=8.5, color=style.on_blocks(colour))
            left += width
        style.say(axes, y, (f"{n} judged" if n else "none judged") + (f", {masked} masked" if masked else ""), dim=True)
    if missing := [look for v, look in VERDICTS.items() if v in short - named]:
        style.key(figure, [(name, {"color": colour, "marker": "s"}) for name, colour in missing])
    return figure


def _speedups(ps: Sequence[_Drawn]) -> Any:
    if not any(p.timed for p in ps):
        return None
    figure = style.sheet("speedups", 1.15 + 0.52 * len(ps))
    axes = figure.subplots()
    style.strips(axes, [p.label for p in ps], [p.colour for p in ps], [[(_speedup(r), False) for r in p.timed] for p in ps], 1.0)
    axes.set_xlabel("speedup over torch eager (line: as fast as eager)")
    for y, p in enumerate(ps):
        if p.timed:
            s = [_speedup(r) for r in p.timed]
            style.say(axes, y, f"median {statistics.median(s):.2f}, geomean {style.geomean(s):.2f}, n = {len(s)}")
        else:
            style.say(axes, y, "not timed" if any(r.correct for r in p.judged) or not p.study.timed else "none correct", dim=True)
    style.key(figure, style.MARKS)
    return figure


def _fast_p(ps: Sequence[_Drawn]) -> Any:
    if not any(p.timed for p in ps):
        return None
    ps = [p for p in ps if p.judged and (p.timed or p.study.timed and not any(r.correct for r in p.judged))]
    height = max(3.3, 0.9 + style.LINE * len(ps))
    figure = style.sheet("fast_p", height)
    axes = figure.subplots()
    style.logarithmic(axes, "x", [1.0, *(_speedup(r) for p in ps for r in p.timed)])
    low, high = axes.get_xlim()
    axes.axvline(1.0, color=style.TEXT, linewidth=1)
    ends = []
    for p in ps:
        s, n = sorted(_speedup(r) for r in p.timed), len(p.judged)
        at = [low, *s, high]
        axes.step(at, [(len(s) - k) / n for k in (0, *range(1, len(s) + 1), len(s))], where="post", color=p.colour, linewidth=1.8)
        without = sum(r.correct for r in p.judged) - len(s)
        ends.append((len(s) / n, p.label + (f" ({without} not timed)" if without else ""), p.colour))
    style.shares(axes, "y", style.ceiling_of([e[0] for e in ends]))
    axes.yaxis.tick_right()
    axes.yaxis.set_label_position("right")
    axes.spines["left"].set_visible(False)
    axes.set(xlabel="p: times as fast as torch eager", ylabel="correct and faster than p")
    style.aside(axes, ends, height - 0.7, left=True)
    return figure


def _measured(row: Row, value: Callable[[Mapping[str, Any]], float]) -> float | None:
    """Return the geometric mean of a value over the timed cases that have it; ``None`` for no case."""
    cases = (row.raw.get("timing") or {}).get("cases") or ()
    found = [v for c in cases if c.get("candidate_us") and (v := value(c))]
    return style.geomean(found) if row.correct and found else None


def _roofline(ps: Sequence[_Drawn]) -> Any:
    devices = {str(p.study.manifest.get("device")) for p in ps if p.timed}
    peaks = style.peaks(devices.pop()) if len(devices) == 1 else None
    peak = f"; line: {{}}peak by the {peaks[0]}'s datasheet" if peaks else ""

    def rate(name: str, scale: float) -> Callable[[Mapping[str, Any]], float]:
        return lambda case: (case.get(name) or 0) / case["candidate_us"] * scale

    kinds: list[tuple[str, float | None, Callable[[Mapping[str, Any]], float]]] = [
        ("GB/s (bytes that must be moved)" + peak.format(""), peaks and peaks[1], rate("ideal_bytes", 1e-3)),
        ("TFLOP/s" + peak.format("fp16 "), peaks and peaks[2], rate("flops", 1e-6)),
        ("share of the device's measured roofline, % (line: no kernel can be faster)", 100.0, rate("floor_us", 100)),
    ]
    measured = [[[(v, _void(r)) for r in p.judged if (v := _measured(r, value))] for p in ps] for _, _, value in kinds]
    panels = [(text, line, found) for (text, line, _), found in zip(kinds, measured, strict=True) if any(found)]
    panels = panels[:-1] if len(panels) > 1 else panels  # the share stands in where bytes are not measured
    if not panels:
        return None
    figure = style.sheet("roofline", 0.5 + len(panels) * (0.65 + 0.48 * len(ps)))
    for axes, (text, line, found) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        style.strips(axes, [p.label for p in ps], [p.colour for p in ps], found, line)
        axes.set_xlabel(text)
        for y, of in enumerate(found):
            said = f"median {style.short(statistics.median(v for v, _ in of))}, n = {len(of)}" if of else "no data"
            style.say(axes, y, said, dim=not of)
    style.key(figure, style.MARKS)
    return figure


def _by_task(p: _Drawn) -> dict[str, float]:
    tasks: dict[str, list[float]] = {}
    for r in p.timed:
        tasks.setdefault(r.task, []).append(_speedup(r))
    return {t: style.geomean(s) for t, s in tasks.items()}


def _ceiling(ps: Sequence[_Drawn]) -> Any:
    experts = [p for p in ps if re.fullmatch(r"expert( \(.*\))?", p.study.name) and p.timed]
    if not experts:
        return None
    best = _by_task(experts[0])
    of = {p.label: (p, [(best[t], s) for t, s in _by_task(p).items() if t in best]) for p in ps if p is not experts[0]}
    shown = [(p, pairs) for p, pairs in of.values() if pairs]
    if not shown:
        return None
    lines = math.ceil(len(shown) / 3)
    figure = style.sheet("ceiling", 0.45 + lines * (style.WIDTH * 0.31))
    grid = figure.subplots(lines, 3, sharex=True, sharey=True, squeeze=False).flat
    every = [v for _, pairs in shown for pair in pairs for v in pair] + [1.0]
    for (p, pairs), axes in zip(shown, grid):
        for side in "xy":
            style.logarithmic(axes, side, every, most=6)
        axes.set_box_aspect(1)
        axes.plot(axes.get_xlim(), axes.get_xlim(), color=style.TEXT, linewidth=1)
        style.dots(axes, [x for x, _ in pairs], [y for _, y in pairs], p.colour, size=4.5)
        ratio, better = style.geomean([y / x for x, y in pairs]), sum(y > x for x, y in pairs)
        axes.set_title(f"{p.label}\n{ratio:.2f} of the expert, faster in {better}/{len(pairs)}")
        axes.tick_params(labelbottom=True, labelleft=True)
    for axes in list(grid):
        axes.set_visible(False)
    figure.supxlabel("expert's speedup over eager", fontsize=9)
    figure.supylabel("policy's speedup over eager", fontsize=9)
    return figure


def _by_round(p: _Drawn) -> tuple[list[list[float]], bool]:
    """Return shares compiled, shares correct and mean best speedups by round, and whether any speedup is known."""
    rounds = 1 + max((int(t["round"]) for r in p.judged for t in r.turns), default=-1)
    curves: list[list[float]] = [[], [], []]
    for k in range(rounds):
        so_far = [[t for t in r.turns if int(t["round"]) <= k] for r in p.judged]
        for curve, name in zip(curves, ("compiled", "correct"), strict=False):
            curve.append(statistics.fmean(any(t[name] for t in of) for of in so_far))
        best = [max([1.0, *(t["speedup"] for t in of if t["correct"] and t.get("speedup"))]) for of in so_far]
        curves[2].append(style.geomean(best))
    return curves, any(t.get("speedup") for r in p.judged for t in r.turns)


def _trajectory(ps: Sequence[_Drawn]) -> Any:
    from matplotlib.ticker import MaxNLocator

    found = [(p, *_by_round(p)) for p in ps if any(r.turns for r in p.judged)]
    if not found:
        return None
    names = ["compiled so far", "correct so far"] + ["best speedup so far"] * any(has_speedup for *_, has_speedup in found)
    each = max(1.75, 0.5 + style.LINE * len(found))
    figure = style.sheet("trajectory", 0.5 + each * len(names))
    panels = figure.subplots(len(names), 1, sharex=True)
    for k, (axes, name) in enumerate(zip(panels, names, strict=True)):
        shown = [(p, curves[k]) for p, curves, has_speedup in found if k < 2 or has_speedup]
        for p, y in shown:
            axes.plot(range(1, len(y) + 1), y, color=p.colour, marker=p.marker, markersize=4.5, linewidth=1.6, clip_on=False)
        most = max(len(curves[0]) for _, curves, _ in found)
        axes.set_xlim(0.8, most + 0.2)
        if k < 2:
            style.shares(axes, "y", style.ceiling_of([v for _, y in shown for v in y]))
        else:
            style.logarithmic(axes, "y", [v for _, y in shown for v in y], most=5)
        axes.set_ylabel(name)
        style.aside(axes, [(y[-1], p.label, p.colour) for p, y in shown], each - 0.3)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    panels[-1].set_xlabel("round of submissions")
    return figure


def _pass_at_k(ps: Sequence[_Drawn]) -> Any:
    from kbx_env.eval.report import pass_curve  # it imports this module when it draws
    from matplotlib.ticker import MaxNLocator

    curves: list[tuple[_Drawn, list[float]]] = []
    for p in ps:
        tasks: dict[str, list[bool]] = {}
        for r in p.judged:
            tasks.setdefault(r.task, []).append(r.correct)
        least = min(map(len, tasks.values()), default=0)
        if least > 1:
            of = [(len(s), sum(s)) for s in tasks.values()]
            curves.append((p, [statistics.fmean(at) for at in zip(*(pass_curve(n, c, least) for n, c in of))]))
    if not curves:
        return None
    height = max(3.2, 0.9 + style.LINE * len(curves))
    figure = style.sheet("pass_at_k", height)
    axes = figure.subplots()
    most = max(len(y) for _, y in curves)
    for p, y in curves:
        axes.plot(range(1, len(y) + 1), y, color=p.colour, marker=p.marker if most < 20 else None, markersize=4.5, clip_on=False)
    axes.set_xlim(1 - 0.02 * (most - 1), most + 0.02 * (most - 1))
    style.shares(axes, "y", style.ceiling_of([v for _, y in curves for v in y]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="k: answers to a task", ylabel="pass@k")
    style.aside(axes, [(y[-1], p.label, p.colour) for p, y in curves], height - 0.7)
    return figure


def _traffic(ps: Sequence[_Drawn]) -> Any:
    def values(value: Callable[[Row], float | None]) -> list[list[tuple[str, float]]]:
        return [[(r.category, v) for r in p.judged if r.correct and (v := value(r))] for p in ps]

    # The evidence counts launches over all cases.
    calls = values(lambda r: (r.launches or 0) / ((r.raw.get("cases") or {}).get("total") or math.inf))
    panels = [("moved / ideal bytes", values(lambda r: r.traffic)), ("launches for a call (mean over cases)", calls)]
    if not any(panels[0][1]):
        return None
    panels = [panel for panel in panels if any(panel[1])]
    held = [k for k in range(len(ps)) if any(found[k] for _, found in panels)]
    names = sorted({c for _, found in panels for of in found for c, _ in of})
    lane_height = 0.84 / len(held)
    figure = style.sheet("traffic", 0.95 + len(names) * max(0.3, 0.085 * len(held) + 0.1))
    for axes, (text, found) in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        style.logarithmic(axes, "x", [1.0, *(v for of in found for _, v in of)], most=7)
        style.rows(axes, names)
        axes.axvline(1.0, color=style.TEXT, linewidth=1)
        for y in range(0, len(names), 2):
            axes.axhspan(y - 0.5, y + 0.5, color=style.TEXT, alpha=0.04, linewidth=0)
        axes.set_xlabel(text)
        for rank, k in enumerate(held):
            for y, name in enumerate(names):
                at = [v for c, v in found[k] if c == name]
                middle = y - 0.42 + lane_height * (rank + 0.5)
                offsets = style.swarm(at, axes.get_xlim(), 0.4 * lane_height, 3.0)
                style.dots(axes, at, [middle + o for o in offsets], ps[k].colour, size=4.0 if len(held) < 4 else 3.2)
    style.key(figure, [(ps[k].label, {"color": ps[k].colour}) for k in held])
    return figure


def _cost(ps: Sequence[_Drawn]) -> Any:
    found: list[tuple[_Drawn, list[float | None], bool]] = []
    for p in ps:
        if p.judged:
            keys = ("calls", "prompt_tokens", "completion_tokens", "gradings", "untold")
            known = [[v for r in p.judged if (v := r.spent.get(key)) is not None] for key in keys]
            calls, prompt, completion, gradings, untold = (sum(of) if of else None for of in known)
            tokens = prompt + (completion or 0) if prompt is not None and (untold or 0) < (calls or 1) else None
            found.append((p, [v and v / len(p.judged) for v in (calls, tokens, gradings)], bool(untold)))
    names = ("LLM calls an answer", "tokens an answer", "gradings an answer")
    panels = [k for k in range(3) if any(values[k] for _, values, _ in found)]
    if not any(k < 2 or any((values[k] or 0) > 1 for _, values, _ in found) for k in panels):
        return None
    height = max(3.0, 0.9 + style.LINE * len(found))
    figure = style.sheet("cost", height)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    shown = [f for f in found if any(f[1][k] for k in panels)]
    for axes, k in zip(grid, panels, strict=True):
        style.logarithmic(axes, "x", [v for _, values, _ in shown if (v := values[k])], most=5)
        style.shares(axes, "y", style.ceiling_of([_share(p.judged) for p, *_ in shown]))
        axes.set_xlabel(names[k])
        for p, values, bound in shown:
            axes.axhline(_share(p.judged), color=p.colour, linewidth=0.9, alpha=0.45)
            if value := values[k]:
                hollow = bound and k == 1
                axes.plot([value], [_share(p.judged)], p.marker, color=p.colour, markersize=8, clip_on=False,
                          markerfacecolor="none" if hollow else p.colour, zorder=3)  # fmt: skip
    grid[0].set_ylabel("correct")
    style.aside(grid[-1], [(_share(p.judged), p.label, p.colour) for p, *_ in shown], height - 0.7)
    return figure


def _gradings(ps: Sequence[_Drawn]) -> Any:
    both = [(p, p.study.beside["by_category"]) for p in ps if p.study.beside.get("by_category")]
    if not both:
        return None
    names = sorted({c for _, found in both for c in found})
    columns = min(len(both), 3)  # four names do not fit side by side
    lines = math.ceil(len(both) / columns)
    figure = style.sheet("gradings", lines * (0.9 + 0.26 * len(names)))
    panels = list(figure.subplots(lines, columns, sharey=True, squeeze=False).flat)
    for axes in panels[len(both) :]:
        axes.set_visible(False)
    for axes, (p, found) in zip(panels, both, strict=False):
        style.rows(axes, names)
        style.shares(axes)
        axes.set_title(p.label)
        for y, name in enumerate(names):
            if name not in found:
                style.say(axes, y, "–", dim=True)
                continue
            sums = found[name]
            contract, paper = (sums[g] / sums["n"] for g in ("contract", "paper"))
            axes.plot([contract, paper], [y, y], color=p.colour, linewidth=2.4, alpha=0.35)
            axes.plot([paper], [y], "o", color=p.colour, markersize=7, markerfacecolor="none", clip_on=False)
            axes.plot([contract], [y], "o", color=p.colour, markersize=5, clip_on=False)
            style.say(axes, y, f"{sums['contract']} and {sums['paper']} of {sums['n']}")
    return figure


_DRAW: Mapping[str, Callable[[Sequence[_Drawn]], Any]] = {
    "rates": _rates, "categories": _categories, "speedups": _speedups, "fast_p": _fast_p, "trajectory": _trajectory,
    "failures": _failures, "pass_at_k": _pass_at_k, "roofline": _roofline, "ceiling": _ceiling, "traffic": _traffic, "cost": _cost,
    "gradings": _gradings,
}  # fmt: skip
