"""Hooks of ``mkdocs.yml``: pages that are made at build time, and links that work on the site and in the repository.

Pages of ``docs/`` link to each other and to files of the repository as paths. The site has a page for everything that they
link to: ``README.md`` is its home page, and a linked source file or folder gets a page below ``source/``.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cli_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/site-sources"
"""The package as an installation has it, for mkdocstrings: with tasks, rewards, baselines, train and eval as subpackages."""
PAGES = {
    "README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples.md",
}  # fmt: skip
"""Pages of the site that lie outside docs/: path in the repository -> path on the site."""
CLI = "reference/cli.md"
"""Page of the command line's reference, made from its parsers."""
SOURCE = "source/"
"""Folder of the site for files of the repository that pages link to."""
FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2[`~]*[ \t]*$", re.S | re.M)
LINK = re.compile(r"\]\((?!\w+:|#|/)([^)\s#]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json"}


def on_startup(**about: Any) -> None:
    """Lay out the package for mkdocstrings, which looks for its folders when it is configured: before ``on_config`` here.

    Args:
        **about: the command and whether it is a partial build; not needed.
    """
    package = BUILD / "kbx_env"
    shutil.rmtree(BUILD, ignore_errors=True)
    package.mkdir(parents=True)
    mapped = [ROOT / name for name in ("tasks", "rewards", "baselines", "train", "eval")]
    for path in (*(ROOT / "kbx_env").iterdir(), *mapped):
        (package / path.name).symlink_to(path)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace each entry ``FOLDER/*`` of the navigation by the pages of that folder, newest names first.

    Args:
        config: of ``mkdocs.yml``.

    Returns:
        The configuration.
    """
    config.nav = _expanded(config.nav, Path(config.docs_dir))
    return config


def _expanded(nav: Any, docs: Path) -> Any:
    if isinstance(nav, dict):
        return {title: _expanded(inner, docs) for title, inner in nav.items()}
    if not isinstance(nav, list):
        return nav
    entries: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and entry.endswith("/*"):
            found = sorted((docs / entry).parent.glob("[0-9]*.md"), reverse=entry.startswith("measurements"))
            entries += [p.relative_to(docs).as_posix() for p in found]
        else:
            entries.append(_expanded(entry, docs))
    return entries


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made at build time.

    Args:
        files: those of docs/.
        config: of ``mkdocs.yml``.

    Returns:
        The files, with the new ones.
    """
    made = {on_site: (ROOT / path).read_text() for path, on_site in PAGES.items()}
    made[CLI] = cli_reference.page()
    made["measurements/index.md"] = _measurements(Path(config.docs_dir))
    waiting = [*made, *(f.src_uri for f in files.documentation_pages())]
    while waiting:
        uri = waiting.pop()
        text = made[uri] if uri in made else (files.src_uris[uri].content_string)
        for target in _targets(text, _in_repository(uri)):
            new = _on_site(target)
            if new.startswith(SOURCE) and new not in made:
                made[new] = _source(target)
                if target.endswith(".md"):
                    waiting.append(new)
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page into links of the site, and lists into what Python-Markdown takes for lists.

    Args:
        markdown: the page as it is in the repository.
        page: the page.
        config: of ``mkdocs.yml``.
        files: those of the site.

    Returns:
        The page as MkDocs takes it. A link to a file that does not exist stays as it is, and MkDocs warns of it.
    """
    uri = page.file.src_uri
    path = _in_repository(uri)

    def link(match: re.Match[str]) -> str:
        target = _resolved(match[1], path)
        if not (ROOT / target).exists():
            return match[0]
        return f"]({posixpath.relpath(_on_site(target), posixpath.dirname(uri) or '.')}{match[2] or ''})"

    pieces = []
    end = 0
    for fence in [*FENCE.finditer(markdown), None]:
        prose = markdown[end : fence.start() if fence else None]
        pieces.append(_with_lists(LINK.sub(link, prose)))
        if fence:
            pieces.append(fence[0])
            end = fence.end()
    return "".join(pieces)


def _with_lists(prose: str) -> str:
    """Put an empty line before a list that follows a line of text, as Python-Markdown needs it."""
    return re.sub(r"(?m)^(?![-*|] |\d+\. |\s|#)(\S.*)\n(?=- )", r"\1\n\n", prose)


def _resolved(link: str, page: str) -> str:
    """Return the path in the repository that a link of a page means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _in_repository(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    if uri.startswith(SOURCE):
        return uri.removeprefix(SOURCE)
    return next((path for path, on_site in PAGES.items() if on_site == uri), f"docs/{uri}")


def _on_site(path: str) -> str:
    """Return the path on the site of a file or a folder of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path == "docs/decisions":
        return "decisions/README.md"
    if path.startswith("docs/") and (ROOT / path).is_dir():
        return f"{path.removeprefix('docs/')}/index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(".md"):
        return SOURCE + path
    return f"{SOURCE}{path}/index.md" if (ROOT / path).is_dir() else f"{SOURCE}{path}.md"


def _targets(text: str, page: str) -> Iterator[str]:
    """Find the paths in the repository that a page links to and that exist."""
    for match in LINK.finditer(FENCE.sub("", text)):
        target = _resolved(match[1], page)
        if (ROOT / target).exists():
            yield target


def _source(path: str) -> str:
    """Return the page of a file or a folder of the repository."""
    full = ROOT / path
    if path.endswith(".md"):
        return full.read_text()
    head = f"---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    if full.is_dir():
        rows = [f"| `{p.name}{'/' * p.is_dir()}` | {_about(p)} |" for p in sorted(_tracked(full))]
        return head + "| file | contents |\n|---|---|\n" + "\n".join(rows) + "\n"
    if full.suffix == ".ipynb":
        return _notebook(json.loads(full.read_text()))
    return f"{head}`````{LANGUAGES.get(full.suffix, 'text')}\n{full.read_text()}\n`````\n"


def _notebook(notebook: dict[str, Any]) -> str:
    """Return a notebook as a page: its texts, its code, and the text that the code printed."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                parts.append("```text\n" + "".join(output["text"]) + "```")
            elif "text/html" in output.get("data", {}):
                table = re.sub(r"(?s)<style.*?</style>|^<div>\n|</div>$", "", "".join(output["data"]["text/html"]))
                parts.append(table.replace(' border="1" class="dataframe"', ""))
            elif "image/png" in output.get("data", {}):
                picture = "".join(output["data"]["image/png"]).replace("\n", "")
                parts.append(f'<img alt="figure" src="data:image/png;base64,{picture}">')
    return "\n\n".join(parts) + "\n"


def _tracked(folder: Path) -> list[Path]:
    """List the files and folders of a folder, without what Python, the build and runs leave there."""
    return [p for p in folder.iterdir() if not p.name.startswith((".", "__pycache__")) and p.suffix != ".pyc"]


def _about(path: Path) -> str:
    """Return the first sentence of a module's or a package's docstring; empty for other files."""
    if path.is_dir():
        path = path / "__init__.py"
    if path.suffix != ".py" or not path.is_file():
        return ""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("``", "`").replace("|", "\\|")


def _measurements(docs: Path) -> str:
    """Return a list of the measurements, newest first, by their titles."""
    rows = []
    for path in sorted(docs.glob("measurements/*.md"), reverse=True):
        title = re.search(r"^# (.+)$", path.read_text(), re.M)
        rows.append(f"| {path.name[:10]} | [{title[1] if title else path.stem}]({path.name}) |")
    return "# Measurements\n\n| date | measurement |\n|---|---|\n" + "\n".join(rows) + "\n"
