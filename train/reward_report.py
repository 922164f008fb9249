"""Report of a comparison of reward presets: sentences, tables, and learning curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kbx_env.eval import plot_style as style
from kbx_env.train.reward_curves import FINAL, METRICS, RATES, WINDOW

NAME = "comparison"
"""Name of the report's files."""
TITLE = "Learning curves of reward presets"
"""Title of the figure."""
PANELS = ("correct", "compiles", "base")
"""Metrics of the figure's panels."""
HEIGHT = 3.6
"""Height of the figure in inches."""

Comparison = Mapping[str, Any]
"""The result of ``reward_curves.compare``, with a few keys of ``compare_rewards.py``; or a part of it."""


def conclusion(data: Comparison) -> list[str]:
    """Return the conclusions as sentences: whether no run solved anything, then how each preset compares with the first."""
    sentences, metric = [], data["headline"]
    if not data["solved"]:
        spent = sum(r["gradings"] for r in data["runs"])
        sentences.append(
            f"No run of any preset ever solved anything: 0 correct kernels in {spent:,.0f} gradings of {len(data['runs'])} runs. "
            "Correct rates tell nothing here; the compile rate and the share of telling cases stand in."
        )
    for other in data["presets"][1:]:
        sentences.append(_compared(data, metric, other))
        if not data["solved"] and "cases" in data["metrics"]:
            sentences.append(_final(data, "cases", other))
    return sentences


def _seeds(data: Comparison, other: str) -> str:
    n, m = (len(data["seeds"][p]) for p in (data["first"], other))
    return f"{n} seed{'s' * (n != 1)} each" if n == m else f"{n} and {m} seeds"


def _compared(data: Comparison, metric: str, other: str) -> str:
    first, of = data["first"], data["metrics"].get(metric)
    if of is None:
        return f"Nothing was logged of the {METRICS[metric]}: {other} and {first} cannot be compared by it."
    ratio = of[other]["ratio"]
    if of[other]["target"] is None:
        return f"{first} ended at a {METRICS[metric]} of 0, so there is nothing to reach. " + _final(data, metric, other)
    goal = f"{first}'s final {METRICS[metric]} of {_value(metric, of[other]['target'])}"
    shown = f"{other} does not reach it" if ratio["value"] is None else f"ratio {ratio['value']:.2f}"
    if ratio["low"] is None:
        return (f"Of {other} and {first} nothing can be concluded: {_seeds(data, other)} give no interval "
                f"(by the gradings it takes to reach {goal}: {shown}).")  # fmt: skip
    about = f"(95 % interval {_range(ratio)}, {_seeds(data, other)})"
    if ratio["low"] <= 1 and (ratio["unbounded"] or ratio["high"] >= 1):
        return f"{other} and {first} are not distinguishable by the gradings it takes to reach {goal}: {shown} {about}."
    if ratio["value"] is None:
        return f"{other} does not reach {goal} in this budget and needs more gradings than {first}: a ratio with the {about[1:-1]}."
    word = "fewer" if ratio["value"] < 1 else "more"
    return f"{other} needs {word} gradings than {first} to reach {goal}: {ratio['value']:.2f} times as many {about}."


def _final(data: Comparison, metric: str, other: str) -> str:
    d, first = data["metrics"][metric][other]["difference"], data["first"]
    ends = " and ".join(f"{_value(metric, data['metrics'][metric][p]['final']['value'])} ({p})" for p in (other, first))
    if d["low"] is None:
        return f"By the final {METRICS[metric]}, {ends}, nothing can be concluded: {_seeds(data, other)} give no interval."
    about = f"(difference {_signed(metric, d)}, {_seeds(data, other)})"
    if d["low"] <= 0 <= d["high"]:
        return f"By the final {METRICS[metric]}, {ends}, they are not distinguishable {about}."
    return f"By the final {METRICS[metric]}, {ends}, {other} is {'higher' if d['value'] > 0 else 'lower'} {about}."


def _value(metric: str, value: float | None) -> str:
    if value is None:
        return "–"
    return style.percent(value) if metric in RATES else f"{value:.3f}"


def _range(ratio: Comparison) -> str:
    if ratio["unbounded"]:
        return f"at least {ratio['low']:.2f}"
    return f"{ratio['low']:.2f} to {ratio['high']:.2f}"


def _signed(metric: str, d: Comparison) -> str:
    value, low, high = (f"{100 * d[k]:+.1f}" if metric in RATES else f"{d[k]:+.3f}" for k in ("value", "low", "high"))
    return f"{value}{' points' * (metric in RATES)}, 95 % interval {low} to {high}"


def _ends(metric: str, final: Comparison) -> str:
    if final["low"] is None:
        return _value(metric, final["value"])
    return f"{_value(metric, final['value'])} [{_value(metric, final['low'])}, {_value(metric, final['high'])}]"


def markdown(data: Comparison) -> str:
    """Return the whole report as Markdown."""
    about, metric, first = data["about"], data["headline"], data["first"]
    lines = ["# Reward presets compared", "", *(f"{s}\n" for s in data["conclusion"])]
    lines += [f"![{TITLE}]({NAME}.png)", "", "## Final values and gradings needed", ""]
    used = [m for m in METRICS if m in data["metrics"]]
    heads = ["preset", "seeds", *(METRICS[m] for m in used), f"gradings to {first}'s {METRICS[metric]}", "ratio"]
    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for p in data["presets"]:
        figures = data["metrics"].get(metric, {}).get(p)
        needed = "–" if figures is None or figures["gradings_to_target"] is None else f"{figures['gradings_to_target']:,.0f}"
        cells = [_ends(m, data["metrics"][m][p]["final"]) for m in used]
        lines.append(f"| {p} | {len(data['seeds'][p])} | " + " | ".join(cells) + f" | {needed} | {_ratio(figures, p == first)} |")
    lines += ["", f"Final: mean over the last {100 * FINAL:g} % of {data['budget_gradings']:,.0f} gradings, which every run has. "
              "Brackets: 95 % t intervals over seeds; of the ratio: expanded percentile bootstrap that draws the seeds of both "
              "presets, target included. None where no two seeds differ.",
              ""]  # fmt: skip
    if len(data["presets"]) > 2:
        lines += [f"{len(data['presets']) - 1} presets are compared with {first}; the intervals are not widened for that.", ""]
    lines += ["Gradings needed, seed by seed (– : never in this budget):", ""]
    lines += ["| preset | seed | gradings needed | final |", "|---|---|---|---|"]
    for p in data["presets"] if metric in data["metrics"] else ():
        figures = data["metrics"][metric][p]
        for seed, n, end in zip(data["seeds"][p], figures["gradings_to_target_per_seed"], figures["final_per_seed"], strict=True):
            lines.append(f"| {p} | {seed} | {'–' if n is None else f'{n:,.0f}'} | {_value(metric, end)} |")
    lines += ["", "## How it was made", ""]
    lines += [f"- {name}: {value}" for name, value in about.items() if value]
    lines += [
        f"- Curves: mean over a centred window of {data['smoothing_gradings']:,.0f} gradings ({100 * WINDOW:g} % of the budget), "
        "told where the whole window lies within it; a step's value is that of all its gradings. Points on a common grid, "
        "straight lines between.",
        f"- Base reward: logged terms by the weights of `{first}` ({', '.join(data['base_terms']) or 'none in all logs'}); "
        "the presets' own rewards are not comparable and not looked at.",
        "- " + "; ".join(f"{p}: {_hours(data, p)}" for p in data["presets"]) + " (mean of a run).",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _ratio(figures: Comparison | None, is_first: bool) -> str:
    if is_first or figures is None:
        return "1" if is_first else "–"
    r = figures["ratio"]
    shown = "–" if r["value"] is None else f"{r['value']:.2f}"
    return shown if r["low"] is None else f"{shown} [{_range(r)}]"


def _hours(data: Comparison, preset: str) -> str:
    took = [r["seconds"] for r in data["runs"] if r["preset"] == preset]
    mean = sum(took) / len(took)
    return f"{mean / 3600:.1f} h" if mean >= 3600 else f"{mean:.0f} s"


def figure(data: Comparison) -> Any:
    """Draw correct rate, compile rate and base reward against gradings: a line for each preset, with 95 % bands.

    Args:
        data: the comparison.

    Returns:
        A matplotlib figure.

    Raises:
        UsageError: matplotlib is not installed.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    style.check()
    panels = [m for m in PANELS if m in data["metrics"]]
    looks = dict(zip(data["presets"], [*style.PALETTE, *[style.GREY] * len(data["presets"])]))
    with style.themed():
        sheet = style.sheet(TITLE, HEIGHT)
        for axes, metric in zip(sheet.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            of = data["metrics"][metric]
            for preset, colour in looks.items():
                _curve(axes, of[preset]["curve"], colour)
            axes.set_title(METRICS[metric].capitalize())
            axes.set_xlabel("gradings")
            axes.set_xlim(0, data["budget_gradings"])
            axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: style.short(v)))
            tops = [v for p in of.values() for v in (*p["curve"]["value"], *p["curve"]["high"]) if v is not None]
            if metric in RATES:
                style.shares(axes, "y", style.ceiling_of(tops))
            else:
                axes.set_ylim(min(0.0, *tops), None)
            if metric == data["headline"]:
                _goal(axes, data, looks)
            if max(tops, default=0.0) <= 0:
                axes.text(0.5, 0.5, "0 in every run", transform=axes.transAxes, ha="center", alpha=style.DIM)
        entries: list[tuple[str, Mapping[str, Any]]] = [
            (f"{p} ({len(data['seeds'][p])} seed{'s' * (len(data['seeds'][p]) != 1)})",
             {"color": c, "linestyle": "-", "linewidth": 2.0, "marker": "none"})
            for p, c in looks.items()
        ]  # fmt: skip
        if data["metrics"].get(data["headline"], {}).get(data["first"], {}).get("target"):
            mark = {"marker": "D", "markerfacecolor": "none", "color": style.TEXT}
            entries.append((f"{data['first']}'s final rate reached", mark))
        style.key(sheet, entries)
        note = f"bands: 95 % t interval over seeds; window of {data['smoothing_gradings']:,.0f} gradings, centred"
        sheet.supxlabel(note, fontsize=8, x=0.99, ha="right", alpha=style.DIM)
        return style.settled(sheet)


def _curve(axes: Any, curve: Comparison, colour: str) -> None:
    at = [(x, v, lo, hi) for x, v, lo, hi in zip(*(curve[k] for k in ("gradings", "value", "low", "high"))) if v is not None]
    if not at:
        return
    x = [p[0] for p in at]
    # Where no two seeds differ there is no interval: the band has no width.
    low, high = [p[1] if p[2] is None else p[2] for p in at], [p[1] if p[3] is None else p[3] for p in at]
    axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
    axes.plot(x, [p[1] for p in at], color=colour, linewidth=1.9, zorder=3)


def _goal(axes: Any, data: Comparison, looks: Mapping[str, str]) -> None:
    """Mark the first preset's final value, and where each preset first reaches it."""
    of = data["metrics"][data["headline"]]
    target = of[data["first"]]["target"]
    if not target:
        return
    axes.axhline(target, color=style.TEXT, linewidth=0.9, linestyle=(0, (4, 3)), alpha=style.DIM, zorder=2)
    for preset, colour in looks.items():
        if (x := of[preset]["gradings_to_target"]) is not None:
            axes.plot([x], [target], "D", color=colour, markerfacecolor="white", markeredgewidth=1.6, markersize=6, zorder=5)


def write(data: Comparison, folder: Path, files: Sequence[str] = (NAME,)) -> list[Path]:
    """Write ``comparison.md``, ``.png`` and ``.svg``.

    Args:
        data: the comparison.
        folder: where to write.
        files: names of the files, without their endings.

    Returns:
        The files.
    """
    made = []
    for name in files:
        page = folder / f"{name}.md"
        page.write_text(markdown(data), encoding="utf-8")
        made += [page, *style.write(figure(data), folder, name)]
    return made
