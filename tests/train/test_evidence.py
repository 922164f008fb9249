"""The evidence script's own parts: shares of the time, commands that run out of it, and its statistics."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

FILE = Path(__file__).parents[2] / "benchmarks/train_evidence.py"


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
    budget = script.Budget(100.0, ["sft", "grpo", "report", "ppo"], lambda: now[0])
    shares = script.SHARES
    assert sum(shares.values()) == pytest.approx(1) and budget.take("sft") == pytest.approx(100 * shares["sft"])
    now[0] = 4.0
    rest = shares["grpo"] + shares["report"] + shares["ppo"]
    assert budget.take("grpo") == pytest.approx(96 * shares["grpo"] / rest)
    now[0] = 200.0
    assert budget.take("report") == 0
    assert script.Budget(100.0, ["ppo"], lambda: 0.0).take("ppo") == pytest.approx(100)


def test_commands_end_in_time(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    polite = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('what I had'); raise SystemExit(130)"
    deaf = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(60)"
    commands = {"quick": "print('done')", "bad": "raise SystemExit('no')", "polite": polite, "deaf": deaf}
    began = time.monotonic()
    ended = script.together({n: [sys.executable, "-c", c] for n, c in commands.items()}, 4.0, tmp_path, grace=1.0)
    assert time.monotonic() - began < 8
    assert {n: (e.status, e.stopped) for n, e in ended.items()} == {
        "quick": (0, False), "bad": (1, False), "polite": (130, True), "deaf": (-9, True),
    }  # fmt: skip
    assert "what I had" in ended["polite"].tail and "no" in ended["bad"].tail
    assert "polite: out of time" in capsys.readouterr().out


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
    assert sys.modules["_evidence_stats"].interval(np.full((2, 3), np.nan))["mean"] is None
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
        (["--parts", "ppo", "--batch", "60"], "multiple"), (["--parts", "ppo", "--gradings", "64"], "1024 in all"),
    ],
)  # fmt: skip
def test_mistakes(script: ModuleType, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.arguments(["out", *words])
    assert says in capsys.readouterr().err
