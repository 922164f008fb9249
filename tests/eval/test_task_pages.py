"""Pages of tasks: all that a reader needs, nothing that does harm."""

from __future__ import annotations

import hashlib
import html
import re
import shlex
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kbx_env.eval import report_data, task_pages
from kbx_env.eval.escaping import clip, html_text
from kbx_env.eval.highlight import highlight

from kbx_env.__main__ import _parser
from kbx_env.errors import UsageError
from kbx_env.outcome import Build, CaseFailure, Cases, CaseTime, Fault, Outcome, Stage, Timing, Verdict
from kbx_env.spec.catalog import load_tasks
from kbx_env.store import Store, request_key

PIECES = ["'", '"""', "f'{x!r:>{w}}'", "{{", 'f"', "\n", "  ", "(", ")", "def ", "#", "\\\n", "€", "0x", "\f", "\r",
          "</script>", "&amp;", "rb'", "\u2028", "\x00", "\x1b[31m", "\u202e", "\ud800", "x", "if y:\n", "\t", "@",
          "1_0", "<b>"]  # fmt: skip
SOURCES = st.one_of(st.text(max_size=80), st.lists(st.sampled_from(PIECES), max_size=25).map("".join))


def _text(shown: str) -> str:
    return html.unescape(re.sub(r'</?span(?: class="(?:[kscmh]|n[fb])")?>', "", shown))


@given(SOURCES)
@example("Here's a kernel:\n```python\nx = 1\n```\n")
@example("def f(:\n    return '''open\nfor i in x: pass")
@settings(max_examples=400, deadline=None)
def test_highlighting_escapes_everything_and_loses_no_character(source: str) -> None:
    shown = highlight(source)
    bare = re.sub(r'</?span(?: class="(?:[kscmh]|n[fb])")?>', "", shown)
    assert not re.search(r"[<>\"']", bare) and "&" not in re.sub(r"&(amp|lt|gt|quot|#x27);", "", bare)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown)
    assert _text(shown) == _text(html_text(source)), "the same text, whatever the lexer made of it"
    if source.isprintable() and source.isascii():
        assert _text(shown) == source


def test_highlighting_knows_python_even_behind_an_error() -> None:
    shown = highlight("def broken(:\n  'open\n\n@triton.jit\ndef k(n):  # why\n    return f'{n}' + 0x10")
    for part in ('"k">def</span> <span class="nf">k<', '"c"># why<', '"m">0x10<', '"k">return<', '"nf">@triton<'):
        assert f"<span class={part}" in shown
    assert '"s">f&#x27;' in shown


@pytest.mark.parametrize(
    "bad", ["(" * 10**6, "'\n" * 10**5, "'''\n" * 10**5, "a" * 10**6, "\\" * 10**6, " x\nx" * 10**5, "f'{" * 10**5]
)  # fmt: skip
def test_what_is_huge_is_cut_with_a_note_and_in_time(bad: str) -> None:
    start = time.process_time()
    text, note = clip(bad)
    assert note and len(highlight(text)) < 3_000_000 and time.process_time() - start < 3


@pytest.mark.parametrize(
    "bad", [(" " * 990 + "\n") * 5000, '"""' + ("{a[" * 330 + "\n") * 5000, ("@" * 990 + "\n") * 5000, "def " + "\\\n" * 5000]
)  # fmt: skip
def test_rules_of_pygments_that_scan_far_end_in_time(bad: str) -> None:
    text, note = clip(bad)
    start = time.process_time()
    shown = highlight(text)
    assert note and time.process_time() - start < 3 and _text(shown) == text


def _outcome(task: str, source: bytes, verdict: Verdict = Verdict.CORRECT, **more) -> Outcome:
    fault = None if verdict is Verdict.CORRECT else Fault.POLICY
    cases = Cases(2, 2) if fault is None else Cases(1, 2, (CaseFailure("n=7", "off by <b>3</b>"),))
    sha = hashlib.sha256(source).hexdigest()
    return Outcome(task, verdict, Stage.CORRECT, "cpu", "contract", fault, **{"cases": cases, "source_sha256": sha, **more})


MANIFEST = {"backend": "cpu", "grading": "paper", "torch_ops": "allow", "sizes": "held-out", "targets": [], "seed": 7,
            "timing": False, "split": "eval", "estimate": "h200"}  # fmt: skip


def _run(folder: Path, answers: dict[str, list[tuple[Outcome, bytes | None]]]) -> tuple[report_data.Study, Path]:
    """Policy -> its answers, in a store and in a study; several of a task are samples."""
    path, reports = folder / "gradings.sqlite", []
    store, packed = Store(path), []
    for policy, given_ in answers.items():
        rows, samples = [], dict.fromkeys((o.task for o, _ in given_), -1)
        for o, source in given_:
            samples[o.task] += 1
            n = samples[o.task]
            request = {"policy": policy, "task": o.task, "sample": n}
            packed.append((request_key(request, source), policy, n, request, source, o))
            rows.append({**o.to_dict(), "sample": n, "category": o.task.split("/")[0], "difficulty": 1, "compiled": True})
        reports.append({"policy": policy, "manifest": MANIFEST, "tasks": rows})
    store.put_all(packed)
    store.close()
    return report_data.from_reports(reports), path


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def _harmless(page: str) -> None:
    parser = _Tags()
    parser.feed(page)
    allowed = set("html head meta title style body p a h1 h3 details summary pre span table tr td th div small".split())
    assert {tag for tag, _ in parser.tags} <= allowed
    for tag, attributes in parser.tags:
        assert set(attributes) <= {"class", "id", "href", "open", "lang", "charset", "name", "content", "http-equiv"}, tag
        assert re.match(r"(\.\./[\w./-]+|#a\d+)$", attributes.get("href") or "#a0")
    assert "url(" not in page and "@import" not in page


def test_a_page_tells_the_task_the_answer_and_how_to_grade_it_again(tmp_path: Path) -> None:
    source = b"import triton  # mine\n"
    times = (CaseTime("n=8", 10.0, 5.0, 2.0, 1.9, 2.1, 30), CaseTime("n=9", 1.0, 2.0, 0.5, 0.4, 0.6, 30, void=True))
    good = _outcome("math/cos", source, timing=Timing(1.0, 0.9, 1.1, None, times, "NVIDIA H200"),
                    compile=(Build("_k", "sm_90", True, registers=32, spills=0, shared=1024, shared_limit=232448),))  # fmt: skip
    bad = _outcome("math/cos", b"x = 2", Verdict.INCORRECT, message="all wrong")
    data, path = _run(tmp_path, {"me": [(good, source), (bad, b"x = 2")], "replay:../a.jsonl": [(bad, None)]})
    assert task_pages.write_task_pages(data, path, tmp_path) == {"math/cos": "tasks/math-cos.html"}
    page = (tmp_path / "tasks/math-cos.html").read_text()
    _harmless(page)
    text = html.unescape(re.sub(r"<[^>]*>", "", page))
    said = ("def cos(input_tensor)", "me #2", "# mine", "off by <b>3</b>", "Fix the failing cases", "NVIDIA H200", "void",
            "232,448")  # fmt: skip
    for part in said:
        assert part in text
    assert "does not hold it" in text and "prefers-color-scheme: dark" in page
    command = re.search(r">(python -m kbx_env grade [^<]*)<", page)
    assert command is not None
    a = _parser().parse_args(shlex.split(html.unescape(command[1]))[3:])
    assert (a.task, a.backend, a.grading, a.torch_ops, a.targets) == ("math/cos", "cpu", "contract", "allow", "none")
    assert (a.seed, a.no_timing, a.estimate, a.sizes) == (7, True, "h200", "held-out")
    assert (tmp_path / a.file).read_bytes() == source


HOSTILE = b"</pre></script><script>alert(1)</script><img src=//e.x>\x1b[31m\x00\xff\xe2\x80\xae'''\n" + b"A" * 1_000_000


def test_hostile_texts_do_no_harm(tmp_path: Path) -> None:
    name = "evil</title><script>../../../x"
    bad = _outcome("math/cos", HOSTILE, Verdict.RUNTIME_ERROR, message=HOSTILE.decode("latin-1"))
    odd = _outcome("../../etc/passwd<b>", b"x", Verdict.INCORRECT, compile=(Build("<i>\x1b", "sm_90", False, error="<u>"),))
    data, path = _run(tmp_path, {name: [(bad, HOSTILE), (odd, b"x")]})
    (tmp_path / "out").mkdir()
    written = task_pages.write_task_pages(data, path, tmp_path / "out")
    for file in (tmp_path / "out").rglob("*"):
        assert file.is_dir() or file.suffix in (".html", ".py")
    for page in written.values():
        text = (tmp_path / "out" / page).read_text()
        _harmless(text)
        assert len(text) < 60_000 and not re.search("[\x00\x1b\u202e]", text)
    assert "long lines are cut" in (tmp_path / "out" / written["math/cos"]).read_text()
    assert {p.name for p in tmp_path.iterdir()} == {"out", "gradings.sqlite"} and len(written) == 2
    assert any(p.read_bytes() == HOSTILE for p in (tmp_path / "out" / "sources").rglob("*.py")), "byte by byte"


def test_rows_that_contradict_themselves_and_missing_stores_still_make_a_page(tmp_path: Path) -> None:
    row = {**_outcome("math/cos", b"x").to_dict(), "sample": 0, "category": "math", "difficulty": 1, "compiled": True}
    row["cases"] = None
    data = report_data.from_reports([{"policy": "p", "manifest": {}, "tasks": [row]}])
    for store in (None, tmp_path / "none.sqlite"):
        task_pages.write_task_pages(data, store, tmp_path)
        assert "contradicts itself" in (tmp_path / "tasks/math-cos.html").read_text()
    assert not (tmp_path / "none.sqlite").exists(), "a store that is not there is not made"
    (tmp_path / "no.sqlite").write_text("no database, not at all" * 100)
    with pytest.raises(UsageError, match="cannot keep gradings"):
        task_pages.write_task_pages(data, tmp_path / "no.sqlite", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose another folder"):
        task_pages.write_task_pages(data, None, tmp_path / "file")


def test_a_whole_run_of_four_policies_costs_little_more_than_highlighting_its_sources(tmp_path: Path) -> None:
    source = "\n".join(f"def f{i}(x, y=0x1F):\n    return tl.load(x + {i}, mask=y < 3)  # 'c'" for i in range(75))
    ids = [t.id for t in load_tasks()]
    answers = {p: (source + p).encode() for p in "abcd"}
    data, path = _run(tmp_path, {p: [(_outcome(t, a), a) for t in ids] for p, a in answers.items()})
    one = min(_cpu_seconds(lambda: highlight(source)) for _ in range(5))
    pages: dict[str, str] = {}
    spent = _cpu_seconds(lambda: pages.update(task_pages.write_task_pages(data, path, tmp_path)))
    assert pages.keys() == set(ids)
    # Seconds would depend on the machine. A fifth of the time is that of the references, and a machine may slow down meanwhile.
    assert spent < 2.5 * one * len(ids) * len(answers), (spent, one)
    assert len(list((tmp_path / "sources").rglob("*.py"))) == len(ids) * len(answers)


def _cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def test_of_a_thousand_answers_the_best_are_shown(tmp_path: Path) -> None:
    kept_most, few = task_pages.ANSWERS, task_pages._few

    rows = report_data.from_reports([_many(1000)]).policies[0].rows
    kept = few(rows)
    assert len(kept) == kept_most and all(r.correct for r in kept) and [r.sample for r in kept] == sorted(r.sample for r in kept)
    assert max(r.speedup or 0 for r in rows) == max(r.speedup or 0 for r in kept)
    pages = task_pages.write_task_pages(report_data.from_reports([_many(1000)]), None, tmp_path)
    assert "all of them are in tasks.csv" in (tmp_path / pages["math/cos"]).read_text()


def _many(count: int) -> dict:
    def row(i: int) -> dict:
        timing = {"speedup": 1 + i / 1000, "low": 1.0, "high": 3.0, "floor_ratio": None, "cases": [], "device": "d"}
        right = i % 3 == 0
        told = {"verdict": "correct", "fault": None, "timing": timing} if right else {"verdict": "incorrect", "fault": "policy"}
        return {"task": "math/cos", "category": "math", "difficulty": 1, "sample": i, "compiled": True, "correct": right, **told}

    return {"policy": "p", "manifest": {}, "tasks": [row(i) for i in range(count)]}
