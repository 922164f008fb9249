"""Figures appear where their data is there, and their SVG can stand in any page."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from kbx_env.eval import plot_style as style
from kbx_env.eval import plots
from kbx_env.eval.report_data import Study, from_reports

from kbx_env.errors import UsageError

CATEGORIES = (
    "activation convolution fusion index linearalgebra loss math matrixmultiply normalization optimizer pooling quantization "
    "random reduce spatialops"
).split()
WRONG = ("incorrect", "rejected", "compile_error", "runtime_error", "timeout", "malformed")
ALWAYS = {"rates", "categories", "failures"}


def row(
    task: str, category: str, verdict: str = "correct", *, sample: int = 0, speedup: float | None = None, **more: Any
) -> dict[str, Any]:
    """One row of a report, as far as figures look at it."""
    fault = None if verdict == "correct" else "infra" if verdict == "infra_fault" else "policy"
    correct = verdict == "correct"
    case = {"case": "n=1", "eager_us": 90.0, "candidate_us": 90 / (speedup or 1), "floor_us": 20.0, "void": False}
    timing = {"speedup": speedup, "low": speedup, "high": speedup, "floor_ratio": 9.0, "cases": [case]} if speedup else None
    return {
        "task": f"{category}/{task}", "category": category, "difficulty": 1, "sample": sample, "verdict": verdict, "fault": fault,
        "correct": correct, "compiled": verdict in ("correct", "incorrect", "runtime_error", "timeout"), "message": "",
        "timing": timing, "evidence": None, "cases": None, "turns": [], "notes": {},
        "spent": {"calls": None, "prompt_tokens": None, "completion_tokens": None, "untold": None, "gradings": 1}, **more,
    }  # fmt: skip


def policy(name: str, rows: list[dict[str, Any]], timed: bool = False, device: str = "NVIDIA H100 80GB HBM3") -> dict[str, Any]:
    return {"policy": name, "manifest": {"timed": timed, "device": device}, "about": {}, "tasks": rows}


def full(name: str, seed: int, samples: int = 2) -> dict[str, Any]:
    """A policy with everything there is to draw."""
    draw, rows = random.Random(seed), []
    for category in CATEGORIES:
        for k in range(4 * samples):
            good = draw.random() < 0.6
            spent = {"calls": 3, "prompt_tokens": 500, "completion_tokens": 90, "untold": k % 2, "gradings": 4}
            told: dict[str, Any] = {"spent": spent}
            turn = {"round": 0, "compiled": True, "correct": False, "speedup": None, "verdict": "incorrect"}
            told["turns"] = [turn, {**turn, "round": 2, "correct": good, "speedup": 1.4 if good else None}]
            if good:
                told |= {"speedup": draw.lognormvariate(0.2, 0.7), "cases": {"passed": 9, "total": 9}}
                told["evidence"] = {"launches": 9 * draw.randint(1, 4), "moved_bytes": draw.randint(100, 900), "ideal_bytes": 100}
            rows.append(row(f"t{k // samples}", category, "correct" if good else draw.choice(WRONG), sample=k % samples, **told))
    # One category is not graded twice: the figure shows a dash there.
    by_category: dict[str, dict[str, int]] = {}
    for r in rows:
        sums = by_category.setdefault(r["category"], {"n": 0, "contract": 0, "paper": 0})
        sums["n"] += 1
        sums["contract"] += r["correct"]
        sums["paper"] += draw.random() < 0.5
    by_category.pop(draw.choice(CATEGORIES))
    return policy(name, rows, timed=True) | {"beside": {"grading": "paper", "by_category": by_category}}


def drawn(*reports: dict[str, Any]) -> dict[str, Any]:
    return plots.figures(from_reports(reports))


@pytest.fixture(scope="module")
def eight() -> Study:
    names = ["expert", "<b>&\"'$x^2$</b>", *(f"policy-{k}-" + "x" * 71 for k in range(5)), "naïve: 核\x00\ud800"]
    return from_reports([full(n, k) for k, n in enumerate(names)])


@pytest.fixture(scope="module")
def whole(eight: Study) -> dict[str, Any]:
    return plots.figures(eight)


def test_everything_is_drawn_where_everything_is_known(whole: dict[str, Any]) -> None:
    assert list(whole) == list(plots.TITLES) == list(plots.CAPTIONS)


def test_a_cpu_study_has_no_speeds() -> None:
    assert set(drawn(policy("a", [row("x", "math"), row("y", "loss", "incorrect")]))) == ALWAYS


def test_each_figure_needs_its_data() -> None:
    def more(report: dict[str, Any]) -> set[str]:
        return set(drawn(report)) - ALWAYS

    assert more(policy("a", [row("x", "math", speedup=2.0)], timed=True)) == {"speedups", "fast_p", "roofline"}
    bare = row("x", "math", speedup=2.0)
    bare["timing"]["cases"] = []
    assert more(policy("a", [bare], timed=True)) == {"speedups", "fast_p"}
    assert more(policy("a", [row("x", "math", sample=s) for s in range(3)])) == {"pass_at_k"}
    turns = [{"round": 0, "compiled": True, "correct": True, "speedup": None}]
    assert more(policy("a", [row("x", "math", turns=turns)])) == {"trajectory"}
    moved = {"launches": 3, "moved_bytes": 8, "ideal_bytes": 4}
    assert more(policy("a", [row("x", "math", evidence=moved)])) == {"traffic"}
    assert more(policy("a", [row("x", "math", "incorrect", evidence=moved)])) == set(), "a wrong kernel moves too little for free"
    for spent in ({"calls": 2}, {"gradings": 5}, {"calls": 1, "prompt_tokens": 7, "completion_tokens": 1, "untold": 0}):
        assert more(policy("a", [row("x", "math", spent=spent)])) == {"cost"}
    assert more(policy("a", [row("x", "math", spent={"gradings": 1})])) == set(), "a grading an answer tells nothing"


def test_the_ceiling_needs_an_expert_and_a_shared_task() -> None:
    def ours(task: str, name: str) -> dict[str, Any]:
        return policy(name, [row(task, "math", speedup=2.0)], timed=True)

    assert "ceiling" in drawn(ours("x", "expert"), ours("x", "a"))
    assert "ceiling" in drawn(ours("x", "expert (runs)"), ours("x", "a"))
    assert "ceiling" not in drawn(ours("x", "expert"), ours("y", "a"))
    assert "ceiling" not in drawn(ours("x", "b"), ours("x", "a")) and "ceiling" not in drawn(ours("x", "expert"))


def test_nothing_judged_nothing_drawn() -> None:
    masked = policy("a", [row("x", "math", "infra_fault")])
    assert drawn(masked) == {} and drawn(policy("a", [])) == {} and drawn() == {}
    assert set(drawn(masked, policy("b", [row("x", "math")]))) == ALWAYS, "one that is masked stands beside one that is not"


def test_none_correct_is_drawn_as_such() -> None:
    wrong = policy("zeros", [row(f"t{k}", c, WRONG[k % 6]) for k, c in enumerate(CATEGORIES)], timed=True)
    assert set(drawn(wrong)) == ALWAYS
    found = drawn(wrong, full("b", 1, 1))
    said = [t.get_text() for t in found["speedups"].axes[0].texts]
    assert "none correct" in said and len(found["fast_p"].axes[0].lines) == 3, "eager's line and two curves, one of them at 0"


def test_bytes_of_the_timed_cases_give_rates_against_the_datasheet() -> None:
    timed = row("x", "math", speedup=2.0)
    timed["timing"]["cases"][0] |= {"ideal_bytes": 45_000_000, "flops": 9_000_000}
    figure = drawn(policy("a", [timed], timed=True))["roofline"]
    across, compute = figure.axes
    assert "H100" in across.get_xlabel() and across.lines[0].get_xdata()[0] == 3350.0
    assert across.lines[1].get_xdata()[0] == pytest.approx(1000.0) and compute.lines[1].get_xdata()[0] == pytest.approx(0.2)
    for unknown in ("NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Radeon"):
        assert style.peaks(unknown) is None
    assert style.peaks("NVIDIA GeForce RTX 4090") and style.peaks("NVIDIA H200")


def test_svg_stands_in_any_page(whole: dict[str, Any]) -> None:
    ids: list[str] = []
    for name, figure in whole.items():
        text = plots.inline_svg(figure)
        root = ElementTree.fromstring(text)
        assert text.startswith("<svg ") and root.get("width") == "100%" and root.get("height") is None and root.get("viewBox")
        assert root.get("aria-label") == plots.CAPTIONS[name] and root[0].text == plots.TITLES[name]
        assert re.findall(r"https?:[^\"' ]*", text) == ["http://www.w3.org/2000/svg"]
        assert style.TEXT not in text and "currentColor" in text and "#000000" not in text and "<style" not in text
        assert "system-ui" in text and "DejaVu" not in text
        own = [e.get("id") for e in root.iter() if e.get("id")]
        used = re.findall(r'(?:href="#|url\(#)([^")]+)', text)
        assert used and set(used) <= set(own) and len(set(own)) == len(own)
        ids += [i for i in own if i]
    assert len(set(ids)) == len(ids), "ids of two figures clash"
    assert not set(re.findall(' id="([^"]+)', plots.inline_svg(figure, "other"))) & set(ids)


def test_equal_data_equal_bytes(eight: Study, whole: dict[str, Any], tmp_path: Path) -> None:
    some = {k: whole[k] for k in ("rates", "speedups", "traffic")}
    files = plots.save(some, tmp_path / "a")
    assert sorted(f.name for f in files) == sorted(f"{k}.{end}" for k in some for end in ("png", "svg"))
    again = plots.figures(eight)
    plots.save({k: again[k] for k in some}, tmp_path / "b")
    assert all(f.read_bytes() == (tmp_path / "b" / f.name).read_bytes() for f in files)
    assert all(plots.inline_svg(again[k]) == plots.inline_svg(whole[k]) for k in whole)


def test_nothing_is_cut_off_and_rows_of_text_keep_apart(whole: dict[str, Any]) -> None:
    from matplotlib.text import Text

    for name, figure in whole.items():
        with style.themed():
            figure.draw_without_rendering()
        width, height = figure.bbox.width, figure.bbox.height
        shown = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
        for axes in figure.axes:  # ticks outside of the limits are not drawn
            for axis, low, high in ((axes.xaxis, *sorted(axes.get_xlim())), (axes.yaxis, *sorted(axes.get_ylim()))):
                hidden = {id(t) for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high or not axes.get_visible()
                          for t in (tick.label1, tick.label2)}  # fmt: skip
                shown = [t for t in shown if id(t) not in hidden]
        boxes = [(t, Text.get_window_extent(t)) for t in shown if t.axes is None or t.axes.get_visible()]
        for t, box in boxes:
            assert box.x0 >= -2 and box.y0 >= -2 and box.x1 <= width + 2 and box.y1 <= height + 2, (name, t.get_text())
        flat = [(t, box) for t, box in boxes if not t.get_rotation()]
        for k, (one, a) in enumerate(flat):
            for two, b in flat[k + 1 :]:
                apart = a.x1 <= b.x0 + 2 or b.x1 <= a.x0 + 2 or a.y1 <= b.y0 + 3 or b.y1 <= a.y0 + 3
                assert apart or one.get_text() == two.get_text(), (name, one.get_text(), two.get_text())


@pytest.mark.parametrize("count", [1, 12])
def test_any_number_of_policies(count: int) -> None:
    found = drawn(*(full("x" * 80 + str(k % 2), k, 1) for k in range(count)))
    assert {"rates", "speedups", "trajectory", "cost"} <= set(found)
    names = [t.get_text() for t in found["rates"].axes[0].get_yticklabels()]
    assert len(set(names)) == count and all(len(n) <= style.NAME for n in names)


def test_the_users_settings_stay(whole: dict[str, Any]) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    drawn(policy("a", [row("x", "math")]))
    assert dict(matplotlib.rcParams) == before


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install .*\[report\]"):
        drawn(policy("a", [row("x", "math")]))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="writable folder"):
        plots.save(drawn(policy("a", [row("x", "math")])), tmp_path / "file")


def test_helpers() -> None:
    assert style.shorten("abcdefghij", 7) == "abc…hij" and style.shorten("\n") == "?" and style.shorten("a\nb") == "a b"
    assert style.spread([0.5, 0.5, 0.1], 0.2) == pytest.approx([0.4, 0.6, 0.1])
    assert style.spread([1.0, 1.0], 0.2) == pytest.approx([0.8, 1.0])
    assert style.ticks(0.2, 10) == [0.2, 0.5, 1, 2, 5, 10] and all(
        1 <= len(style.ticks(1.0 * lo, lo * f)) <= 8 for lo in (1e-5, 0.3, 7) for f in (1.5, 10, 1e9)
    )
    offsets = style.swarm([1.0] * 500 + [3.0], (0.5, 5.0))
    assert max(map(abs, offsets)) <= 0.35 and offsets[-1] == 0 and len(set(offsets)) == 500
    assert [style.percent(v) for v in (0, 0.005, 0.5, 0.9971, 1)] == ["0 %", "0.5 %", "50 %", "99.7 %", "100 %"]
