"""The comparison of reward presets, by a learner that only writes logs whose curves are known."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("omegaconf")
pytest.importorskip("matplotlib")
from kbx_env.train import compare_rewards, reward_curves  # noqa: E402

from kbx_env.errors import UsageError  # noqa: E402

SCRIPT = Path(compare_rewards.__file__)
SEEDS, STEPS, EACH = 4, 40, 50
LEARNER = '''
import json, pathlib, sys, time
given = dict(word.split("=", 1) for word in sys.argv[2:])
out, base = pathlib.Path(given["out"]), pathlib.Path(given["base"])
with (base / "starts").open("a") as file:
    file.write(out.name + (" " + given["resume"] if "resume" in given else "") + "\\n")
if given.get("bad"):
    print("fake.py: no such thing")
    sys.exit(int(given["bad"]))
out.mkdir(exist_ok=True)
speed = 2.0 if given["reward"] == "fusion" else 1.0
level = float(given.get("level", 0.45)) * (1 + 0.04 * (int(given["seed"]) - 1.5))
with (out / "log.jsonl").open("w") as file:
    for step in range(1, 41):
        if out.name == "default-seed1" and step == 20 and (base / "wait").exists():
            file.flush()
            (base / "half").touch()
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                sys.exit(130)
        # The middle of a step, so that its mean is that of a straight line.
        v = speed * level * (step - 0.5) / 40
        c = min(1.0, 0.2 + 0.5 * speed * (1 + 0.04 * int(given["seed"])) * (step - 0.5) / 40)
        line = {"step": step, "seconds": 2.0 * step, "reward": 9.0, "gradings": 50 * step, "compile_rate": c,
                "correct_rate": v, "solved_rate": v, "masked": 0, "terms/compiles": c, "terms/cases": (v + c) / 3,
                "terms/correct": v, "terms/speed": None, "turns": 1}
        file.write(json.dumps(line) + "\\n")
    file.write(json.dumps({"step": 40, "train_runtime": 80.0}) + "\\n")
'''
Go = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "fake.py").write_text(LEARNER)
    (tmp_path / "fake.yaml").write_text("a: 1\n")
    return ["--presets", "default,fusion", "--tasks", "fusion/*", "--seeds", str(SEEDS), "--config", str(tmp_path / "fake.yaml"),
            "--out", str(tmp_path / "out"), "--learner", str(tmp_path / "fake.py"), f"base={tmp_path}"]  # fmt: skip


@pytest.fixture
def go(command: list[str], tmp_path: Path) -> Go:
    def run(*more: str) -> tuple[int, dict[str, Any]]:
        status = compare_rewards.main([*command, *more])
        file = tmp_path / "out/comparison.json"
        return status, json.loads(file.read_text()) if file.exists() else {}

    return run


def _starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().splitlines() if (folder / "starts").exists() else []


def test_twice_as_fast_is_told_as_half_the_gradings(go: Go, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, told = go()
    assert status == 0 and told["solved"] and told["headline"] == "correct" and told["budget_gradings"] == STEPS * EACH
    first, other = (told["metrics"]["correct"][p] for p in ("default", "fusion"))
    # A line from 0 to 0.45: its last fifth has the mean 0.405, which it passes at 0.9 of the budget.
    assert first["final"]["value"] == pytest.approx(0.405) and first["final"]["seeds"] == SEEDS
    assert first["final"]["low"] < 0.405 < first["final"]["high"] and np.mean(first["final_per_seed"]) == pytest.approx(0.405)
    assert first["gradings_to_target"] == pytest.approx(1800) and other["gradings_to_target"] == pytest.approx(900)
    assert other["ratio"]["value"] == pytest.approx(0.5, abs=1e-9) and not other["ratio"]["unbounded"]
    assert 0.4 < other["ratio"]["low"] < 0.5 < other["ratio"]["high"] < 0.6
    slow = [0.45 * (1 + 0.04 * (k - 1.5)) for k in range(SEEDS)]
    # The seed that never gets there in the grid has no number, and no wrong one.
    expected = [0.405 / s * 2000 if 0.405 / s <= 0.95 else None for s in slow]
    assert first["gradings_to_target_per_seed"] == [pytest.approx(e) if e else None for e in expected]
    assert [pytest.approx(0.2025 / s * 2000) for s in slow] == other["gradings_to_target_per_seed"]
    # The base reward by default's weights; what has no time is left out.
    weights = {"compiles": 0.1, "cases": 0.3, "correct": 0.6}
    base = sum(w * told["metrics"][m]["fusion"]["final"]["value"] for m, w in weights.items())
    assert told["metrics"]["base"]["fusion"]["final"]["value"] == pytest.approx(base)
    assert told["base_terms"] == ["compiles", "cases", "correct", "speed"]
    assert len(told["conclusion"]) == 1 and "fusion needs fewer gradings than default" in told["conclusion"][0]
    page = (tmp_path / "out/comparison.md").read_text()
    assert "0.50 [0.4" in page and "40 % [" in page and "torch" in page and "Device" in page and "window of 200 gradings" in page
    assert told["conclusion"][0] in page and told["conclusion"][0] in " ".join(capsys.readouterr().out.split("\n"))
    picture = (tmp_path / "out/comparison.png").read_bytes()
    assert picture[:4] == b"\x89PNG" and len(picture) > 9000
    assert "<svg" in (tmp_path / "out/comparison.svg").read_text()


def test_finished_runs_are_not_repeated_and_more_seeds_can_follow(go: Go, tmp_path: Path) -> None:
    go("--seeds", "1")
    assert _starts(tmp_path) == ["default-seed0", "fusion-seed0"]
    status, told = go("--seeds", "2")
    assert status == 0 and told["seeds"] == {"default": [0, 1], "fusion": [0, 1]}
    assert _starts(tmp_path)[2:] == ["default-seed1", "fusion-seed1"]
    (tmp_path / "out/comparison.json").unlink()
    assert compare_rewards.main(["--out", str(tmp_path / "out"), "--report-only"]) == 0
    assert (tmp_path / "out/comparison.json").exists() and len(_starts(tmp_path)) == 4


def test_one_seed_concludes_nothing(go: Go) -> None:
    told = go("--seeds", "1")[1]
    assert told["metrics"]["correct"]["fusion"]["ratio"]["low"] is None and "nothing can be concluded" in told["conclusion"][0]


def test_a_stopped_experiment_goes_on(command: list[str], go: Go, tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    child = subprocess.Popen([sys.executable, str(SCRIPT), *command], stderr=subprocess.PIPE)
    until = time.monotonic() + 60
    while not (tmp_path / "half").exists():
        assert time.monotonic() < until and child.poll() is None
        time.sleep(0.1)
    # Nobody else may work in the folder meanwhile.
    assert compare_rewards.main(command) == 2
    child.send_signal(signal.SIGINT)
    said = child.communicate(timeout=30)[1].decode()
    assert child.returncode == 130 and "interrupted" in said
    assert _starts(tmp_path) == ["default-seed0", "fusion-seed0", "default-seed1"]
    assert compare_rewards.main(["--out", str(tmp_path / "out"), "--report-only"]) == 0
    assert json.loads((tmp_path / "out/comparison.json").read_text())["unfinished"] == ["default-seed1"]
    (tmp_path / "wait").unlink()
    status, told = go()
    assert status == 0 and told["unfinished"] == [] and len(told["runs"]) == 2 * SEEDS
    assert _starts(tmp_path)[3:] == ["default-seed1 last", *(f"{p}-seed{k}" for k, p in
                                     [(1, "fusion"), (2, "default"), (2, "fusion"), (3, "default"), (3, "fusion")])]  # fmt: skip


def test_a_killed_one_leaves_the_folder_to_its_learner(command: list[str], go: Go, tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    child = subprocess.Popen([sys.executable, str(SCRIPT), *command, "--seeds", "2"], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (tmp_path / "half").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    orphan = [int(p.name) for p in Path("/proc").glob("[0-9]*") if f"out={tmp_path}/out/default-seed1" in _cmdline(p)]
    child.kill()
    child.wait()
    assert len(orphan) == 1 and compare_rewards.main(command) == 2, "its learner still writes there"
    os.kill(orphan[0], signal.SIGKILL)
    (tmp_path / "wait").unlink()
    while _alive(orphan[0]):
        time.sleep(0.05)
    assert go("--seeds", "2")[0] == 0 and _starts(tmp_path)[3:] == ["default-seed1 last", "fusion-seed1"]


def _alive(pid: int) -> bool:
    """Whether a process may still hold files: its command line is gone sooner, as its memory goes before its files."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def _cmdline(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def test_where_nothing_was_solved_it_says_so(go: Go, tmp_path: Path) -> None:
    status, told = go("level=0")
    assert status == 0 and not told["solved"] and told["headline"] == "compiles"
    said = " ".join(told["conclusion"])
    assert f"No run of any preset ever solved anything: 0 correct kernels in {2 * SEEDS * 2000:,} gradings" in said
    assert "fewer gradings than default to reach default's final compile rate" in said and "final share of telling cases" in said
    assert told["metrics"]["correct"]["fusion"]["ratio"]["value"] is None
    assert told["metrics"]["correct"]["default"]["gradings_to_target"] is None, "0 is reached by doing nothing"
    assert told["conclusion"][0] in (tmp_path / "out/comparison.md").read_text()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--presets", "default,fuson"], "fuson"), (["--presets", "default"], "two different"),
        (["--presets", "fusion,fusion"], "two different"), (["--tasks", "nothing/*"], "nothing/"),
        (["--seeds", "0"], "--seeds is 0"), (["--config", "nowhere.yaml"], "nowhere.yaml"), (["seed=3"], "set by this script"),
        (["word"], "key=value"), (["--learner", "nowhere.py"], "no learner"), (["--out", "{}/fake.py"], "is a file"),
        (["--out", "{}"], "not empty"),
    ],
)  # fmt: skip
def test_bad_usage_starts_nothing(
    argv: Sequence[str], says: str, go: Go, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go(*(a.format(tmp_path) for a in argv)) == (2, {})
    told = capsys.readouterr().err
    assert says in told and told.count("\n") == 1 and not _starts(tmp_path) and not (tmp_path / "out").exists()


def test_a_missing_option_is_named_with_an_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--out", str(tmp_path / "out")]
    for option, value in (("presets", "default,fusion"), ("seeds", "5"), ("config", "train/configs/grpo.yaml")):
        assert compare_rewards.main(given) == 2
        assert f"--{option} is needed (all but --report-only); give --{option} {value}" in capsys.readouterr().err
        given += [f"--{option}", value]
    assert not (tmp_path / "out").exists()


@dataclass
class Settings:
    """What the learner itself would read."""

    out: str = "???"
    base: str = ""
    reward: str = "default"
    tasks: str = "*"
    seed: int = 0
    resume: str | None = None
    rate: float = 1.0
    a: int = 0


@pytest.mark.parametrize(("word", "says"), [("rte=2", "rte"), ("rate=fast", "float")])
def test_the_learners_own_settings_are_checked_before_it_starts(
    word: str, says: str, go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = types.ModuleType("kbx_env.train.grpo")
    made.Settings = Settings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kbx_env.train.grpo", made)
    monkeypatch.setattr(compare_rewards, "LEARNER", tmp_path / "fake.py")
    assert go(word)[0] == 2 and says in capsys.readouterr().err and not _starts(tmp_path)
    assert go("rate=2", "--seeds", "1")[0] == 0 and len(_starts(tmp_path)) == 2


def test_a_task_of_the_eval_split_is_no_task_to_train_on(go: Go, tmp_path: Path) -> None:
    from kbx_env.spec.catalog import splits

    assert go("--tasks", next(t for t, s in splits().items() if s == "eval"))[0] == 2 and not _starts(tmp_path)


def test_another_experiment_keeps_its_folder(go: Go, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go("--seeds", "1")
    for more in (["--tasks", "*"], ["more=1"]):
        assert go("--seeds", "1", *more)[0] == 2 and "in use by another experiment" in capsys.readouterr().err
    assert len(_starts(tmp_path)) == 2


@pytest.mark.parametrize(("returned", "status"), [(2, 2), (1, 1)])
def test_a_learner_that_fails_ends_it(
    returned: int, status: int, go: Go, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go(f"bad={returned}")[0] == status and _starts(tmp_path) == ["default-seed0"]
    said = capsys.readouterr().err
    assert "default-seed0 failed" in said and "no such thing" in said


def test_report_only_asks_for_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_rewards.main(["--out", str(tmp_path), "--report-only"]) == 2
    assert compare_rewards.main(["--out", str(tmp_path), "--report-only", "--presets", "default,fusion"]) == 2
    assert "no finished run of 'default'" in capsys.readouterr().err


def _run(preset: str, seed: int, values: Sequence[float], each: float = 10.0) -> reward_curves.Run:
    v = np.array(values, dtype=float)
    return reward_curves.Run(preset, seed, each * np.arange(1, len(v) + 1), dict.fromkeys(reward_curves.METRICS, v), 1.0)


def test_windows_weigh_by_gradings_and_leave_out_what_is_unknown() -> None:
    run = _run("default", 0, [0.0, 1.0, math.nan, 0.5])
    mean = run.mean("correct", np.array([0.0, 5.0, 10.0, 20.0]), np.array([20.0, 15.0, 40.0, 30.0]))
    assert mean[:3] == pytest.approx([0.5, 0.5, 0.75]) and math.isnan(mean[3])


def test_noise_is_told_as_noise_and_what_is_never_reached_has_no_upper_end() -> None:
    random = np.random.default_rng(1)
    noisy = [_run(p, k, np.clip(random.uniform(0.3, 0.7) + random.normal(0, 0.1, 60), 0, 1)) for p in ("a", "b") for k in range(5)]
    ratio = reward_curves.compare(noisy)["metrics"]["correct"]["b"]["ratio"]
    assert ratio["low"] < 1 and (ratio["unbounded"] or ratio["high"] > 1)
    line = np.linspace(0, 1, 60)
    runs = [_run(p, k, line * f * (1 + 0.02 * k)) for p, f in (("a", 0.6), ("b", 0.2)) for k in range(5)]
    told = reward_curves.compare(runs)["metrics"]["correct"]["b"]
    assert told["gradings_to_target"] is None and told["gradings_to_target_per_seed"] == [None] * 5
    assert told["ratio"]["value"] is None and told["ratio"]["unbounded"] and told["ratio"]["never"] == 1.0
    assert told["ratio"]["low"] > 1.0 and told["difference"]["high"] < 0


def test_a_run_that_nobody_could_judge_is_no_run_without_solutions() -> None:
    lines = [{"step": 1, "gradings": 4, "correct_rate": None, "compile_rate": None}]
    with pytest.raises(UsageError, match="default, seed 3.*masked"):
        reward_curves.runs_of({("default", 3): lines}, {})


def test_gradings_that_go_back_are_no_log_of_one_run(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1, "gradings": 9}\n{"step": 2, "gradings": 4}\n{"step": 3, "grad')
    with pytest.raises(UsageError, match="go back"):
        reward_curves.lines_of(tmp_path)


def test_an_interval_needs_seeds_that_differ() -> None:
    assert reward_curves.interval([0.5, 0.5, 0.5]) == {"value": 0.5, "low": None, "high": None, "seeds": 3}
    told = reward_curves.interval([0.4, 0.6])
    assert told["value"] == pytest.approx(0.5) and told["high"] - told["value"] == pytest.approx(12.706 * 0.1, rel=1e-3)
    assert reward_curves.interval([0.4, 0.6], 1.0)["high"] == 1.0
    assert reward_curves.interval([math.nan])["seeds"] == 0
