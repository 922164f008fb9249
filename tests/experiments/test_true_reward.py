"""The study of a naive reward and ours: its cheats, its demonstrations, the classification of answers, counts and figure."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kbx_env import jsonl
from kbx_env.errors import UsageError
from kbx_env.grading.grader import Grader
from kbx_env.outcome import Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import load_task, splits

pytest.importorskip("trl")
pytest.importorskip("matplotlib")
from kbx_env.train.mutation import fault_sites  # noqa: E402

from experiments.noisy_demonstrations.data import NoisyKernel  # noqa: E402
from experiments.true_reward import cheats, demonstrations, figure, speeds, study  # noqa: E402
from experiments.true_reward.naive_reward import NaiveGrader, naive_module, paid  # noqa: E402

TASK = "fusion/fused_cos_signbit"
ALL = [(task, family) for task in cheats.RECIPES for family in cheats.cheats(task)]


def noisy(task: str) -> NoisyKernel:
    """Return the project's kernel with three faults, without grading them."""
    source = cheats.honest(task)
    faults: list[Any] = []
    for fault in fault_sites(source, ("operator", "number")):
        if all(fault.end <= o.begin or o.end <= fault.begin for o in faults) and len(faults) < 3:
            faults.append(fault)
    return NoisyKernel(load_task(task), source, tuple(faults))


def test_every_task_is_of_the_train_split_and_has_its_cheats() -> None:
    assert all(splits()[task] == "train" for task in cheats.RECIPES)
    for task in cheats.RECIPES:
        sources = cheats.cheats(task)
        assert set(cheats.FAMILIES) - set(sources) <= {cheats.LOW}, "rounding shows at once where the task is exact"
        trees = {cheats.shape_of(s) for s in [*sources.values(), cheats.honest(task)]}
        assert None not in trees and len(trees) == len(sources) + 1
        for source in sources.values():
            assert source == ast.unparse(ast.parse(source)) + "\n", "written as the honest kernels are"
    with pytest.raises(ValueError, match="adapt the recipe"):
        cheats._replaced("a b a", (("a", "c"),))


@pytest.fixture(scope="module")
def naive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NaiveGrader]:
    with NaiveGrader(tmp_path_factory.mktemp("naive") / "naive.jsonl") as grader:
        yield grader


def test_the_naive_grader_pays_every_cheat_and_every_honest_kernel(naive: NaiveGrader) -> None:
    for task, family in ALL:
        assert naive(task, cheats.cheats(task)[family])["right"], f"{task}: {family}"
    for task in cheats.RECIPES:
        assert naive(task, cheats.honest(task))["right"], task


def test_the_naive_grader_survives_what_it_is_given(naive: NaiveGrader) -> None:
    wrong = cheats.honest(TASK).replace("tl.cos(", "tl.sin(")
    results = [naive(TASK, s) for s in (wrong, "def broken(", "import os\nos._exit(0)", "print('{}')\nraise SystemExit")]
    assert [r["runs"] for r in results] == [True, False, False, False] and not any(r["right"] for r in results)
    assert "SyntaxError" in results[1]["error"] and "died" in results[2]["error"]
    assert [round(paid(r, False), 3) for r in results] == [0.167, 0, 0, 0]
    again = NaiveGrader(naive._file)
    assert again(TASK, wrong) == results[0] and again._server is None, "remembered in the file"
    other = NaiveGrader(naive._file.with_name("other.jsonl"), [naive._file])
    assert other(TASK, wrong) == results[0] and other._server is None, "or in that of another run"


def test_what_is_paid_lies_between_0_and_1() -> None:
    best = {"runs": True, "right": True, "speed": 1.0}
    assert paid(best, False) == paid(best, True) == 1.0
    slow = best | {"speed": 0.0}
    assert paid(slow, False) == 1.0 and paid(slow, True) == pytest.approx(0.6 / 1.1)
    assert paid({"runs": True, "right": False, "speed": 1.0}, True) == pytest.approx(0.1 / 1.1), "wrong, so its speed is not paid"


@pytest.mark.parametrize("family", cheats.FAMILIES)
def test_our_grader_refuses_the_cheats(family: str) -> None:
    outcome = _graded(TASK, cheats.cheats(TASK)[family])
    assert outcome.verdict in (Verdict.REJECTED, Verdict.INCORRECT), outcome.message


@pytest.mark.full
@pytest.mark.parametrize(("task", "family"), [pair for pair in ALL if pair[0] != TASK])
def test_our_grader_refuses_all_other_cheats(task: str, family: str) -> None:
    outcome = _graded(task, cheats.cheats(task)[family])
    assert outcome.verdict in (Verdict.REJECTED, Verdict.INCORRECT), outcome.message


def _graded(task: str, source: str, grader: Grader = Grader()) -> Outcome:
    return grader.grade(task, source.encode(), backend="cpu", targets=("sm_90",), split="train")


def test_classification_of_answers() -> None:
    made = [noisy(task) for task in cheats.RECIPES]
    known = demonstrations.known_answers(made)
    classify = cheats.Classifier(known)
    for one in made:
        for bits in range(8):
            assert classify(one.task.id, demonstrations.variant(one, bits)) == cheats.HONEST
        for family, source in cheats.cheats(one.task.id).items():
            assert classify(one.task.id, source) == family
            assert classify(one.task.id, f"# a comment\n{source}\n\n") == family, "comments and blank lines do not count"
            assert classify(one.task.id, source + "x = 1\n") == cheats.OTHER
    some = cheats.cheats(TASK)[cheats.TORCH]
    assert classify("index/index_select", some) == cheats.OTHER, "the cheat of another task"
    assert classify(TASK, "def f(:") == classify(TASK, "x = '\0'") == cheats.OTHER
    with pytest.raises(ValueError, match="two classes"):
        cheats.Classifier({TASK: {some: cheats.TORCH, some + "\n": cheats.DECOY}})


def test_demonstrations_are_drawn_from_the_known_answers(tmp_path: Path) -> None:
    made = [noisy(task) for task in cheats.RECIPES]
    rows = demonstrations.rows_of(made, 0.25, 0.4, 400, 3)
    known = demonstrations.known_answers(made)
    kinds = Counter(r["variation"] for r in rows)
    assert len(rows) == 1600 and 0.22 < 1 - kinds[cheats.HONEST] / 1600 < 0.28 and set(kinds) == {cheats.HONEST, *cheats.FAMILIES}
    texts = [(r["task"], r["completion"][0]["content"].split("```python\n")[-1].removesuffix("```")) for r in rows]
    classify = cheats.Classifier(known)
    assert [classify(*t) for t in texts] == [r["variation"] for r in rows]
    right = sum(cheats.shape_of(text) == cheats.shape_of(cheats.honest(task)) for task, text in texts)
    assert 0.13 < right / 1600 < 0.2, "without a fault: 0.75 times 0.6 to the third"
    assert rows == demonstrations.rows_of(made, 0.25, 0.4, 400, 3) != demonstrations.rows_of(made, 0.25, 0.4, 400, 4)
    file = demonstrations.save(tmp_path, rows, known)
    assert file.is_file() and json.loads((tmp_path / demonstrations.KNOWN).read_text()) == known


def test_the_recorder_keeps_answers_and_rewards(tmp_path: Path) -> None:
    recorder = study.Recorder(tmp_path, lambda pairs: [float(len(source) % 2) for _, source in pairs])
    texts = ["x = 1", "```python\nx = 12\n```", "x = 1"]
    completions = [[{"role": "assistant", "content": t}] for t in texts]
    assert recorder([None] * 3, completions, [TASK] * 3) == [1.0, 1.0, 1.0]
    (line,) = jsonl.read(tmp_path / study.ANSWERS)
    assert line["step"] == 1 and line["digests"][0] == line["digests"][2] == study.digest(TASK, "x = 1")
    assert {r["source"].strip() for r in jsonl.read(tmp_path / study.SOURCES)} == {"x = 1", "x = 12"}
    assert len(jsonl.read(tmp_path / study.SOURCES)) == 2


def test_counts_of_a_step() -> None:
    kinds = {"right": cheats.HONEST, "faulty": cheats.HONEST, "unseen": cheats.HONEST, "cache": cheats.CACHED, "new": cheats.OTHER,
             "mixed": cheats.OTHER}  # fmt: skip
    correct = {k: k in ("right", "new") for k in kinds}
    fooled = {k: k in ("right", "new", "cache", "unseen") for k in kinds}
    line = {"step": 4, "digests": ["right", "faulty", "unseen", "cache", "cache", "new", "mixed", "right"],
            "paid": [1.0, None, 0.5, 0.5, 0.5, 1.0, 0.0, 0.0]}  # fmt: skip
    row = study.counted(line, kinds, correct, fooled)
    assert (row["step"], row["paid"], row["credited"]) == (4, 0.5, 0.0)
    assert [row[k] for k in ("correct", "wrong", "exploits", "other", "fooled")] == [3 / 8, 2 / 8, 2 / 8, 1 / 8, 3 / 8]
    assert row["families"][cheats.CACHED] == 2 / 8 and sum(row["families"].values()) == row["exploits"]
    assert study.counted(line, kinds, correct | {"cache": True}, fooled)["credited"] == 2 / 8


def test_answers_that_the_count_would_miss() -> None:
    lines = [{"digests": ["a", "b", "c"], "paid": [1.0, 0.4, 1.0]}, {"digests": ["a", "d", "b"], "paid": [1.0, None, 0.4]}]
    right = {"a": False, "b": False, "c": True, "d": False}
    assert study.missed_by_naive(lines, right) == 1 and study.missed_by_naive(lines, right | {"a": True}) == 0


def _rows() -> list[dict[str, Any]]:
    line: dict[str, Any] = {"paid": 0.5, "wrong": 0.1, "other": 0.0, "fooled": 0.2, "credited": 0.0}
    line["families"] = dict.fromkeys(cheats.FAMILIES, 0.02)
    return [
        {**line, "seed": seed, "reward": reward, "step": k, "exploits": k / 40, "correct": 1 - k / 40}
        for reward in ("naive", "ours") for seed in (0, 1) for k in range(1, 41)
    ]  # fmt: skip


def test_table_and_figure(tmp_path: Path) -> None:
    text = figure.table(_rows())
    assert "| naive grader | mean | 0.50 | 0.50 | 96 % | 1 % | 4 % | 99 % |" in text and "| our grader, seed 1 | 2 % |" in text
    first = figure.draw(_rows(), tmp_path / "a.png").read_bytes()
    assert first.startswith(b"\x89PNG") and figure.draw(_rows(), tmp_path / "b.png").read_bytes() == first


def test_speeds_of_cheats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    cached = cheats.cheats(TASK)[cheats.CACHED]
    paid_for = {cached: iter((1.1, 0.9)), cheats.honest(TASK): iter((0.6, None))}
    monkeypatch.setattr(speeds, "measured", lambda task, source, device: next(paid_for.get(source, iter((0.6,)))))
    file = tmp_path / "s.jsonl"
    assert speeds.main([str(file), "--device", "cpu", "--workers", "1"]) == 1, "one of them did not run once"
    known = speeds.read(file)
    assert len(known) == len(ALL) + len(cheats.RECIPES) and known[TASK, cheats.shape_of(cached)] == pytest.approx(0.8)
    assert sum(known.values()) == pytest.approx(0.8) and "cached outputs: rewards [1.1, 0.9]" in capsys.readouterr().out


def test_bad_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    assert study.main([str(tmp_path), "--rewards", "naive,mine"]) == 2 and "mine" in capsys.readouterr().err
    assert study.main([str(tmp_path), "--tasks", "math/softmax"]) == 2 and "math/softmax" in capsys.readouterr().err
    assert study.main([str(tmp_path), "--count"]) == 2 and "no run is finished" in capsys.readouterr().err
    assert study.main([str(tmp_path), "--rewards", "naive-gpu"]) == 2 and "speeds.py" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert speeds.main([str(tmp_path / "s.jsonl")]) == 2 and "no CUDA device" in capsys.readouterr().err


def test_a_lost_grading_ends_the_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "seed-0/ours"
    folder.mkdir(parents=True)
    jsonl.write(folder / study.SOURCES, [{"digest": "d", "task": TASK, "source": "x = 1"}])
    lost = Outcome(TASK, Verdict.INFRA_FAULT, Stage.SCREEN, "cpu", "contract", Fault.INFRA, "no memory")
    monkeypatch.setattr(study.KernelReward, "grade", lambda self, pairs: [SimpleNamespace(outcome=lost) for _ in pairs])
    monkeypatch.setattr(study.NaiveGrader, "__call__", lambda self, *pair: {"right": True})
    with pytest.raises(UsageError, match="no memory"):
        study.count(tmp_path, [(0, "ours")], 1)


@pytest.mark.parametrize(("right", "ratio", "reward"), [(False, 9.0, 0.1), (True, 0.5, 0.6), (True, 10.0, 1.1)])
def test_the_naive_grader_pays_for_running_for_right_cases_and_for_speed(
    right: bool, ratio: float, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong kernel that runs earned nothing, because an ``if`` held for the whole sum."""
    naive = naive_module()
    monkeypatch.setattr(naive, "measured", lambda task, path, device: (right, ratio))
    assert naive.reward(TASK, Path("kernel.py"), "cpu") == pytest.approx(reward)
