"""The report: nothing lost, nothing repeated, nothing invented."""

from __future__ import annotations

import csv
import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from kbx_env.baselines.policy import Needs
from kbx_env.eval import pages, report

from kbx_env import versions
from kbx_env.envs.episode import Trajectory
from kbx_env.errors import UsageError
from kbx_env.outcome import Cases, Fault, FaultKind, Outcome, Stage, Timing, Verdict

DRAWN = ("test_the_three_files", "test_overwriting_removes_an_earlier_report_s_pages_and_nothing_else")
"""Tests whose reports have figures, as those of test_plots.py and test_browser.py have."""


@pytest.fixture(autouse=True)
def figures_where_they_are_tested(request: pytest.FixtureRequest) -> None:
    if request.node.name not in DRAWN:
        request.getfixturevalue("no_figures")


class Fake:
    """Grades without a sandbox; may be interrupted after a number of gradings."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.seen: list[str] = []
        self.stop_after = stop_after

    def __call__(self, task: str, source: bytes, **options) -> Outcome:
        if self.stop_after is not None and len(self.seen) >= self.stop_after:
            raise KeyboardInterrupt
        self.seen.append(task)
        common = {"task": task, "stage": Stage.CORRECT, "backend": "cpu", "grading": "contract"}
        if task.startswith("math/"):
            return Outcome(verdict=Verdict.CORRECT, cases=Cases(2, 2), **common)
        if task.startswith("loss/"):
            return Outcome(verdict=Verdict.INFRA_FAULT, fault=Fault.INFRA, fault_kind=FaultKind.UNSUPPORTED, **common)
        return Outcome(
            verdict=Verdict.INCORRECT, fault=Fault.POLICY, message="<b>off</b> by 3 | much", cases=Cases(1, 2), **common
        )


FIFTEEN = (
    "gelu_fp16,conv2d,fused_bmm_dropout_gelu,masked_select,svd,cross_entropy,softmax,matmul_bf16,batch_norm,AdamW,"
    "adaptive_avg_pool2d,matmul_w8a8,rand,argmax,grid_sample"
)
"""One task of each category."""


def _args(tmp_path: Path, *more: str):
    base = ["--policy", "expert", "--backend", "cpu", "--split", "all", "--out", str(tmp_path / "out")]
    base += ["--tasks", FIFTEEN]
    return report.parser().parse_args([*base, *more])


def test_the_three_files(tmp_path: Path) -> None:
    out = report.run(_args(tmp_path), grade=Fake())
    data = json.loads((out / "report.json").read_text())
    assert data["policy"] == "expert" and {"manifest", "summary", "by_category", "tasks"} <= set(data)
    s = data["summary"]
    assert (s["n"], s["infra_faults"]) == (14, 1) and s["correct_rate"] == pytest.approx(1 / 14)
    assert s["faster_than_eager_rate"] is None and s["geomean_speedup"] is None
    page = (out / "report.html").read_text()
    assert "&lt;b&gt;off" in page and "<b>off</b>" not in page and page.count("<script") == 1
    assert "http:" not in page and "https:" not in page
    said = (out / "report.md").read_text()
    assert "not measured" in said
    assert data["manifest"]["task_set"] == versions.TASK_SET and data["manifest"]["task_set_hash"] == versions.TASK_SET_HASH
    assert all(f"task set: {versions.task_set()}" in text for text in (page, said.replace("\\", "")))


def test_killed_and_resumed_nothing_is_lost_or_repeated(tmp_path: Path) -> None:
    first, second = Fake(stop_after=5), Fake()
    with pytest.raises(KeyboardInterrupt):
        report.run(_args(tmp_path), grade=first)
    out = report.run(_args(tmp_path, "--resume"), grade=second)
    assert len(first.seen) == 5
    again = set(first.seen) & set(second.seen)
    assert all(t.startswith("loss/") for t in again), "only what was not judged is graded again"
    assert len(json.loads((out / "report.json").read_text())["tasks"]) == 15


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--policy", "exprt"], "expert"), (["--split", "test"], "train"), (["--tasks", "zzz*"], "zzz"),
        (["--grading", "papr"], "paper"), (["--backend", "gpu"], "cuda"), (["--workers", "0"], "at least 1"),
        (["--policy", "replay"], "replay:FILE"), (["--policy", "replay:/nowhere.jsonl"], "nowhere"),
        (["--targets", "sm_1"], "sm_90"), (["--policy", "python:nothing:here"], "module:attribute"),
        (["--executor", "rayy"], "process, ray"), (["--ray-address", "auto"], "--executor ray"),
        (["--gpus", "2", "--backend", "cpu"], "--backend cuda"), (["--gpus", "2", "--executor", "ray"], "Ray takes all"),
        (["--per-gpu", "2"], "--executor ray"), (["--executor", "ray", "--per-gpu", "0"], "per_gpu is 0"),
        (["--executor", "ray", "--ray-address", "127.0.0.1:1"], "nothing answers"),
        (["--executor", "ray", "--workers", "0"], "at least 1"),
        (["--compiled"], "--backend cuda, --gradings contract, without --no-timing"),
    ],
)  # fmt: skip
def test_bad_usage_exits_2(more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = report.main(["--policy", "expert", "--backend", "cpu", "--out", str(tmp_path / "o"), *more])
    assert code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--tasks", "nothing"], ["--policy", "exert"], ["--aa", "1"]])
def test_workers_that_a_refused_command_line_has_started_are_ended(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    said: list[str] = []

    class Pool:
        def __init__(self, width: int) -> None:
            said.append(f"{width} started")

        def close(self) -> None:
            said.append("closed")

    monkeypatch.setattr(report, "ProcessPool", Pool)
    assert report.main(["--policy", "zeros", "--backend", "cpu", "--workers", "3", "--out", str(tmp_path / "o"), *more]) == 2
    assert said == ["3 started", "closed"] and not (tmp_path / "o").exists()


def test_an_earlier_report_is_not_mixed_with_a_new_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = report.run(_args(tmp_path), grade=Fake())
    assert report.main(["--policy", "expert", "--backend", "cpu", "--out", str(out)]) == 2
    assert "--resume" in capsys.readouterr().err


class Sampler:
    """A policy that never answers alike twice, with two samples a task."""

    name = "sampler"
    asked: list[tuple[str, int]] = []

    def samples(self, task: str) -> int:
        return 2

    def act(self, observation) -> str | None:
        self.asked.append((observation["task"], observation["sample"]))
        return None if observation["task"].startswith("reduce/") else f"answer {len(self.asked)}"


def test_every_sample_is_graded_and_no_answer_is_malformed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kbx_env.baselines.policy.make_policy", lambda spec, access=None: Sampler())
    out = report.run(_args(tmp_path), grade=Fake())
    data = json.loads((out / "report.json").read_text())
    assert len(data["tasks"]) == 30 and {(r["task"], r["sample"]) for r in data["tasks"]} == set(Sampler.asked)
    empty = [r for r in data["tasks"] if r["task"] == "reduce/argmax"]
    assert all(r["verdict"] == "malformed" and "no answer" in r["message"] and r["reward"] == 0 for r in empty)
    assert (
        data["summary"]["n"] == 28
        and data["summary"]["tasks"] == 14
        and "math/softmax #2" in (out / "report.md").read_text()
    )


def test_a_policy_that_is_not_repeatable_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kbx_env.baselines.policy.make_policy", lambda spec, access=None: Sampler())
    Sampler.asked.clear()
    report.run(_args(tmp_path), grade=Fake())
    Sampler.asked.clear()
    report.run(_args(tmp_path, "--resume"), grade=Fake())
    assert {t for t, _ in Sampler.asked} == {"loss/cross_entropy"}, "only what was not judged is asked again"


@pytest.mark.parametrize(
    "more",
    [["--torch-ops", "allow"], ["--seed", "0"], ["--grading", "paper"], ["--targets", "none"], ["--no-timing"],
     ["--split", "train"]],
)  # fmt: skip
def test_other_settings_are_never_answered_by_what_is_stored(more: list[str], tmp_path: Path) -> None:
    few = ("--tasks", "math/cos,math/softmax,math/pow,reduce/mean")
    report.run(_args(tmp_path, *few), grade=Fake())
    for settings in (more, []):
        again, kept = Fake(), Fake()
        report.run(_args(tmp_path, *few, *settings, "--resume"), grade=again)
        report.run(_args(tmp_path, *few, *settings, "--resume"), grade=kept)
        assert bool(again.seen) == bool(settings) and kept.seen == []


@pytest.mark.parametrize("name", ["torch", "triton", "kbx_env", "python", "device", "numpy", "grader"])
def test_another_device_or_version_is_graded_anew(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ("--tasks", "math/cos,math/pow")
    report.run(_args(tmp_path, *few), grade=Fake())
    here = versions.environment("cpu")
    monkeypatch.setattr(versions, "environment", lambda backend: {**here, name: "another"})
    again = Fake()
    report.run(_args(tmp_path, *few, "--resume"), grade=again)
    assert again.seen == ["math/cos", "math/pow"]


def test_several_policies_have_a_section_each(tmp_path: Path) -> None:
    out = report.run(_args(tmp_path, "--policy", "zeros", "--tasks", "softmax,argmax"), grade=Fake())
    data = json.loads((out / "report.json").read_text())
    assert [p["policy"] for p in data["policies"]] == ["expert", "zeros"]
    assert data["policy"] == "expert" and data["summary"] == data["policies"][0]["summary"]
    assert (out / "report.html").read_text().count('<section id="policy-') == 2


def _timed(low: float) -> Outcome:
    timing = Timing(low + 0.1, low, low + 0.2, None, (), "H200")
    return Outcome("t", Verdict.CORRECT, Stage.TIME, "cuda", "contract", cases=Cases(1, 1), timing=timing)


def test_faster_means_beyond_the_noise_and_unknown_is_not_zero() -> None:
    s = report.summarise([_timed(0.95), _timed(1.2)])
    assert s["faster_than_eager_rate"] == 0.5 and s["geomean_speedup"] == pytest.approx((1.05 * 1.3) ** 0.5)
    wrong = Outcome("t", Verdict.REJECTED, Stage.SCREEN, "cuda", "contract", Fault.POLICY)
    s = report.summarise([wrong])
    assert (s["faster_than_eager_rate"], s["geomean_speedup"], s["compile_rate"]) == (0.0, None, 0.0)
    assert report.summarise([wrong], timed=False)["faster_than_eager_rate"] is None
    assert report.summarise([])["correct_rate"] is None


def _against(low: float, compiled: float | None) -> Outcome:
    told = _timed(low)
    assert told.timing is not None
    return dataclasses.replace(told, task="math/add", timing=dataclasses.replace(told.timing, compiled_speedup=compiled))


def test_speedups_over_torch_compile_where_they_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = report.summarise([_against(1.2, 1.1), _against(1.2, 0.9), _timed(1.2)])
    assert s["geomean_compiled_speedup"] == pytest.approx((1.1 * 0.9) ** 0.5) and s["compiled_n"] == 2
    s = report.summarise([_timed(1.2)])
    assert s["geomean_compiled_speedup"] is None and s["compiled_n"] is None
    told = {"math/add": 1.25, "math/exp_sqrt": None}
    graded: list[dict] = []

    def grade(task: str, source: bytes, **options: object) -> Outcome:
        graded.append(options)
        return dataclasses.replace(_against(1.2, told[task]), task=task)

    monkeypatch.setattr("kbx_env.options.resolve_backend", lambda name: "cuda")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "H200")
    args = ["--policy", "expert", "--backend", "cuda", "--split", "all", "--tasks", "math/add,math/exp_sqrt"]
    out = report.run(report.parser().parse_args([*args, "--out", str(tmp_path / "with"), "--compiled"]), grade=grade)
    assert all(o["compiled"] is True for o in graded)
    for page in ("report.md", "report.html"):
        text = (out / page).read_text()
        assert "against torch.compile: 1.250x" in text and "over the 1 correct" in text
    rows = {r["task"]: r for r in csv.DictReader((out / "tasks.csv").open())}
    assert (rows["math/add"]["compiled_speedup"], rows["math/exp_sqrt"]["compiled_speedup"]) == ("1.25", "")
    assert json.loads((out / "report.json").read_text())["summary"]["compiled_n"] == 1
    graded.clear()
    out = report.run(report.parser().parse_args([*args, "--out", str(tmp_path / "without")]), grade=grade)
    assert all("compiled" not in o for o in graded), "gradings of earlier runs keep their keys"


def test_a_folder_with_other_things_is_safe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    assert report.main(["--policy", "expert", "--backend", "cpu", "--out", str(tmp_path / "out")]) == 2
    assert "--resume" in capsys.readouterr().err
    out = report.run(_args(tmp_path, "--overwrite"), grade=Fake())
    again = Fake()
    report.run(_args(tmp_path, "--overwrite"), grade=again)
    assert (out / "thesis.txt").read_text() == "precious" and len(again.seen) >= 15


def test_a_failing_policy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Sampler):
        def act(self, observation):
            raise RuntimeError("no connection")

    monkeypatch.setattr("kbx_env.baselines.policy.make_policy", lambda spec, access=None: Broken())
    with pytest.raises(UsageError, match="activation/gelu_fp16: RuntimeError: no connection"):
        report.run(_args(tmp_path), grade=Fake())


KILLED = """
import os, sys
sys.path.insert(0, {root!r})
from kbx_env.baselines.policy import Needs
from kbx_env.eval import report
from kbx_env.outcome import Cases, Outcome, Stage, Verdict
seen = []
def grade(task, source, **options):
    if len(seen) == 4:
        os.kill(os.getpid(), 9)
    seen.append(task)
    return Outcome(task, Verdict.CORRECT, Stage.CORRECT, "cpu", "contract", cases=Cases(1, 1))
report.run(report.parser().parse_args({argv!r}), grade=grade)
"""


def test_the_sizes_that_are_timed_reach_the_grader_and_the_manifest(tmp_path: Path) -> None:
    asked = []

    def grade(task: str, source: bytes, **options) -> Outcome:
        asked.append(options["sizes"])
        return Fake()(task, source)

    for more in ((), ("--sizes", "held-out", "--resume")):
        out = report.run(_args(tmp_path, "--tasks", "math/cos", *more), grade=grade)
        assert json.loads((out / "report.json").read_text())["manifest"]["sizes"] == asked[-1]
    assert asked == ["published", "held-out"], "one does not answer for the other"
    assert report.main([*("--policy", "expert", "--backend", "cpu", "--sizes", "all"), "--out", str(tmp_path / "no")]) == 2


def test_a_run_killed_with_sigkill_goes_on(tmp_path: Path) -> None:
    argv = ["--policy", "expert", "--backend", "cpu", "--split", "all", "--out", str(tmp_path / "out")]
    argv += ["--tasks", FIFTEEN]
    code = KILLED.format(root=str(Path(__file__).resolve().parents[2]), argv=argv)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -9
    second = Fake()
    report.run(_args(tmp_path, "--resume"), grade=second)
    assert len(set(second.seen)) == 11


def test_it_runs_as_a_script_from_a_clone(tmp_path: Path) -> None:
    script = Path(report.__file__)
    done = subprocess.run([sys.executable, "-I", str(script), "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "--resume" in done.stdout


class Twice:
    """Submits two sources, and hands in one of them, a third, or none."""

    name = "twice"
    needs = Needs(grader_feedback=True)

    def __init__(self, final: str | None) -> None:
        self.final = final

    def run(self, task, env) -> Trajectory:
        env.grade(["a = 1", "b = 1"], round=0, labels=["one", "two"])
        return Trajectory(self.final, "nothing was good", tuple(env.turns))


@pytest.mark.parametrize(("final", "gradings", "seen"), [("b = 1", 2, 2), ("c = 1", 3, 3), (None, 2, 2)])
def test_an_episodic_policy_s_way_is_told_and_its_answer_graded_once(
    final: str | None, gradings: int, seen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kbx_env.baselines.policy.make_policy", lambda spec, access=None: Twice(final))
    grade = Fake()
    out = report.run(_args(tmp_path, "--tasks", "math/cos"), grade=grade)
    (row,) = json.loads((out / "report.json").read_text())["tasks"]
    assert len(grade.seen) == seen and row["spent"]["gradings"] == gradings and row["spent"]["calls"] is None
    assert [(t["label"], t["round"], t["correct"]) for t in row["turns"]] == [("one", 0, True), ("two", 0, True)]
    assert row["correct"] is (final is not None) and (final is not None or "nothing was good" in row["message"])
    again = Fake()
    report.run(_args(tmp_path, "--tasks", "math/cos", "--resume"), grade=again)
    assert again.seen == []


def test_overwriting_removes_an_earlier_report_s_pages_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "tasks").mkdir(parents=True)
    (out / "tasks" / "mine.py").write_text("precious")
    report.run(_args(tmp_path, "--tasks", "math/cos,math/pow", "--overwrite"), grade=Fake())
    assert (out / "tasks/math-cos.html").is_file() and list((out / "figures").glob("*.svg"))
    (out / "report.files.json").write_text(json.dumps([*json.loads((out / "report.files.json").read_text()), "../beside", 3]))
    (tmp_path / "beside").write_text("precious too")
    report.run(_args(tmp_path, "--tasks", "math/pow", "--overwrite"), grade=Fake())
    assert not (out / "tasks/math-cos.html").exists() and not (out / "sources/math-cos").exists()
    assert (out / "tasks/math-pow.html").is_file() and (out / "tasks/mine.py").read_text() == "precious"
    assert (tmp_path / "beside").read_text() == "precious too"


def test_an_earlier_report_stands_beside(tmp_path: Path) -> None:
    few = ("--tasks", "math/cos,math/pow,loss/*")
    first = report.run(_args(tmp_path, *few), grade=Fake())
    argv = ["--policy", "expert", "--backend", "cpu", "--split", "all", *few, "--compare", str(first), "--out"]
    argv.append(str(tmp_path / "two"))
    assert report.main([*argv[:-1], str(tmp_path / "no"), "--compare", str(tmp_path / "nothing")]) == 2
    out = report.run(report.parser().parse_args(argv), grade=Fake())
    page = (out / "report.html").read_text()
    assert "expert (out)" in page and page.count('<section id="policy-') == 2 and "solve the same" in page
    assert "policies" not in json.loads((out / "report.json").read_text()), "a run's own report holds its own answers"


def test_imports_ahead_of_the_pages_fail_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is not installed is told once, by the page that lacks it."""
    asked: list[str] = []

    def nothing(name: str) -> None:
        asked.append(name)
        raise ImportError(name)

    monkeypatch.setattr(pages.importlib, "import_module", nothing)
    faults: list[object] = []
    monkeypatch.setattr(threading, "excepthook", faults.append)
    pages.import_ahead().join()
    assert len(asked) > 2 and not faults
