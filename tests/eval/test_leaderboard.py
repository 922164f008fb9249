"""The leaderboard: ranks what compares, refuses what does not, believes no sums."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from kbx_env.eval import leaderboard as lb
from kbx_env.eval import report, stats

from kbx_env.outcome import Cases, CaseTime, Fault, Outcome, Stage, Timing, Verdict

MANIFEST = {"backend": "cpu", "grading": "contract", "torch_ops": "strict", "split": "eval", "task_split": "eval", "timed": False,
            "device": "cpu", "kbx_env": "0.1.0", "torch": "2.11", "seed_policy": "secret"}  # fmt: skip
TASKS = ("math/cos", "math/pow", "reduce/mean", "loss/mse")


def _timing(*speedups: float, device: str = "NVIDIA H200", **more: Any) -> Timing:
    s = math.exp(sum(map(math.log, speedups)) / len(speedups))
    cases = tuple(CaseTime(f"n={i}", x, 1.0, x, 0.9 * x, 1.1 * x, 30) for i, x in enumerate(speedups))
    return Timing(s, 0.9 * s, 1.1 * s, None, cases, device, **more)


def _row(task: str, correct: bool = True, sample: int = 0, **more: Any) -> dict[str, Any]:
    changes = more.pop("outcome", {})
    made: dict[str, Any] = {
        "backend": "cpu", "grading": "contract", "fault": None if correct else Fault.POLICY, "cases": Cases(2 if correct else 1, 2),
        "manifest": {"task_fingerprint": "f1", "split": "eval", "torch_ops": "strict"},
    }  # fmt: skip
    o = Outcome(task, Verdict.CORRECT if correct else Verdict.INCORRECT, Stage.CORRECT, **{**made, **changes})
    spent = {"calls": None, "prompt_tokens": None, "completion_tokens": None, "untold": None, "scripts": None, "dollars": None,
             "gradings": 1, "seconds": 1.0}  # fmt: skip
    category = task.split("/")[0]
    return {**o.to_dict(), "sample": sample, "category": category, "difficulty": 1, "compiled": True, "spent": spent, **more}


def _save(
    folder: Path, rows: list[dict[str, Any]], policy: str = "p", about: Any = None, summary: Any = None, **manifest: Any
) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    data = {"policy": policy, "about": about or {}, "manifest": {**MANIFEST, **manifest}, "tasks": rows}
    (folder / "report.json").write_text(json.dumps(data | ({"summary": summary} if summary is not None else {})))
    return str(folder)


def _rows(correct: int = 2, **more: Any) -> list[dict[str, Any]]:
    return [_row(t, i < correct, **more) for i, t in enumerate(TASKS)]


def test_reports_of_several_people_become_one_ranking(tmp_path: Path) -> None:
    board = lb.leaderboard([_save(tmp_path / d, _rows(k), p) for d, k, p in (("a", 1, "mine"), ("b", 3, "hers"), ("c", 1, "his"))])
    assert [(e.rank, e.policy, e.correct_rate) for e in board.entries] == [(1, "hers", 0.75), (2, "his", 0.25), (2, "mine", 0.25)]
    e = board.entries[0]
    assert (e.answers, e.correct, e.tasks, e.pass_at, e.report) == (4, 3, 4, {"1": 0.75}, str(tmp_path / "b"))
    assert (e.speedup, e.calls, e.tokens, e.needs) == (None, None, None, None) and e.gradings == 4
    assert board.about["tasks"] == 4 and board.about["grading"] == "contract" and board.notes == ()


def test_more_samples_of_easy_tasks_buy_nothing(tmp_path: Path) -> None:
    rows = _rows(1) + [_row("math/cos", sample=k) for k in range(1, 50)]
    (e,) = lb.leaderboard([_save(tmp_path, rows)]).entries
    assert e.correct_rate == 0.25 and (e.low, e.high) == stats.wilson(1, 4) and e.correct == 50


SAID = {"task_fingerprint": "f1", "torch_ops": "strict", "split": "eval"}
CHANGES = {
    "grading": ({"grading": "paper"}, "grading: 'contract' in p (", "grade all with the same --grading"),
    "backend": ({"backend": "cuda"}, "backend: 'cpu' in", "--backend"),
    "torch_ops": ({"manifest": SAID | {"torch_ops": "allow"}}, "torch_ops: 'strict'", "--torch-ops"),
    "split": ({"manifest": SAID | {"split": "train"}}, "held-out cases: 'eval'", "--split"),
    "sizes": ({"manifest": SAID | {"sizes": "held-out"}}, "timed sizes: 'published'", "--sizes"),
    "without": ({"manifest": SAID | {"without": ["secret"]}}, "defences switched off: 'none'", "every defence"),
    "versions": ({"manifest": SAID | {"task_fingerprint": "f2"}}, "task versions of loss/mse, math/cos", "git log tasks/"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_compare_is_refused_and_the_difference_named(name: str, tmp_path: Path, capsys: Any) -> None:
    changes, says, remedy = CHANGES[name]
    other = {k: changes[k] for k in ("grading", "backend") if k in changes}
    other |= {k: v for k, v in changes.get("manifest", {}).items() if k in ("torch_ops", "split", "sizes")}
    paths = [_save(tmp_path / "a", _rows()), _save(tmp_path / "b", _rows(outcome=changes), **other)]
    assert lb.main(paths) == 2
    err = capsys.readouterr().err
    assert says in err and remedy in err and str(tmp_path / "a") in err and str(tmp_path / "b") in err
    assert err.count("\n  - ") == 1, "one difference, one line"
    assert lb.main(paths[1:]) == 0, "alone it compares"


def test_reports_that_tell_no_sizes_are_of_the_published_ones(tmp_path: Path) -> None:
    new = [_row(t, outcome={"manifest": SAID | {"sizes": "published"}}) for t in TASKS]
    board = lb.leaderboard([_save(tmp_path / "a", _rows()), _save(tmp_path / "b", new, sizes="published")])
    assert len(board.entries) == 2 and board.about["timed sizes"] == "published"


def test_a_report_that_claims_other_conditions_than_its_rows_is_refused(tmp_path: Path) -> None:
    path = _save(tmp_path, _rows(outcome={"grading": "paper"}))
    with pytest.raises(lb.Incomparable, match="'contract' in p .*'paper' in p "):
        lb.leaderboard([path])


def test_a_correct_answer_must_tell_its_task_s_version_and_a_wrong_one_need_not(tmp_path: Path) -> None:
    mute = [_row(t, False, outcome={"manifest": {}}) for t in TASKS]
    paths = [_save(tmp_path / "a", _rows()), _save(tmp_path / "b", mute)]
    assert len(lb.leaderboard(paths).entries) == 2
    paths[1] = _save(tmp_path / "b", [_row("math/cos", outcome={"manifest": {}}), *mute[1:]])
    with pytest.raises(lb.Incomparable, match="task versions of math/cos: math/cos is 'f1' in p .*; 'not said' in p "):
        lb.leaderboard(paths)
    assert "do not say which version" in lb.leaderboard(paths[1:]).notes[0]


def test_fewer_or_other_tasks_are_refused(tmp_path: Path) -> None:
    paths = [_save(tmp_path / "a", _rows()), _save(tmp_path / "b", [*_rows()[:3], _row("math/erf")], task_split="all")]
    with pytest.raises(lb.Incomparable, match=r"lacks loss/mse and has math/erf besides"):
        lb.leaderboard(paths)
    with pytest.raises(lb.Incomparable, match=r"choice of tasks: p \(.*c\), 3 tasks \(.*eval\), lacks loss/mse; grade all with"):
        lb.leaderboard([paths[0], _save(tmp_path / "c", _rows()[:3])])


def _gpu(folder: Path, speedups: list[float | None], policy: str = "p", device: str = "NVIDIA H200", **manifest: Any) -> str:
    times = [_timing(s, device=device) if s else None for s in speedups]
    rows = [_row(task, t is not None, outcome={"backend": "cuda", "timing": t}) for task, t in zip(TASKS, times)]
    return _save(folder, rows, policy, **{"backend": "cuda", "timed": True, "device": device, **manifest})


def test_speedups_of_one_kind_of_device_are_ranked(tmp_path: Path) -> None:
    paths = [_gpu(tmp_path / "a", [1.0, 2.0, None, None], "slow"), _gpu(tmp_path / "b", [4.0, None, 1.0, None], "fast")]
    fast, slow = lb.leaderboard(paths).entries
    assert (fast.policy, fast.speedup, fast.timed) == ("fast", pytest.approx(2.0), 2) and slow.speedup == pytest.approx(2**0.5)
    assert (fast.common_speedup, slow.common_speedup, fast.common) == (pytest.approx(4.0), pytest.approx(1.0), 1)
    paths[1] = _gpu(tmp_path / "b", [4.0, None, 1.0, None], "fast", device="NVIDIA H100")
    with pytest.raises(lb.Incomparable, match="of the speedups: 'NVIDIA H200' in slow.*'NVIDIA H100' in fast.*--no-speedups"):
        lb.leaderboard(paths)
    assert {e.speedup for e in lb.leaderboard(paths, speedups=False).entries} == {None}


def test_speedups_are_unknown_where_one_report_was_not_timed(tmp_path: Path) -> None:
    paths = [_gpu(tmp_path / "a", [1.0] * 4), _gpu(tmp_path / "b", [2.0] * 4, "untimed", timed=False)]
    board = lb.leaderboard(paths)
    assert {e.speedup for e in board.entries} == {None} and any("untimed" in n and "not timed" in n for n in board.notes)


def test_versions_with_the_same_tasks_are_ranked_and_noted(tmp_path: Path) -> None:
    newer = _save(tmp_path / "b", _rows(), kbx_env="0.2.0", seed_policy="fixed: 3")
    board = lb.leaderboard([_save(tmp_path / "a", _rows()), newer])
    assert "different versions of kbx_env" in board.notes[0] and "the tasks are the same" in board.notes[0]
    assert "different seeds" in board.notes[1]


def test_sums_that_do_not_match_the_rows_are_never_believed(tmp_path: Path) -> None:
    rows = _rows(1)
    board = lb.leaderboard([_save(tmp_path, rows, summary={"n": 4, "correct_rate": 1.0})])
    assert board.entries[0].correct_rate == 0.25
    assert "own sums do not match its rows" in board.notes[0] and "correct_rate" in board.notes[0]
    honest = report.summarise([Outcome.from_dict(r) for r in rows], False)
    honest["spent"] = dict.fromkeys(report.spending([])) | {"gradings": 4, "seconds": 4.0}
    assert lb.leaderboard([_save(tmp_path, rows, summary=honest)]).notes == ()


@pytest.mark.parametrize(
    ("cheat", "says"),
    [
        ({"verdict": "correct", "correct": True, "fault": None}, "contradict themselves"),
        ({"correct": True}, "the verdict counts"),
        ({"fault": "infra"}, "contradict themselves"), ({"verdict": "splendid"}, "contradict themselves"),
    ],
)  # fmt: skip
def test_rows_that_contradict_themselves_count_as_wrong(cheat: dict[str, Any], says: str, tmp_path: Path) -> None:
    rows = [*_rows(2)[:3], _row("loss/mse", False) | cheat]
    board = lb.leaderboard([_save(tmp_path, rows)])
    assert (board.entries[0].correct_rate, board.entries[0].answers) == (0.5, 4)
    assert says in board.notes[0] and "loss/mse" in board.notes[0]


def test_an_answer_counts_once(tmp_path: Path) -> None:
    board = lb.leaderboard([_save(tmp_path, _rows(1) + [_row("math/cos")] * 9)])
    assert (board.entries[0].answers, board.entries[0].gradings) == (4, 4) and "9 answers occur several times" in board.notes[0]


@pytest.mark.parametrize("timing", [{"speedup": 50.0, "high": 60.0}, {"speedup": -1.0}, {"floor_ratio": 1.0}, {"speedup": "fast"}])
def test_a_speedup_that_its_cases_or_the_device_deny_is_left_out(timing: dict[str, Any], tmp_path: Path) -> None:
    path = Path(_gpu(tmp_path, [2.0, 3.0, 3.0, 3.0])) / "report.json"
    data = json.loads(path.read_text())
    data["tasks"][0]["timing"] |= timing
    path.write_text(json.dumps(data))
    board = lb.leaderboard([path])
    assert board.entries[0].speedup == pytest.approx(3.0) and board.entries[0].correct_rate == 1.0
    assert "1 rows have a speedup" in board.notes[0] and "left out: math/cos" in board.notes[0]


def test_what_nobody_judged_is_in_no_rate_and_said(tmp_path: Path) -> None:
    lost = _row("loss/mse", False, outcome={"fault": Fault.INFRA, "manifest": {}}) | {"verdict": "infra_fault"}
    board = lb.leaderboard([_save(tmp_path / "a", [*_rows(3)[:3], lost]), _save(tmp_path / "b", _rows(3), "q")])
    assert [(e.policy, e.correct_rate, e.masked, e.answers) for e in board.entries] == [("p", 1.0, 1, 3), ("q", 0.75, 0, 4)]
    assert "p: 1 of 4" in board.notes[-1]


def test_what_a_policy_took_and_needs(tmp_path: Path) -> None:
    spent = {"calls": 3, "prompt_tokens": 100, "completion_tokens": 50, "untold": 0, "scripts": 1, "gradings": 2}
    rows = [_row(t, spent=spent) for t in TASKS]
    about = {"model": "m-1", "needs": {"grader_feedback": False, "own_tests": False}}
    (e,) = lb.leaderboard([_save(tmp_path, rows, about=about)]).entries
    assert (e.calls, e.tokens, e.gradings, e.least, e.needs, e.model) == (12, 600, 8, False, ("own tests",), "m-1")
    rows[0] |= {"spent": {}, "turns": [{"label": "1"}]}
    (e,) = lb.leaderboard([_save(tmp_path, rows, about=about)]).entries
    assert (e.calls, e.least, e.needs) == (9, True, ("reads verdicts", "own tests"))
    assert "≥ 9" in lb.markdown(lb.leaderboard([tmp_path]))


class _Tags(HTMLParser):
    seen: set[str]

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)


def test_names_of_others_are_no_markup(tmp_path: Path) -> None:
    name = "</td><script>alert(1)</script>|[x](http://e)\x1b[31m\n# h $body"
    board = lb.leaderboard([_save(tmp_path, _rows(), name, about={"model": "<img>", "needs": {}})])
    parser = _Tags()
    parser.seen = set()
    parser.feed(lb.page(board))
    assert not parser.seen & {"script", "img"} and "$body" in lb.page(board)
    lines = lb.markdown(board).splitlines()
    assert "\x1b" not in lb.markdown(board) and sum(line.startswith("#") for line in lines) == 1
    assert sum(line.startswith("|") for line in lines) == 3


def test_files_and_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = _save(tmp_path / "a", _rows())
    for end in (".md", ".html", ".json"):
        assert lb.main([a, "--out", str(tmp_path / f"o{end}")]) == 0 and (tmp_path / f"o{end}").read_text()
    assert json.loads((tmp_path / "o.json").read_text())["entries"][0]["rank"] == 1
    for argv, says in (([a, a + "/report.json"], "same report"), ([str(tmp_path)], "no report.json"),
                       ([a, "--out", "/nowhere/x.md"], "nowhere")):  # fmt: skip
        assert lb.main(argv) == 2 and says in capsys.readouterr().err
    with pytest.raises(SystemExit) as e:
        lb.main([a, "--out", "x.txt"])
    assert e.value.code == 2 and ".html" in capsys.readouterr().err


def _data(**more: Any) -> str:
    return json.dumps({"policy": "p", "manifest": {}, "tasks": _rows(), **more})


@pytest.mark.parametrize(
    "broken",
    ["{", "[]", "3", '{"policies": [3]}', _data(tasks=[]), "[" * 100_000, "\udcff", _data(manifest=[]), _data(about=[1]),
     _data(tasks=[{**_rows()[0], "spent": [1]}]), _data(tasks=[{**_rows()[0], "task": ["t"]}])],
)  # fmt: skip
def test_broken_files_are_said_and_no_crash(broken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_bytes(broken.encode("utf-8", "surrogateescape"))
    assert lb.main([str(tmp_path)]) == 2 and capsys.readouterr().err.startswith("leaderboard.py: ")


def test_it_runs_as_a_script_from_a_clone(tmp_path: Path) -> None:
    paths = [_save(tmp_path / "a", _rows()), _save(tmp_path / "b", _rows(), grading="paper")]
    run = [sys.executable, "-I", str(Path(lb.__file__)), *paths]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("leaderboard.py: these reports do not compare:\n  - grading:")
    assert subprocess.run(run[:-1], capture_output=True, cwd=tmp_path).returncode == 0
