"""The documentation site: it builds without a warning, shows what the pages say, and fits a phone."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
TAGS = ("li", "table", "tr", "pre", "h1", "h2", "h3")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGES = ("index", "tutorial", "reference/grading", "reference/cli", "measurements/2026-11-21-experts-h200", "tasks")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(out)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return out


def _tags(html: str) -> Counter[str]:
    return Counter(tag for tag in re.findall(r"<(\w+)[ >]", html) if tag in TAGS)


def _article(page: Path) -> str:
    """The part of a page that the site makes of the Markdown."""
    html = page.read_text()
    return html[html.index("<article") : html.index("</article>")]


@pytest.mark.full
def test_the_site_has_the_structure_that_the_repository_shows(site: Path) -> None:
    commonmark = MarkdownIt("commonmark", {"html": True}).enable("table")
    pages = [p for p in (ROOT / "docs").rglob("*.md") if "reference" not in p.parts]
    for path in pages:
        name = path.relative_to(ROOT / "docs").with_suffix(".html").as_posix().replace("README", "index")
        assert _tags(_article(site / name)) == _tags(commonmark.render(path.read_text())), name
    for path, name in {"README.md": "index", "CHANGELOG.md": "changelog", "CONTRIBUTING.md": "contributing"}.items():
        assert _tags(_article(site / f"{name}.html")) == _tags(commonmark.render((ROOT / path).read_text())), name


@pytest.mark.full
def test_nothing_on_the_site_asks_another_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        found = re.findall(r"<(?:script|img|iframe|source|link)\b[^>]*https?:", page.read_text())
        assert not found, page


@pytest.mark.full
def test_linked_files_of_the_repository_are_pages(site: Path) -> None:
    assert 'href="source/kbx_env/grading/pipeline.py.html"' not in _article(site / "index.html")  # it is named, not linked
    assert "source/examples/trl_grpo.py.html" in _article(site / "trainers.html")
    assert "GRPOTrainer" in (site / "source/examples/trl_grpo.py.html").read_text()


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
def test_pages_fit_a_phone_and_a_screen_in_a_browser(address: str) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for name in PAGES:
            for width in (390, 1440):
                said: list[str] = []
                page = browser.new_page(viewport={"width": width, "height": 900})
                page.on("console", lambda m, said=said: said.append(m.text) if m.type == "error" else None)
                page.on("request", lambda r, said=said: said.append(r.url) if "://" in r.url.replace(address, "") else None)
                page.goto(f"{address}/{name}.html")
                assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than {width} px"
                assert not said, f"{name}: {said}"
                page.close()
        browser.close()
