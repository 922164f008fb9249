"""The report in a real browser: nothing overflows, nothing errs, links lead somewhere. Skips without Chromium."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kbx_env.eval import report

from kbx_env.outcome import Cases, CaseTime, Evidence, Fault, Outcome, Stage, Timing, Verdict

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
sync_api = pytest.importorskip("playwright.sync_api")
FLAGS = ("--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
         "--disable-sync").split()  # fmt: skip


def grade(task: str, source: bytes, **options: Any) -> Outcome:
    """Some of everything, timed as if on a GPU, with the words of a hostile kernel."""
    number = sum(task.encode()) + len(source)
    sha = hashlib.sha256(source).hexdigest()
    common = {"task": task, "backend": "cpu", "grading": str(options["grading"]), "source_sha256": sha}
    if number % 3 == 0 and options["grading"] == "contract":
        return Outcome(
            verdict=Verdict.INCORRECT, stage=Stage.CORRECT, fault=Fault.POLICY, message="strides", cases=Cases(1, 2), **common
        )
    if number % 5 == 0:
        bad = "<script>alert(1)</script> off by " + "very " * 40 + "much | [x](javascript:1)"
        return Outcome(verdict=Verdict.INCORRECT, stage=Stage.CORRECT, fault=Fault.POLICY, message=bad, cases=Cases(1, 2), **common)
    if number % 7 == 0:
        return Outcome(verdict=Verdict.INFRA_FAULT, stage=Stage.CORRECT, fault=Fault.INFRA, message="lost", **common)
    ratio = 0.5 + number % 11 / 5
    low, high = 0.97 * ratio, 1.03 * ratio
    times = tuple(CaseTime(f"n={4**k}", 10.0 * k * ratio, 10.0 * k, ratio, low, high, 30, 4.0 * k) for k in (1, 2, 3))
    timing = Timing(ratio, low, high, 2.5 * ratio, times, "NVIDIA H200")
    evidence = Evidence(2, moved_bytes=1000 * (1 + number % 3), ideal_bytes=1000)
    return Outcome(verdict=Verdict.CORRECT, stage=Stage.TIME, cases=Cases(2, 2), timing=timing, evidence=evidence, **common)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "out"
    argv = ["--policy", "expert", "--policy", "zeros", "--backend", "cpu", "--split", "all", "--out", str(out)]
    tasks = "activation/*,quantization/*,reduce/*,fusion/fused_a*"
    return report.run(report.parser().parse_args([*argv, "--tasks", tasks, "--gradings", "paper,contract"]), grade=grade)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as p:
        found = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


def _open(browser: Any, file: Path, width: int, dark: bool = False) -> tuple[Any, list[str]]:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    said: list[str] = []
    page.on("console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: said.append(str(e)))
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else said.append(f"asks for {r.url}"))
    page.goto(file.as_uri())
    return page, said


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_fits_and_says_no_error(browser: Any, folder: Path, width: int, dark: bool) -> None:
    page, said = _open(browser, folder / "report.html", width, dark)
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
    figures = page.query_selector_all("figure svg")
    assert len(figures) >= 5
    for figure in figures:
        box = figure.bounding_box()
        assert box["width"] > 200 and box["height"] > 60 and box["x"] >= 0
    page.close()


def test_every_link_leads_somewhere(browser: Any, folder: Path) -> None:
    page, _ = _open(browser, folder / "report.html", 1440)
    links = page.eval_on_selector_all("a[href]", "all => all.map(a => a.getAttribute('href'))")
    ids = set(page.eval_on_selector_all("[id]", "all => all.map(e => e.id)"))
    assert links
    for link in set(links):
        name, _, anchor = link.partition("#")
        assert (folder / name).is_file() if name else anchor in ids, link
    target = next(link for link in links if link.startswith("tasks/"))
    page.close()
    for width in (390, 1440):
        page, said = _open(browser, folder / target, width)
        assert said == [] and page.evaluate("document.documentElement.scrollWidth") <= width
        back = page.eval_on_selector_all("a[href]", "all => all.map(a => a.getAttribute('href'))")
        assert all((folder / target).parent.joinpath(b.partition("#")[0]).exists() for b in back if not b.startswith("#"))
        page.close()


def test_words_of_a_kernel_are_no_markup(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert "&lt;script&gt;alert" in page and page.count("<script") == 1, "our own script and no other"
    assert "](javascript" not in (folder / "report.md").read_text()


def test_one_page_shows_both_gradings_and_links_each_kernel(browser: Any, folder: Path) -> None:
    page, _ = _open(browser, folder / "report.html", 1440)
    rates = page.locator("#beside table").first
    assert rates.locator("th").all_inner_texts() == ["policy", "paper's check", "contract", "differ"]
    paper, contract = rates.locator("tr").nth(1).locator("td").all_inner_texts()[1:3]
    assert paper != contract and all(" of " in text and "%" in text for text in (paper, contract))
    answers = page.locator("#policy-0 table").last
    page.locator("#policy-0 details").last.evaluate("e => { e.open = true; }")
    heads = answers.locator("th").all_inner_texts()
    row = answers.locator("tr").nth(1)
    link = row.locator("td").nth(heads.index("kernel")).locator("a").get_attribute("href")
    assert link is not None and link.startswith("sources/") and (folder / link).read_text().strip()
    page.goto((folder / row.locator("a").first.get_attribute("href")).as_uri())  # type: ignore[operator]
    beside = page.locator("h3", has_text="Feedback").first.locator("a").get_attribute("href")
    assert beside == f"../{link}"
    page.close()


def test_tables_are_sorted_and_searched(browser: Any, folder: Path) -> None:
    page, said = _open(browser, folder / "report.html", 1440)
    table = page.locator("#policy-0 table").last
    page.locator("#policy-0 details").last.evaluate("e => { e.open = true; }")
    heads = table.locator("th").all_inner_texts()

    def column(name: str) -> list[str]:
        rows = table.locator("tr:not([hidden])").all()[1:]
        return [r.locator("td").nth(heads.index(name)).inner_text() for r in rows]

    def sort(name: str) -> list[str]:
        table.locator("th").nth(heads.index(name)).click()
        return column(name)

    def speeds(texts: list[str]) -> list[float]:
        return [float(t.removesuffix("x")) for t in texts if t != "–"]

    before = column("task")
    assert before == sorted(before) and sort("task") == before and sort("task") == before[::-1]
    up, down = sort("speedup"), sort("speedup")
    assert speeds(up) == sorted(speeds(up)) and speeds(down) == sorted(speeds(down), reverse=True)
    assert "–" in up and up[-1] == down[-1] == "–", "missing numbers are last"
    box = page.locator("#policy-0 input[type=search]").last
    box.fill("quantization correct")
    shown = column("task")
    assert 0 < len(shown) < len(before) and all(t.startswith("quantization/") for t in shown)
    assert f"{len(shown)} of {len(before)} rows" in page.locator("#policy-0 .search").last.inner_text()
    box.fill("")
    assert len(column("task")) == len(before)
    head = table.locator("th").nth(heads.index("task"))
    head.focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending" and column("task") == before
    assert said == []
    page.close()


@pytest.mark.full
def test_no_other_script_may_run(browser: Any, folder: Path, tmp_path: Path) -> None:
    text = (folder / "report.html").read_text().replace("</h1>", "</h1><script>document.title = 'taken'</script>", 1)
    (tmp_path / "evil.html").write_text(text)
    page, said = _open(browser, tmp_path / "evil.html", 1440)
    assert page.title() != "taken" and any("Content Security Policy" in s for s in said)
    page.close()
