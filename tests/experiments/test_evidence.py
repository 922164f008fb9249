"""The evidence script's own parts: shares of the time, commands that run out of it, and its statistics."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

FILE = Path(__file__).parents[2] / "experiments/learning_evidence/train_evidence.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(FILE.parent))  # as where it runs as a script
    spec = importlib.util.spec_from_file_location("train_evidence", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    sys.path.remove(str(FILE.parent))
    return module


def test_what_a_step_leaves_is_the_others(script: ModuleType) -> None:
    now = [0.0]
    budget = script.Budget(100.0, ["sft", "grpo", "shaping", "report", "ppo"], lambda: now[0])
    shares = script.SHARES
    assert sum(shares.values()) == pytest.approx(1) and budget.take("sft") == pytest.approx(100 * shares["sft"])
    now[0] = 4.0
    rest = 1 - shares["sft"]
    assert budget.take("grpo") == pytest.approx(96 * shares["grpo"] / rest) and budget.take("shaping", 30.0) == 30.0
    now[0] = 200.0
    assert budget.take("report") == 0
    assert script.Budget(100.0, ["ppo"], lambda: 0.0).take("ppo") == pytest.approx(100)
    assert script.Budget(100.0, ["sft"], lambda: 0.0).take("sft", 300.0) == 100.0, "no more than is left"


def test_commands_end_in_time(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    polite = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('what I had'); raise SystemExit(130)"
    deaf = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(60)"
    commands = {"quick": "print('done')", "bad": "raise SystemExit('no')", "polite": polite, "deaf": deaf}
    began = time.monotonic()
    ended = script.together({n: [sys.executable, "-c", c] for n, c in commands.items()}, 2.0, tmp_path, grace=1.0)
    assert time.monotonic() - began < 6
    assert {n: (e.status, e.stopped) for n, e in ended.items()} == {
        "quick": (0, False), "bad": (1, False), "polite": (130, True), "deaf": (-9, True),
    }  # fmt: skip
    assert "what I had" in ended["polite"].tail and "no" in ended["bad"].tail
    assert "polite: out of time" in capsys.readouterr().out


def test_each_command_has_a_gpu_of_its_own(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    show = [sys.executable, "-c", "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])"]
    ended = script.together({n: show for n in "abc"}, 30.0, tmp_path / "two", gpus=["4", "7"])
    assert {n: e.tail.strip() for n, e in ended.items()} == {"a": "sees 4", "b": "sees 7", "c": "sees 4"}
    assert script.together({"a": show}, 30.0, tmp_path / "one", gpus=["4"])["a"].tail.strip() == "sees 4,7"


def test_an_interruption_leaves_no_child_and_tells_how_they_ended(script: ModuleType, tmp_path: Path) -> None:
    polite = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('what I had'); raise SystemExit(130)"
    heard: dict[str, Any] = {}
    began = time.monotonic()

    def said() -> str:
        if time.monotonic() - began > 1.5:
            raise KeyboardInterrupt
        return ""

    with pytest.raises(KeyboardInterrupt):
        script.together(
            {"polite": [sys.executable, "-c", polite]}, 60.0, tmp_path, progress=said, on_end=heard.__setitem__, every=0.2
        )
    assert heard["polite"].status == 130 and heard["polite"].stopped and "what I had" in heard["polite"].tail


def arguments(script: ModuleType, out: Path, *words: str) -> Any:
    return script.arguments([str(out), "--parts", "ppo", *words])


def test_what_a_killed_step_did_is_kept(script: ModuleType, tmp_path: Path) -> None:
    e = script.Evidence(arguments(script, tmp_path / "out", "--work", str(tmp_path / "w")))
    said = []

    def killed(e: Any) -> None:
        def collect(last: bool) -> None:
            said.append(last)
            e.result["found"], e.files["more"] = math.nan, [1, 2]

        e.collectors["ppo"] = collect
        assert json.loads((tmp_path / "out/evidence.json").read_text())["finished"] is False, "there from the beginning"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        e.all({"ppo": killed})
    found = json.loads((tmp_path / "out/evidence.json").read_text())
    assert said == [True] and found["found"] is None and found["finished"] is False and "seconds" in found
    assert json.loads((tmp_path / "out/more.json").read_text()) == [1, 2] and not list((tmp_path / "out").glob("*.part"))


def test_a_collector_that_fails_takes_nothing_with_it(script: ModuleType, tmp_path: Path) -> None:
    e = script.Evidence(arguments(script, tmp_path / "out", "--work", str(tmp_path / "w")))

    def step(e: Any) -> None:
        e.collectors["bad"] = lambda last: 1 / 0

    assert e.all({"ppo": step}) == 1
    found = json.loads((tmp_path / "out/evidence.json").read_text())
    assert found["finished"] is True and "ZeroDivisionError" in found["failures"]["bad, collecting"]


def test_files_are_bounded(script: ModuleType, tmp_path: Path) -> None:
    script.replace(tmp_path / "x.json", {"rows": list(range(10000)), "few": [1, 2, 3]}, most=4000)
    found = json.loads((tmp_path / "x.json").read_text())
    assert (tmp_path / "x.json").stat().st_size <= 4100 and found["few"] == [1, 2, 3] and found["halved"] == 4
    assert found["rows"][:2] == [0, 16]
    script.replace(tmp_path / "y.json", [{"a": 1}] * 1000, most=2000)
    assert json.loads((tmp_path / "y.json").read_text())["halved"] == 3


def test_sigterm_ends_the_script_with_its_evidence(tmp_path: Path) -> None:
    words = [str(tmp_path / "out"), "--parts", "ppo", "--minutes", "9", "--work", str(tmp_path / "w"), "--ppo-tasks", "reduce/mean"]
    with (tmp_path / "said").open("wb") as said:
        child = subprocess.Popen([sys.executable, str(FILE), *words], stdout=said, stderr=said)
    try:
        end = time.monotonic() + 120
        while b"ppo: ppo-0" not in (tmp_path / "said").read_bytes():
            assert child.poll() is None and time.monotonic() < end, (tmp_path / "said").read_text()
            time.sleep(0.1)
        time.sleep(0.5)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 130
    finally:
        child.kill()
        child.wait()
    found = json.loads((tmp_path / "out/evidence.json").read_text())
    assert found["finished"] is False and found["steps"]["ppo-0"]["stopped"] and found["ppo"]["training"] == {}


def test_demonstrations_that_are_long_or_held_back(script: ModuleType) -> None:
    from datasets import Dataset

    rows = [{"task": f"t{k}", "completion": [{"role": "assistant", "content": "x" * n}]} for k in range(9) for n in (5, 50 + k)]
    rows.append({"task": "long", "completion": [{"role": "assistant", "content": "x" * 99}]})
    data, among = Dataset.from_list(rows), {f"t{k}" for k in range(6)} | {"long"}

    def lengths(texts: list[str]) -> list[int]:
        return [len(t) for t in texts]

    left, told = script.shown(data, lengths, among, most=54, hold=0.34, seed=1)
    assert told["rows"] == 19 and told["too_long"] == 5 and len(told["held_tasks"]) == 2 and set(told["held_tasks"]) <= among
    assert not set(left["task"]) & set(told["held_tasks"]) and "long" not in left["task"] and len(left) == told["shown"]
    assert told["shown"] + told["too_long"] + told["held"] == 19 and set(told["shown_tasks"]) == set(left["task"])
    again = script.shown(data, lengths, among, most=54, hold=0.34, seed=1)[1]
    other = [script.shown(data, lengths, among, most=54, hold=0.34, seed=k)[1]["held_tasks"] for k in range(2, 9)]
    assert again == told and any(h != told["held_tasks"] for h in other), "a seed chooses"
    assert script.shown(data, lengths, among, most=99, hold=0.0, seed=1)[1]["shown"] == 19
    with pytest.raises(ValueError, match="most-tokens 1"):
        script.shown(data, lengths, among, most=1, hold=0.0, seed=1)


def test_checkpoints_of_earlier_commands_are_found(script: ModuleType, tmp_path: Path) -> None:
    def at(run: str, folder: str, gradings: int) -> None:
        (tmp_path / run / folder).mkdir(parents=True)
        (tmp_path / run / folder / "gradings.json").write_text(json.dumps({"gradings": gradings, "step": gradings // 4}))

    assert script.common(tmp_path) == ("final", {}, [])
    for k in (1, 2, 3):
        at("single-0", f"at-{k}", 64 * k)
    at("multi-0", "at-1", 70)
    at("fusion-shaped-0", "at-1", 70)
    (tmp_path / "multi-1").mkdir()
    assert script.common(tmp_path) == (
        "at-1", {"multi-0": {"gradings": 70, "updates": 17}, "single-0": {"gradings": 64, "updates": 16}}, ["multi-1"],
    )  # fmt: skip
    at("multi-1", "final", 30)
    mark, counts, without = script.common(tmp_path)
    assert mark == "final" and counts == {"multi-1": {"gradings": 30, "updates": 7}} and without == ["multi-0", "single-0"]
    (tmp_path / "sft/final").mkdir(parents=True)
    e = script.Evidence(arguments(script, tmp_path / "out", "--work", str(tmp_path)))
    assert e.model == tmp_path / "sft/final"


def test_modes_are_asked_alike(script: ModuleType, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kbx_env.train import grpo, settings

    words = [str(tmp_path / "out"), "--work", str(tmp_path / "w"), "--model", str(model_folder), "--seeds", "1", "--length", "64"]
    more = ["--shaping-tasks", "fusion=fused_cos_signbit", "--feedback", "32", "--temperature", "0.7", "--min-p", "0.1",
            "--reward", "beginner", "--minibatches", "2", "--at-once", "12"]  # fmt: skip
    e = script.Evidence(script.arguments([*words, "--parts", "single,multi,shaping", *more]))
    (tmp_path / "w/held.json").write_text(json.dumps({"held_tasks": ["math/erfc_sqrt", "random/logspace"]}))
    ran: dict[str, list[str]] = {}
    monkeypatch.setattr(e, "run", lambda step, commands, *a: ran.setdefault(step, []).extend(commands))
    assert e.all(script.STEPS) == 0, e.result["failures"]
    assert ran == {"grpo": ["single-0", "multi-0"], "shaping": ["fusion-unshaped-0", "fusion-shaped-0"]}
    of = {n: settings.read(grpo.Settings, [str(tmp_path / f"w/grpo-{n}.yaml")]) for names in ran.values() for n in names}
    single, multi = of["single-0"], of["multi-0"]
    assert single.tasks == multi.tasks == "math/erfc_sqrt,random/logspace", "what SFT was not shown"
    assert single.turn_length is None and single.trainer["max_completion_length"] == multi.turn_length == 64
    assert multi.trainer["max_completion_length"] == 2 * 64 + 32 and multi.max_turns == 2
    assert {(s.trainer["temperature"], s.trainer["min_p"]) for s in of.values()} == {(0.7, 0.1)}
    assert single.reward == multi.reward == "beginner"
    for s, answers in ((single, 64), (multi, 32)):  # a batch has so many, an update half of them
        each = s.trainer["per_device_train_batch_size"]
        assert each * s.trainer["steps_per_generation"] == answers == 2 * each * s.trainer["gradient_accumulation_steps"]
        assert each == 8, "what divides, at most 12"
    shaped, unshaped = of["fusion-shaped-0"], of["fusion-unshaped-0"]
    assert (shaped.reward, unshaped.reward) == ("fusion", "default") and shaped.tasks == unshaped.tasks and shaped.mode == "single"
    assert e.result["train_tasks"]["fusion"] == {"tasks": ["fusion/fused_cos_signbit"], "too_long": 0}
    job = json.loads((tmp_path / "w/fusion-shaped-0.json").read_text())
    assert job["marks"] is False and json.loads((tmp_path / "w/multi-0.json").read_text())["marks"] is True


def test_a_report_may_ask_for_tasks_that_were_learnt(script: ModuleType, tmp_path: Path, model_folder: Path) -> None:
    words = [str(tmp_path / "out"), "--work", str(tmp_path / "w"), "--model", str(model_folder), "--parts", "report"]
    for more, split, tasks in (((), "eval", "*"), (("--report-on", "math/erfc_sqrt"), "train", "math/erfc_sqrt")):
        e = script.Evidence(script.arguments([*words, *more]))
        e.run = lambda *a: None
        script.STEPS["report"](e)
        job = json.loads((tmp_path / "w/report-sft-0.json").read_text())
        assert (job["split"], job["tasks"]) == (split, tasks)


def test_nothing_goes_on_from_too_few_steps(
    script: ModuleType, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "assistant", "content": "y"}], "task": "math/abs"}
    (tmp_path / "d.jsonl").write_text(json.dumps(row) + "\n")

    def ran(steps: int) -> tuple[list[str], str]:
        work, asked = tmp_path / str(steps), list[str]()
        words = ["--work", str(work), "--model", str(model_folder), "--data", str(tmp_path / "d.jsonl"), "--parts", "sft,single"]
        more = ["--hold", "0", "--least-steps", "50", "--seeds", "1", "--length", "64", "--grpo-on", "all"]
        e = script.Evidence(script.arguments([str(tmp_path / "out"), *words, *more]))

        def run(step: str, *_: Any) -> None:
            asked.append(step)
            if step == "sft":
                shutil.copytree(model_folder, work / "sft/final")
                (work / "sft/final/gradings.json").write_text(json.dumps({"gradings": 0, "step": steps}))

        monkeypatch.setattr(e, "run", run)
        e.all(script.STEPS)
        return asked, str(e.result["failures"])

    assert ran(50) == (["sft", "grpo"], "{}")
    asked, failures = ran(49)
    assert asked == ["sft"] and "SFT did 49 steps, fewer than --least-steps 50" in failures


def test_grpo_on_what_sft_was_not_shown(
    script: ModuleType, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kbx_env.train import grpo, settings

    def tasks(on: str, told: dict[str, Any], among: str = "math/erf*,math/abs") -> list[str]:
        work = tmp_path / on
        work.mkdir(exist_ok=True)
        words = ["--work", str(work), "--model", str(model_folder), "--seeds", "1", "--length", "64", "--parts", "single"]
        e = script.Evidence(script.arguments([str(tmp_path / "out"), *words, "--tasks", among, "--grpo-on", on]))
        (work / "held.json").write_text(json.dumps(told))
        monkeypatch.setattr(e, "run", lambda *a: None)
        if e.all(script.STEPS):
            return [str(e.result["failures"])]
        return settings.read(grpo.Settings, [str(work / "grpo-single-0.yaml")]).tasks.split(",")

    told = {"held_tasks": ["math/erf"], "shown_tasks": ["math/abs"]}
    assert tasks("held", told) == ["math/erf"]
    assert tasks("unseen", told) == ["math/erf", "math/erfc_sqrt"], "what was too long for SFT too"
    assert sorted(tasks("all", told)) == ["math/abs", "math/erf", "math/erfc_sqrt"]
    assert "does not say what SFT was shown" in tasks("unseen", {"held_tasks": ["math/erf"]})[0], "of an older run"
    for on in ("held", "unseen"):
        assert f"--grpo-on {on}: it leaves none of --tasks math/abs" in tasks(on, told, "math/abs")[0]
    assert tasks("held", {}) == tasks("all", {}), "nothing was held back"


def test_a_batch_that_was_graded_is_learnt_from_whole(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.learning_evidence.jobs import MARKS, _fits, _until, updates_of

    now = time.monotonic()
    assert _fits(now + 5, [10.0, 0.1, 0.1, 0.1]) and not _fits(now + 5, [10.0, 0.1, 0.1, 0.1], 4), "the next batch takes as long"
    args = SimpleNamespace(steps_per_generation=4, gradient_accumulation_steps=2, num_iterations=2)
    assert updates_of(args) == 4 and updates_of(SimpleNamespace(gradient_accumulation_steps=2)) == 1
    kept: list[tuple[str, int]] = []
    saving = "experiments.learning_evidence.jobs._save"
    monkeypatch.setattr(saving, lambda trainer, folder, gradings: kept.append((folder.name, gradings)))
    until, control = _until(now + 1e6, 16 * MARKS, tmp_path), SimpleNamespace(should_training_stop=False)
    until.trainer = None
    for step in range(1, 4 * MARKS + 1):
        assert not control.should_training_stop
        state = SimpleNamespace(global_step=step)
        until.on_log(args, state, control, {"gradings": 16 * (1 + (step - 1) // 4)})
        assert len(kept) == step // 4
    assert control.should_training_stop and kept[-1] == (f"at-{MARKS}", 16 * MARKS)


def test_each_seed_tells_its_own_schedules(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--work", str(tmp_path / "w"), "--ppo-seeds", "2", "--ppo-tasks", "math/bessel_j1"]
    e = script.Evidence(arguments(script, tmp_path / "out", *words))

    def run(step: str, commands: Any, *a: Any) -> None:
        for k in range(2):
            out = tmp_path / f"w/ppo-{k}"
            (out / "checkpoints/000001").mkdir(parents=True, exist_ok=True)
            (out / "best-held-out.jsonl").write_text(json.dumps({"task": "math/bessel_j1", "settings": {"BLOCK": 64 << k}}))

    monkeypatch.setattr(e, "run", run)
    script.STEPS["ppo"](e)
    found = e.files["ppo"]["settings"]
    assert {n: s["math/bessel_j1"]["BLOCK"] for n, s in found.items()} == {"ppo-0/best-held-out": 64, "ppo-1/best-held-out": 128}


def schedule(name: str, seed: int | None, task: str, speedup: float | None, **more: Any) -> dict[str, Any]:
    plain = {"sizes": "held-out", "schedule": name, "seed": seed, "task": task, "repetition": 0, "reward": speedup, "share": None}
    return {**plain, "verdict": "correct" if speedup else "incorrect", "speedup": speedup, **more}


def test_schedules_by_geometric_mean(script: ModuleType) -> None:
    rows = [schedule("default", None, t, 2.0, repetition=k) for t in ("a", "b", "c") for k in range(2)]
    rows += [schedule("policy", s, t, v, repetition=k) for s in (0, 1) for t, v in (("a", 4.0), ("b", 1.0)) for k in range(2)]
    rows += [schedule("policy", 0, "c", None), schedule("best", 0, "a", 2.4)]
    guessed: dict[str, Any] = {"sizes": "published", "verdict": "correct"}
    rows += [schedule("default", None, "a", None, share=0.5, **guessed), schedule("policy", 0, "a", None, share=0.6, **guessed)]
    found = script.beside(rows)
    whole = found["held-out"]["policy"]["speedup_over_default"]
    assert whole["mean"] == pytest.approx(1.0) and whole["low"] == pytest.approx(0.5, abs=1e-3) and whole["tasks"] == 2
    assert whole["high"] == pytest.approx(2.0, abs=1e-3) and whole["seeds"] == 2 and found["held-out"]["policy"]["by"] == "measured"
    assert found["held-out"]["policy"]["failed"] == {"c": "incorrect"}
    assert found["held-out"]["best"]["speedup_over_default"]["mean"] == pytest.approx(1.2)
    told = found["published"]["policy"]
    assert told["speedup_over_default"]["mean"] == pytest.approx(1.2) and told["by"] == "estimated" and not told["failed"]


def test_shaped_runs_beside_unshaped_ones(script: ModuleType, tmp_path: Path) -> None:
    for kind, gain in (("unshaped", 1), ("shaped", 2)):
        for seed in range(2):
            folder = tmp_path / f"fusion-{kind}-{seed}"
            folder.mkdir()
            rates = [min(0.6, gain * (k + 0.1 * seed) / 100) for k in range(60)]
            lines = [{"step": k, "gradings": 10 * (k + 1), "correct_rate": r, "compile_rate": r} for k, r in enumerate(rates)]
            (folder / "log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (tmp_path / "quantization-shaped-0").mkdir()
    short, whole = script.curves(tmp_path, {"fusion": "fusion/*", "quantization": "quantization/*"})
    of = short["fusion"]["metrics"]["correct"]
    assert of["shaped"]["gradings_to_target"] < of["unshaped"]["gradings_to_target"] and of["shaped"]["ratio"]["value"] < 0.7
    assert "curve" not in of["shaped"] and "curve" in whole["fusion"]["metrics"]["correct"]["shaped"]
    assert "quantization-shaped-0" in short["quantization"]["lacking"][0] and short["fusion"]["lacking"] == []


def row(kind: str, seed: int, task: int, sample: int, first: float | None) -> dict[str, Any]:
    return {"kind": kind, "seed": seed, "task": f"t{task:02}", "sample": sample, "first": first, "best": first, "compiled": 1.0,
            "correct": 0.0}  # fmt: skip


def test_differences_are_paired(script: ModuleType) -> None:
    # Tasks differ by far more than what training adds: only pairs can tell.
    rows = [
        row(k, s, t, n, t / 20 + (0.01 if k == "single" else 0.0) + 0.001 * s)
        for k in ("sft", "single") for s in range(3) for t in range(20) for n in range(2)
    ]  # fmt: skip
    found = script.compared(rows, ("sft", "single", "multi"))
    gain, level = found["first"]["single - sft"], found["first"]["sft"]
    assert gain["mean"] == pytest.approx(0.01) and 0 < gain["low"] <= gain["high"] < 0.02 and gain["tasks"] == 20
    assert level["high"] - level["low"] > 0.1 and found["first"]["answers"] == 40 and "multi - sft" not in found["first"]


def test_masked_and_missing_answers_are_no_zeros(script: ModuleType) -> None:
    rows = [row("sft", 0, 0, 0, 1.0), row("sft", 0, 0, 1, None), row("sft", 0, 1, 0, 0.5), row("sft", 0, 1, 1, 0.5)]
    rows += [row("single", 0, 0, 0, None), row("single", 0, 1, 0, 0.75)]  # cut off after its first sample
    found = script.compared(rows, ("sft", "single"))
    assert found["first"]["answers"] == 2 and found["first"]["sft"]["mean"] == 0.75
    assert found["first"]["single - sft"]["mean"] == 0.25 and found["first"]["single - sft"]["tasks"] == 1
    assert sys.modules["experiments.learning_evidence.stats"].interval(np.full((2, 3), np.nan))["mean"] is None
    assert script.compared([], ("sft",))["first"] == {"answers": 0}


def test_a_first_answer_counts_without_the_other_turns(script: ModuleType) -> None:
    rows = [row(k, 0, t, 0, 0.5) for k in ("sft", "multi") for t in range(3)]
    del rows[-1]["best"]
    found = script.compared(rows, ("sft", "multi"))
    assert found["first"]["answers"] == 3 and found["best"]["answers"] == 2 and found["best"]["multi - sft"]["tasks"] == 2


def test_seeds_that_are_lacking_leave_their_pair_out(script: ModuleType) -> None:
    rows = [row("sft", s, t, 0, 0.1 * s) for s in range(3) for t in range(2)]
    rows += [row("single", 2, t, 0, 0.3) for t in range(2)]
    assert script.compared(rows, ("sft", "single"))["first"]["single - sft"]["mean"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--parts", "sft"], "--data"), (["--parts", "nothing"], "unknown part"), (["--parts", "ppo", "--seeds", "0"], "above 0"),
        (["--parts", "ppo", "--batch", "60"], "multiple"), (["--parts", "ppo", "--minibatches", "3"], "multiple"),
        (["--parts", "ppo", "--gradings", "64"], "1024 in all"),
        (["--parts", "ppo", "--hold", "1"], "below 1"), (["--parts", "ppo", "--sft-minutes", "10"], "at most"),
        (["--parts", "ppo", "--tasks", "nothing"], "--tasks"), (["--parts", "ppo", "--eval-tasks", "relu6"], "--eval-tasks"),
        (["--parts", "report", "--report-on", "activation/relu"], "--report-on"),
        (["--parts", "shaping", "--shaping-tasks", "fuson=*"], "fusion"), (["--parts", "ppo", "--shaping-tasks", "x"], "PRESET="),
        (["--parts", "ppo", "--ppo-tasks", "nothing"], "--ppo-tasks"), (["--parts", "ppo", "--temperature", "0"], "above 0"),
    ],
)  # fmt: skip
def test_mistakes(script: ModuleType, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.arguments(["out", *words])
    assert says in capsys.readouterr().err
