"""The study of timed rewards: its answers, the requests of its gradings, and training and comparison on a made-up table."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from kbx_env import jsonl
from kbx_env.errors import UsageError
from kbx_env.executor import InlinePool
from kbx_env.options import GradeOptions
from kbx_env.outcome import Cases, CaseTime, Fault, Outcome, Stage, Timing, Verdict
from kbx_env.spec.catalog import load_task, splits

pytest.importorskip("trl")
pytest.importorskip("matplotlib")
from experiments.timed_rewards import grade, study  # noqa: E402
from experiments.timed_rewards.answers import HELD_OUT, SPACES, TRAINED, Answer, all_answers, by_shape  # noqa: E402
from experiments.true_reward.cheats import honest  # noqa: E402

TASK, OTHER = "fusion/fused_cos_signbit", "optimizer/AdamW"


class MadeUp:
    """A grader without a GPU: the last schedule of a task is twice as fast as its first one."""

    def __init__(self) -> None:
        self.asked = list[tuple[str, dict[str, Any]]]()
        self.known = {(t, a.source.encode()): a for t in SPACES for a in all_answers(t)}

    def __call__(self, task: str, source: bytes, **options: Any) -> Outcome:
        """Grade an answer of the study."""
        self.asked.append((task, options))
        answer = self.known[task, source]
        if answer.faults:
            return Outcome(task, Verdict.INCORRECT, Stage.CORRECT, "cuda", "contract", Fault.POLICY, "wrong", cases=Cases(1, 4))
        every = SPACES[task].schedules()
        speed = 1.1 * 2 ** (every.index(answer.schedule) / (len(every) - 1)) * (1 + 0.01 * options["seed"])
        times = CaseTime("n", 100.0, 100.0 / speed, speed, speed / 1.01, speed * 1.01, 40)
        timing = Timing(speed, speed / 1.01, speed * 1.01, None, (times,), "made up", precision=options["precision"])
        return Outcome(task, Verdict.CORRECT, Stage.TIME, "cuda", "contract", None, cases=Cases(4, 4), timing=timing)


def _table(folder: Path, tasks: tuple[str, ...], rounds: int = 1) -> Path:
    out = folder / "table.jsonl"
    list(grade.run(grade.plan(tasks, rounds), out, InlinePool(MadeUp()), {}, math.inf))
    return out


def test_every_answer_is_a_program_of_its_own() -> None:
    for task, space in SPACES.items():
        assert splits()[task] == "train" and load_task(task).timed and len(space.faults) == 2
        found = by_shape(task)  # raises where two answers are the same
        assert len(found) == 4 * len(space.schedules())
        assert Answer(task, space.schedules()[0]).source == _explicit(task), "the first schedule is the project's own"
    assert set(TRAINED) | set(HELD_OUT) == set(SPACES) and HELD_OUT


def _explicit(task: str) -> str:
    """Return the project's kernel, whose default number of warps is written out."""
    return honest(task).replace("eps, BLOCK=1024)", "eps, BLOCK=1024, num_warps=4)")


def test_the_plan_has_every_answer_once_a_round_and_the_project_s_own_first() -> None:
    plan = grade.plan(list(SPACES), 2)
    keys = [g.key for g in plan]
    assert len(keys) == len(set(keys))
    first = plan[: 2 * len(TRAINED) + len(HELD_OUT)]
    assert all(g.answer.schedule == SPACES[g.answer.task].schedules()[0] and not g.answer.faults for g in first)
    for task, space in SPACES.items():
        some = [g for g in plan if g.answer.task == task]
        for sizes in (grade.PUBLISHED, grade.HELD):
            timed = [g for g in some if not g.answer.faults and g.sizes == sizes]
            wanted = 0 if task in HELD_OUT and sizes == grade.PUBLISHED else 2 * len(space.schedules())
            assert len(timed) == wanted
        assert sorted(g.answer.faults for g in some if g.answer.faults) == [1, 2, 3]
    assert [g.round for g in plan] == sorted(g.round for g in plan), "repetitions come last"
    assert plan == grade.plan(list(SPACES), 2)


def test_requests_are_accepted_options_and_a_round_is_a_measurement_of_its_own() -> None:
    answer = Answer(TASK, (3,))
    some = [grade.Grading(answer, sizes, k).request({"device": "x"}) for sizes in ("published", "held-out") for k in (0, 1)]
    for request in some:
        made = GradeOptions.of(request.options)
        assert (made.backend, made.timing, made.precision, made.split) == ("cuda", True, "training", "train")
        assert request.about["fingerprint"] == load_task(TASK).fingerprint and request.source == answer.source.encode()
    assert len({r.content for r in some}) == len({r.key for r in some}) == 4, "none is answered by another's outcome"


def test_a_stopped_run_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, out, made = grade.plan([TASK], 1), tmp_path / "t.jsonl", MadeUp()
    rows = list(grade.run(plan[:5], out, InlinePool(made), {}, math.inf))
    assert jsonl.read(out) == rows and len(rows) == 5 and {r["sizes"] for r in rows} == {"published", "held-out"}
    first = next(r for r in rows if not r["faults"])
    assert first["verdict"] == "correct" and first["reward"] > 0.5 and first["device"] == "made up"
    left = grade.missing(plan, out)
    assert left == plan[5:]
    jsonl.append(out, first | {"round": 9, "verdict": "infra_fault"})
    assert grade.missing([grade.Grading(plan[0].answer, first["sizes"], 9)], out), "a lost grading is missing"
    assert grade.main([str(out), "--dry", "--tasks", TASK, "--rounds", "1"]) == 1
    assert f"{len(left)} gradings are missing" in capsys.readouterr().out
    list(grade.run(left, out, InlinePool(made), {}, math.inf))
    assert grade.missing(plan, out) == [] and len(made.asked) == len(plan)
    assert grade.main([str(out), "--dry", "--tasks", TASK, "--rounds", "1"]) == 0
    # The store has all outcomes: without the rows nothing is graded again.
    out.unlink()
    assert len(list(grade.run(plan, out, InlinePool(made), {}, math.inf))) == len(plan) == len(made.asked)


def test_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "t.jsonl"
    for argv, says in (
        ([str(out)], "needs a GPU"), ([str(out), "--tasks", "math/abs"], "math/abs"), ([str(out), "--workers", "0"], "--workers"),
        ([str(tmp_path / "t.csv")], ".jsonl"), ([str(out), "--seconds", "0"], "--seconds"),
    ):  # fmt: skip
        assert grade.main(argv) == 2 and says in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
    assert study.main([str(out), str(tmp_path / "o")]) == 2 and "grade.py" in capsys.readouterr().err


def test_the_table_finds_rewards_and_speedups(tmp_path: Path) -> None:
    rows = jsonl.read(_table(tmp_path, (TASK,), rounds=2))
    table, draw = study.Table(rows), random.Random(0)
    own, best = (Answer(TASK, SPACES[TASK].schedules()[k]) for k in (0, -1))
    assert table.find(TASK, best.source) == best and table.find(TASK, "x = 1") is table.find(TASK, "x =") is None
    assert table.log2_speedup(own) == pytest.approx(math.log2(1.1) + math.log2(1.01) / 2)
    assert table.log2_speedup(best) == pytest.approx(table.log2_speedup(own) + 1)
    assert len({table.reward(best, draw) for _ in range(30)}) == 2, "one of two measurements"
    faulty = Answer(TASK, best.schedule, 2)
    assert 0 <= table.reward(faulty, draw) < table.reward(own, draw) and table.log2_speedup(faulty) is None
    assert table.reward(None, draw) == 0 and table.log2_speedup(None) is None
    # A schedule without a time that is believed is no part of the study.
    void = [r | {"cases": [{"void": True}]} if r["schedule"] == list(best.schedule) and not r["faults"] else r for r in rows]
    assert study.Table(void).find(TASK, best.source) is None
    with pytest.raises(UsageError, match="faults"):
        study.Table([r for r in rows if not r["faults"]])
    with pytest.raises(UsageError, match="0 schedules"):
        study.Table([r for r in rows if r["sizes"] == grade.PUBLISHED])


def test_scores_and_searches(tmp_path: Path) -> None:
    found = study.scores([1.0, 0.1, -0.5, None])
    assert found == {"log2_speedup": pytest.approx(0.2), "correct": 0.75, "fast@1.0": 0.5, "fast@1.2": 0.25}
    assert math.isnan(study.scores([None])["log2_speedup"])
    table = study.Table(jsonl.read(_table(tmp_path, (TASK,))))
    every = table.answers(TASK)
    one, all_of_them = (
        study.searched(table, lambda rng, n: rng.sample(every, min(n, len(every))), n, random.Random(0)) for n in (1, 999)
    )
    assert all_of_them["correct"] == 1 and all_of_them["log2_speedup"] == pytest.approx(math.log2(2.2))
    assert 0.1 < one["correct"] < 0.4 and one["log2_speedup"] < all_of_them["log2_speedup"]


def test_training_and_comparison_on_a_made_up_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    for name, value in (("SAMPLES", 16), ("ROWS", 100), ("REPEATS", 50)):
        monkeypatch.setattr(study, name, value)
    table, out = _table(tmp_path, (TASK, *HELD_OUT)), tmp_path / "out"
    argv = [str(table), str(out), "--seeds", "1", "--steps", "2", "--sft-steps", "60"]
    assert study.main(argv) == 0
    text, results = (out / "table.md").read_text(), json.loads((out / "results.json").read_text())
    assert capsys.readouterr().out.endswith(text + "\n")
    for row in ("| SFT start |", "| GRPO |", "| GRPO - SFT start |", "| best-of-n, 16 gradings of a task |",
                "| random search, 32 gradings of a task, as GRPO |", f"| {TASK} | 9 | 0.138 | 0.138 | 1.138 |"):  # fmt: skip
        assert row in text, text
    held = text.split("## Held-out tasks")[1].split("## By task")[0]
    assert "GRPO - SFT start" in held and "random search" not in held, "a task without gradings has no search"
    best = results["Trained tasks, held-out sizes"]["random search, 64"]
    assert best["correct"]["mean"] == 1 and best["log2_speedup"]["mean"] == pytest.approx(math.log2(2.2), abs=1e-3)
    assert results["tasks"][0]["SFT start"][TASK].keys() == set(study.METRICS)
    weights = out / "seed-0/grpo/final/model.safetensors"
    before = weights.stat().st_mtime_ns
    assert study.main(argv) == 0 and weights.stat().st_mtime_ns == before, "what is finished is kept"
