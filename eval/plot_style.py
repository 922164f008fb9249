"""The style of the report's figures: colours, names, ticks, labels that do not overlap, and SVG for light and dark pages."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import re
import statistics
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kbx_env.errors import UsageError
from kbx_env.extras import install_hint

TITLES = {
    "rates": "Compile and correct rate", "categories": "Correct answers by category", "speedups": "Speedups of correct kernels",
    "fast_p": "Correct and faster than p", "trajectory": "Progress by round", "failures": "Verdicts",
    "pass_at_k": "pass@k", "roofline": "Distance from the device's limits", "ceiling": "Speedup against the expert's",
    "traffic": "Bytes moved and launches by category", "cost": "Correct rate against what it took",
    "gradings": "Correct under two gradings, by category",
}  # fmt: skip
CAPTIONS = {
    "rates": "Share of judged answers that compile (left) and that are correct (right): each dot is a policy, its line the 95 % "
             "Wilson interval over answers; intervals that overlap widely do not tell policies apart.",
    "categories": "Correct of judged answers by category (columns) and policy (rows): the darker the cell, the larger the share.",
    "speedups": "Speedup over torch eager on a log axis, one dot for each correct kernel: right of the line at 1 is faster; hollow "
                "dots are times that nobody can explain yet.",
    "fast_p": "Share of all judged answers that are correct and more than p times as fast as torch eager: at the left edge nearly "
              "every correct kernel counts, at p = 1 only those faster than eager.",
    "trajectory": "What episodic policies have reached by each round of submissions: share of judged answers compiled and correct "
                  "so far, and the geometric mean of the best speedup so far, where an answer counts 1 (eager) until it is faster.",
    "failures": "How the judged answers of each policy ended, as shares of the bar with counts in it; masked answers (faults of "
                "the infrastructure) are not in the bar.",
    "pass_at_k": "The chance that at least one of k answers to a task is correct, averaged over tasks (unbiased estimate).",
    "roofline": "How near correct kernels come to what the device can do, one dot for each kernel (geometric mean over its timed "
                "cases) on a log axis: the nearer to the line, the less is left to gain; hollow dots are times that nobody can "
                "explain yet.",
    "ceiling": "Speedup over eager of each policy (vertical) against the expert kernel's (horizontal), one dot for each task that "
               "both solved (geometric mean over samples): above the diagonal the policy beats the expert.",
    "traffic": "Bytes that correct kernels moved against the least that must be moved (left, log axis) and their launches for a "
               "call (right, log axis), one dot for each kernel, by category: 1 is a fused kernel without waste.",
    "cost": "Correct rate (height) against the mean of what an answer took (horizontal), one dot for each policy: up and to the "
            "left is better; hollow dots are lower bounds, since some calls told no tokens.",
    "gradings": "Correct answers of each category as a share of those judged, under the contract (filled dots) and under the "
                "paper's check (hollow dots), one panel for each policy: on the line between the two the gradings disagree.",
}  # fmt: skip
"""One sentence a figure: what is seen and how it is read."""
VERDICTS = {
    "correct": ("correct", "#009E73"), "incorrect": ("incorrect", "#D55E00"), "rejected": ("rejected", "#CC79A7"),
    "compile_error": ("compile", "#E69F00"), "runtime_error": ("run time", "#56B4E9"), "timeout": ("timeout", "#0072B2"),
    "malformed": ("malformed", "#9a9a9a"),
}  # fmt: skip
"""What a verdict is called, and its colour."""
TEXT = "#1d1d1f"
"""Text and axes, as on the report's page; ``currentColor`` in SVG."""
DIM = 0.68
"""Opacity of text that matters less."""
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", TEXT, "#F0E442")
"""Okabe and Ito (2008), distinct for colour-blind readers too; their black is the colour of the text, yellow comes last."""
MARKERS = "osD^vPX*"
GREY = "#8c8c8c"
"""Policies beyond the palette, and what is no policy."""
WIDTH = 9.0
"""Inches of every figure; 9 points of text are then some 16 pixels on a page of 1200."""
LINE = 0.17
"""Inches from one line of text to the next."""
NAME = 28
"""Columns of a policy's name."""
_DPI = 150
_FONT = "DejaVu Sans"  # comes with matplotlib, and is wider than what pages show instead
_RC: Any = {
    "font.family": [_FONT], "font.size": 9, "text.color": TEXT, "text.parse_math": False, "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT, "axes.titlesize": 9, "axes.labelsize": 9, "axes.linewidth": 0.6, "axes.spines.top": False,
    "axes.spines.right": False, "xtick.color": TEXT, "ytick.color": TEXT, "xtick.labelsize": 8.5, "ytick.labelsize": 9,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.major.size": 3, "ytick.major.size": 3, "axes.grid": True,
    "grid.color": TEXT, "grid.alpha": 0.13, "grid.linewidth": 0.6, "axes.axisbelow": True, "axes.facecolor": "none",
    "legend.frameon": False, "legend.fontsize": 8.5, "legend.handletextpad": 0.4, "legend.columnspacing": 1.4,
    "lines.solid_capstyle": "round", "axes.unicode_minus": False, "svg.fonttype": "none", "svg.hashsalt": "kbx_env",
    "axes.titlelocation": "left", "path.simplify": False, "figure.facecolor": "white", "savefig.facecolor": "auto",
}  # fmt: skip

MARKS: list[tuple[str, Mapping[str, Any]]] = [
    ("median", {"marker": "|", "markersize": 11, "markeredgewidth": 1.6, "color": TEXT}),
    ("geometric mean", {"marker": "D", "markerfacecolor": "none", "color": TEXT}),
]  # fmt: skip
"""What ``strips`` draws on top of the dots."""


def check(what: str = "figures need", instead: str = "") -> None:
    """Check, before a long run, that figures can be drawn.

    Args:
        what: subject of the error message, such as "figures need".
        instead: what to do without matplotlib, for the error message.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib")
    except ImportError as e:
        raise UsageError(f"{what} matplotlib: {install_hint('report')}{instead}") from e


@contextlib.contextmanager
def themed() -> Iterator[None]:
    """Apply matplotlib's settings for the report within the block, and restore the user's own after it."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcParams.update({k: v for k, v in matplotlib.rcParamsDefault.items() if k != "backend"})
        matplotlib.rcParams.update(_RC)
        yield


Strip = Sequence[tuple[float, bool]]
"""Values of dots, and whether each is hollow."""


def sheet(key: str, height: float) -> Any:
    """Return an empty figure of the report's width.

    Args:
        key: name of the figure, kept as its label.
        height: in inches.

    Returns:
        A matplotlib figure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(WIDTH, round(height, 2)), layout="constrained", label=key)
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)
    return figure


def settled(figure: Any) -> Any:
    """Lay a figure out once and for all, so that it is the same whenever it is written; return it."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def shorten(text: str, width: int = NAME) -> str:
    """Shorten a text, and remove characters that XML forbids.

    Args:
        text: the text.
        width: the most columns.

    Returns:
        The text, without its middle if it is too long.
    """
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split()) or "?"
    if _columns(text) <= width:
        return text
    end = width // 2
    head, tail = text, text[-end:]
    while _columns(tail) > end:
        tail = tail[1:]
    while _columns(head) > width - 1 - _columns(tail):
        head = head[:-1]
    return f"{head}…{tail}"


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def labels(names: Sequence[str], width: int = NAME) -> list[str]:
    """Shorten names so that they stay distinct.

    Args:
        names: the names.
        width: the most columns of each.

    Returns:
        A short name for each.
    """
    found: list[str] = []
    for name in names:
        short, k = shorten(name, width), 2
        while short in found:
            short, k = f"{shorten(name, width - 4)} ({k})", k + 1
        found.append(short)
    return found


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


def percent(value: float) -> str:
    """Format a rate."""
    return f"{100 * value:.{1 if 0 < value < 0.0995 or 0.995 <= value < 1 else 0}f} %"


def short(value: float) -> str:
    """Format a number in few characters."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def on_blocks(colour: str) -> str:
    """Return black or white, whichever is easier to read on an opaque block of a colour."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return "#ffffff" if sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) < 0.2 else "#1a1a1a"


def rows(axes: Any, names: Sequence[str]) -> None:
    """Set up one row for each name, from the top.

    Args:
        axes: matplotlib axes.
        names: of the rows.
    """
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(False, axis="y")


def shares(axes: Any, side: str = "x", top: float = 1.0) -> None:
    """Make an axis linear from 0 to a largest rate.

    Args:
        axes: matplotlib axes.
        side: ``x`` or ``y``.
        top: the largest rate.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis = getattr(axes, f"{side}axis")
    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.3g} %"))
    getattr(axes, f"set_{side}lim")(-0.02 * top, 1.02 * top)


def ceiling_of(values: Sequence[float]) -> float:
    """Return a round rate above all values, so that small rates can be told apart."""
    most = max(values, default=1.0)
    return next((t for t in (0.05, 0.1, 0.2, 0.4, 0.6) if most <= 0.95 * t), 1.0)


def logarithmic(axes: Any, side: str, values: Sequence[float], unit: str = "", most: int = 8) -> None:
    """Make an axis logarithmic around values, with ticks at round numbers.

    Args:
        axes: matplotlib axes.
        side: ``x`` or ``y``.
        values: that the axis must show.
        unit: after the numbers.
        most: the most ticks.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = min(values), max(values)
    pad = max(1.06, (high / low) ** 0.05) if high / low >= 1.3 else 1.12
    low, high = low / pad, high * pad
    axis = getattr(axes, f"{side}axis")
    getattr(axes, f"set_{side}scale")("log")
    getattr(axes, f"set_{side}lim")(low, high)
    axis.set_major_locator(FixedLocator(ticks(low, high, most)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{short(v)}{unit}"))


def ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Return round numbers for the ticks of a log axis.

    Args:
        low: lower end.
        high: upper end.
        most: the most ticks.

    Returns:
        The numbers, as many as there may be.
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    if high / low < 3:  # as good as linear
        widths = (s * 10.0**d for d in range(decades[0] - 3, decades[-1] + 1) for s in (1, 2, 5))
        step = next(s for s in widths if math.floor(high / s) - math.ceil(low / s) < most)
        return [float(f"{k * step:.6g}") for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    for steps, every in (
        ([1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8], 1), ([1, 1.5, 2, 3, 5, 7], 1),
        ([1, 2, 5], 1), ([1, 3], 1), ([1], 1), ([1], 2), ([1], 3), ([1], 6),
    ):  # fmt: skip
        found = [v for d in decades if d % every == 0 for s in steps if low <= (v := float(f"{s * 10.0**d:.6g}")) <= high]
        if len(found) <= most:
            break
    return found


def swarm(values: Sequence[float], span: tuple[float, float], room: float = 0.34, inches: float = 5.0) -> list[float]:
    """Return offsets that keep equal values on a log axis apart; the same for the same values.

    Args:
        values: the values.
        span: of the axis, (low, high).
        room: the largest offset to either side.
        inches: length of the axis.

    Returns:
        An offset for each value.
    """
    low, high = (math.log(v) for v in span)
    bins = max(1, round(inches / 0.065))
    seen: dict[int, list[int]] = {}
    for k, v in sorted(enumerate(values), key=lambda kv: (kv[1], kv[0])):
        seen.setdefault(round(bins * (math.log(v) - low) / ((high - low) or 1.0)), []).append(k)
    offsets = [0.0] * len(values)
    for held in seen.values():
        step = min(room / 4, 2 * room / max(len(held) - 1, 1))
        for k, index in enumerate(held):
            offsets[index] = step * ((k + 1) // 2) * (1 if k % 2 else -1)
    return offsets


def dots(axes: Any, at: Sequence[float], y: Sequence[float], colour: str, hollow: Sequence[bool] = (), size: float = 4.0) -> None:
    """Draw small dots. Of many dots only every n-th by value is drawn, so that the page opens fast.

    Args:
        axes: matplotlib axes.
        at: positions on the x axis.
        y: positions on the y axis.
        colour: of the dots.
        hollow: whether each is hollow, for a value that is not believed or only a bound.
        size: in points.
    """
    for empty in (False, True):
        kept = sorted((k for k in range(len(at)) if bool(hollow and hollow[k]) is empty), key=lambda k: at[k])
        kept = kept[:: 1 + len(kept) // 600]
        if not kept:  # an empty line would upset the layout
            continue
        axes.plot(
            [at[k] for k in kept], [y[k] for k in kept], "o", color=colour, markersize=size, alpha=None if empty else 0.7,
            markerfacecolor="none" if empty else colour, markeredgewidth=0.9 if empty else 0, clip_on=False, zorder=3,
        )  # fmt: skip


def strips(axes: Any, names: Sequence[str], colours: Sequence[str], found: Sequence[Strip], line: float | None) -> None:
    """Draw one row of dots for each policy, with median and geometric mean.

    Args:
        axes: matplotlib axes.
        names: of the policies.
        colours: of the policies.
        found: (value, hollow) of each dot of a policy.
        line: a value that the axis includes and marks.
    """
    every = [v for of in found for v, _ in of] + ([] if line is None else [line])
    logarithmic(axes, "x", every)
    rows(axes, names)
    if line is not None:
        axes.axvline(line, color=TEXT, linewidth=1, zorder=2)
    for y, (colour, of) in enumerate(zip(colours, found, strict=True)):
        if not of:
            continue
        at = [v for v, _ in of]
        offsets = swarm(at, axes.get_xlim())
        dots(axes, at, [y + o for o in offsets], colour, [h for _, h in of])
        axes.plot([statistics.median(at)] * 2, [y - 0.42, y + 0.42], color=TEXT, linewidth=1.6, zorder=4)
        axes.plot([geomean(at)], [y], "D", color=colour, markeredgecolor=TEXT, markersize=6.5, zorder=5)


def say(axes: Any, y: float, text: str, dim: bool = False) -> None:
    """Write a text to the right of a row.

    Args:
        axes: matplotlib axes.
        y: the row.
        text: the text.
        dim: whether it is in a weak colour.
    """
    axes.text(1.03, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5, alpha=DIM if dim else None)


def spread(at: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """Return positions at least ``gap`` apart, as near as possible (least squares) to those wanted.

    Args:
        at: the positions wanted.
        gap: the smallest distance.
        low: lower bound, kept if the positions fit.
        high: upper bound, kept if the positions fit.

    Returns:
        The positions.
    """
    order = sorted(range(len(at)), key=lambda k: (at[k], k))
    pools: list[tuple[float, int]] = []
    for rank, k in enumerate(order):
        mean, n = at[k] - rank * gap, 1
        while pools and pools[-1][0] >= mean:
            earlier, m = pools.pop()
            mean, n = (earlier * m + mean * n) / (m + n), m + n
        pools.append((mean, n))
    last = max(low, high - (len(at) - 1) * gap)
    flat = [min(max(mean, low), last) for mean, n in pools for _ in range(n)]
    found = [0.0] * len(at)
    for rank, k in enumerate(order):
        found[k] = flat[rank] + rank * gap
    return found


def aside(axes: Any, ends: Sequence[tuple[float, str, str]], height: float, left: bool = False) -> None:
    """Write names beside the ends of curves, joined to them by a line.

    Args:
        axes: matplotlib axes.
        ends: (value, name, colour) of each curve.
        height: of the axes, in inches.
        left: on the left side.
    """
    to = axes.transAxes.inverted()
    y = [float(to.transform(axes.transData.transform((axes.get_xlim()[0], v)))[1]) for v, _, _ in ends]
    for at, text_at, (_, name, colour) in zip(y, spread(y, LINE / height, 0.0, 1.0), ends, strict=True):
        axes.annotate(
            name, (0.0 if left else 1.0, at), (-0.045 if left else 1.045, text_at), "axes fraction", "axes fraction",
            ha="right" if left else "left", va="center", fontsize=8.5, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 1.4, "shrinkA": 1, "shrinkB": 0,
                        "relpos": (1.0 if left else 0.0, 0.5)},
        )  # fmt: skip


def key(figure: Any, entries: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Explain the marks of a figure above its axes.

    Args:
        figure: matplotlib figure.
        entries: (text, properties of the marker) of each mark.
    """
    from matplotlib.lines import Line2D

    widest = max(_columns(text) for text, _ in entries) * 0.075 + 0.45
    columns = max(1, min(len(entries), int(WIDTH / widest)))
    plain: Mapping[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 6}
    handles = [Line2D([], [], **{**plain, **look}, label=text) for text, look in entries]
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, borderaxespad=0.2)


def peaks(device: str) -> tuple[str, float, float] | None:
    """Return name, GB/s and fp16 TFLOP/s of a device by its datasheet; ``None`` for unknown devices and other variants."""
    from kbx_env.backends import cost

    words = re.split("[^a-z0-9]+", device.lower())
    known = [n for n in cost.names() if n in words or n.startswith("rtx") and n in "".join(words)]
    if not known or {"pcie", "nvl", "mig", "laptop", "40gb", "d"} & set(words):
        return None
    found = cost.load(known[0])
    return known[0].upper(), found.dram_gbs, found.tensor_tflops.get("f16", 0.0)


def svg(figure: Any, prefix: str = "", inline: bool = False) -> str:
    """Return a figure as one ``<svg>``; its texts take the colour of the page.

    Args:
        figure: matplotlib figure.
        prefix: of its ids.
        inline: leave out width and height, so that it is as wide as its place.

    Returns:
        The markup.
    """
    called = str(figure.get_label())
    buffer = io.StringIO()
    with themed():
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = re.sub(r"<!DOCTYPE.*?>", "", buffer.getvalue(), count=1, flags=re.DOTALL)
    root = ElementTree.fromstring(re.sub(r"<\?xml.*?\?>", "", text, count=1))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):  # its rule would hold for the whole page
                parent.remove(child)
    own = {"id": ("", prefix), "href": ("#", f"#{prefix}"), "clip-path": ("(#", f"(#{prefix}"), "style": (TEXT, "currentColor")}
    for element in root.iter():
        element.tag = element.tag.rsplit("}", 1)[-1]
        attributes = [(name.rsplit("}", 1)[-1], value) for name, value in element.attrib.items()]
        element.attrib.clear()
        for name, value in attributes:
            old, new = own.get(name, ("", ""))
            value = value.replace(old, new) if old else new + value
            element.set(name, value.replace(f"'{_FONT}'", "system-ui, sans-serif"))
    size = {} if inline else {k: root.get(k, "") for k in ("width", "height")}
    box = root.get("viewBox", "")
    root.attrib.clear()
    root.attrib.update(
        {"xmlns": "http://www.w3.org/2000/svg", "viewBox": box, **({"width": "100%"} if inline else size), "role": "img",
         "aria-label": CAPTIONS.get(called, called), "style": "stroke-linejoin: round; stroke-linecap: butt"}
    )  # fmt: skip
    name_of = ElementTree.Element("title")
    name_of.text = TITLES.get(called, called)
    root.insert(0, name_of)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def write(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write ``name.png`` and ``name.svg``.

    Args:
        figure: matplotlib figure.
        folder: of the files.
        name: without ending.

    Returns:
        The files.
    """
    files = [folder / f"{name}.png", folder / f"{name}.svg"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with themed():
            figure.savefig(files[0], dpi=_DPI, metadata={"Software": None})
        files[1].write_text(svg(figure), encoding="utf-8")
    except OSError as e:
        raise UsageError(f"cannot write the figure {str(files[0])!r}: {e.strerror or e}; give a writable folder") from e
    return files
