"""Table and figure of the study."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kbx_env.eval import plot_style as style

from experiments.true_reward.cheats import FAMILIES

SHARE = 0.05
"""Share of the steps at either end that the table averages, and width of the figure's moving average."""
NAMES = {"naive": "naive grader", "ours": "our grader", "naive-speed": "naive grader with speed",
         "naive-gpu": "naive grader with a GPU's speed"}  # fmt: skip
COLUMNS = ("paid", "correct", "exploits", "wrong", "other", "fooled")
_LINES = {"exploits": ("cheats", "#D55E00"), "correct": ("truly correct", "#009E73")}


def ends(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float]:
    """Return the mean of a column over the first and over the last twentieth of a run's steps.

    Args:
        rows: of one run, in order.
        name: the column.

    Returns:
        Both means.
    """
    values = [r[name] for r in rows if r[name] is not None]
    some = max(1, round(SHARE * len(values)))
    return statistics.fmean(values[:some]), statistics.fmean(values[-some:])


def runs_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, list[Mapping[str, Any]]]]:
    """Return the rows of each run, by reward and seed."""
    found: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for row in rows:
        found.setdefault(row["reward"], {}).setdefault(row["seed"], []).append(row)
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return Markdown tables: both ends of each run, and the families of cheats at the end.

    Args:
        rows: of ``study.count``.

    Returns:
        The tables. ``paid`` is a mean reward, all other columns are shares of the answers.
    """
    lines = [
        "| reward | seed | " + " | ".join(f"{c}, start | {c}, end" for c in COLUMNS) + " |",
        "|---|---|" + "---|" * (2 * len(COLUMNS)),
    ]
    found = runs_of(rows)
    for reward, seeds in found.items():
        both = {seed: [ends(run, c) for c in COLUMNS] for seed, run in seeds.items()}
        if len(both) > 1:
            both["mean"] = [  # type: ignore[index]
                tuple(statistics.fmean(b[k][end] for b in list(both.values())) for end in (0, 1)) for k in range(len(COLUMNS))
            ]
        for seed, values in both.items():
            cells = [f"{v:.2f}" if c == "paid" else _percent(v) for c, pair in zip(COLUMNS, values, strict=True) for v in pair]
            lines.append(f"| {NAMES[reward]} | {seed} | {' | '.join(cells)} |")
    lines += ["", "| cheats at the end | " + " | ".join(FAMILIES) + " |", "|---|" + "---|" * len(FAMILIES)]
    for reward, seeds in found.items():
        for seed, run in seeds.items():
            shares = [ends([{f: r["families"][f]} for r in run], f)[1] for f in FAMILIES]
            lines.append(f"| {NAMES[reward]}, seed {seed} | {' | '.join(map(_percent, shares))} |")
    credited = max(r["credited"] for r in rows)
    lines += ["", f"Largest share of a step's answers that are cheats and correct for our grader: {_percent(credited)}."]
    return "\n".join(lines) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def draw(rows: Sequence[Mapping[str, Any]], png: str | Path) -> Path:
    """Draw the shares of cheats and of truly correct answers over the steps, one panel for each reward.

    Args:
        rows: of ``study.count``.
        png: the picture.

    Returns:
        The picture.

    Raises:
        UsageError: matplotlib is not installed.
    """
    style.check()
    found = runs_of(rows)
    with style.themed():
        sheet = style.sheet("true reward", 3.3)
        panels = sheet.subplots(1, len(found), sharey=True, squeeze=False)[0]
        for axes, (reward, seeds) in zip(panels, found.items(), strict=True):
            for name, (_, colour) in _LINES.items():
                curves = [_smooth([r[name] for r in run]) for run in seeds.values()]
                steps = list(range(1, min(map(len, curves)) + 1))
                across = list(zip(*curves))
                axes.fill_between(steps, list(map(min, across)), list(map(max, across)), color=colour, alpha=0.2, linewidth=0)
                for one in curves:
                    axes.plot(steps, one[: len(steps)], color=colour, linewidth=0.6, alpha=0.7)
                axes.plot(steps, list(map(statistics.fmean, across)), color=colour, linewidth=2.2)
            axes.set_title(f"Reward: {NAMES[reward]}\n{len(seeds)} seed{'s' * (len(seeds) != 1)}")
            axes.set_xlabel("step of GRPO")
            axes.set_xlim(0, None)
            style.shares(axes, "y")
        panels[0].set_ylabel("share of the answers")
        style.key(sheet, [(text, {"color": colour, "linestyle": "-", "marker": "none", "linewidth": 2.2})
                          for text, colour in _LINES.values()])  # fmt: skip
        note = "thick: mean over seeds; thin: each seed; band: from the lowest to the highest"
        sheet.supxlabel(f"{note}; all smoothed over a twentieth of the steps", fontsize=8, x=0.99, ha="right", alpha=style.DIM)
        style.settled(sheet).savefig(png, dpi=150, metadata={"Software": None})
    return Path(png)


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the mean over a twentieth of the values around each; the window is cut off at both ends."""
    half = max(1, round(SHARE * len(values))) // 2
    return [statistics.fmean(values[max(0, k - half) : k + half + 1]) for k in range(len(values))]
