"""Demonstrations of a model that half knows: where they are faulty, how often, and that the same command makes the same."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbx_env.envs.answer import strip_fences
from kbx_env.errors import UnknownName, UsageError
from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import expert_source, load_task, load_tasks

pytest.importorskip("datasets")
from kbx_env.train import data, mutation  # noqa: E402

from experiments.noisy_demonstrations import data as doubtful  # noqa: E402
from experiments.small_models.compact import compact  # noqa: E402

TASK = "fusion/fused_hstack_div"
SOURCE = compact(expert_source(TASK) or "", load_task(TASK).entry)


def fake(task: str, source: bytes, **options: object) -> Outcome:
    """A kernel whose ``trunc`` has become something else crashes; whatever else is not as it was is wrong."""
    crashes = b'MODE != "trunc"' in source or b"MODE != 'trunc'" in source
    right = source.decode() == SOURCE
    verdict = Verdict.CORRECT if right else Verdict.RUNTIME_ERROR if crashes else Verdict.INCORRECT
    return Outcome(task, verdict, Stage.CORRECT, "cpu", "contract", None if right else Fault.POLICY, cases=Cases(1 + right, 2))


def test_places_are_those_where_a_kernel_runs_and_is_wrong() -> None:
    (one,) = doubtful.noisy_kernels([load_task(TASK)], 12, grade=fake, progress=False)
    assert one.source == SOURCE and len(one.faults) == 12
    for fault in one.faults:
        assert fake(TASK, mutation.with_faults(SOURCE, [fault]).encode()).verdict is Verdict.INCORRECT
    marks = sorted((f.begin, f.end) for f in one.faults)
    assert all(a[1] <= b[0] for a, b in zip(marks, marks[1:]))
    # By seed, and whatever else is asked for beside it.
    both = doubtful.noisy_kernels([load_task(TASK), load_task("math/erfc_sqrt")], 12, grade=fake, progress=False)
    assert one in both and doubtful.noisy_kernels([load_task(TASK)], 12, 1, grade=fake, progress=False) != [one]
    assert doubtful.noisy_kernels([load_task(TASK)], 999, grade=fake, progress=False) == []


def test_each_place_is_faulty_as_often_as_asked() -> None:
    made = doubtful.noisy_kernels([load_task(TASK)], 4, grade=fake, progress=False)
    rows = doubtful.demonstrations(made, 0.25, 600)
    assert len(rows) == 600 and set(rows.column_names) >= {"prompt", "completion", "task", "category", "difficulty", "variation"}
    marks = [str(v).removeprefix("doubtful-") for v in rows["variation"]]
    for place in range(4):
        assert 0.19 < sum(m[place] == "1" for m in marks) / 600 < 0.31
    texts = {m: strip_fences(c[0]["content"]) for m, c in zip(marks, rows["completion"], strict=True)}
    # One text for each choice of places: every text says by itself what is faulty in it.
    assert texts["0000"].strip() == SOURCE.strip() and len(set(texts.values())) == len(texts) > 8
    for text in texts.values():
        ast.parse(text)
    assert rows[:] == doubtful.demonstrations(made, 0.25, 600)[:] != doubtful.demonstrations(made, 0.25, 600, seed=1)[:]


def test_answers_after_a_wrong_one_and_its_verdict() -> None:
    (one,) = doubtful.noisy_kernels([load_task(TASK)], 4, grade=fake, progress=False)
    asked: list[str] = []

    def verdicts(pairs: list[tuple[object, str, str]]) -> list[Outcome]:
        asked.extend(name for _, name, _ in pairs)
        # Two faults may undo each other: what is right is nothing to repair.
        return [fake(TASK, SOURCE.encode() if name == "doubtful-1111" else text.encode()) for _, name, text in pairs]

    rows = doubtful.demonstrations([one], 0.5, 10, repairs=300, verdicts=verdicts)
    assert rows[:10] == doubtful.demonstrations([one], 0.5, 10)[:], "the others are as without"
    again = [r for r in rows if len(r["prompt"]) == 3]
    assert 250 < len(again) < 300 and len(rows) == 10 + len(again) and len(asked) == len(set(asked)) == 15
    for r in again:
        after, before = r["variation"].removeprefix("doubtful-").split("-after-")
        roles = [m["role"] for m in r["prompt"]]
        assert roles == ["user", "assistant", "user"] and "Verdict: incorrect" in r["prompt"][2]["content"]
        assert "1" in before != "1111" and (after == before) == (r["completion"][0]["content"] == r["prompt"][1]["content"])
    # Whether it is repaired is left to chance: what follows is drawn as any answer is.
    for place in range(4):
        assert 0.4 < sum(str(r["variation"])[9 + place] == "1" for r in again) / len(again) < 0.6


def test_faults_after_which_nothing_runs() -> None:
    (one,) = doubtful.noisy_kernels([load_task(TASK)], 6, grade=fake, progress=False, kinds=("name", "line"))
    for fault in one.faults:
        assert fault.text in ("pass", "_", "_0", "_x")
    with pytest.raises(UnknownName, match="bracket"):
        doubtful.noisy_kernels([load_task(TASK)], 6, grade=fake, progress=False, kinds=("typo",))


@given(st.sampled_from([t.id for t in load_tasks(split="train", category="fusion")]), st.data())
@settings(max_examples=25, deadline=None)
def test_several_faults_are_python_and_do_not_move_each_other(task: str, draw: st.DataObject) -> None:
    source = compact(expert_source(task) or "", load_task(task).entry)
    some = draw.draw(st.lists(st.sampled_from(mutation.fault_sites(source, doubtful.RUNNING)), min_size=1, max_size=6, unique=True))
    kept: list[mutation.Fault] = []
    for fault in some:
        if all(fault.end <= o.begin or o.end <= fault.begin for o in kept):
            kept.append(fault)
    text = mutation.with_faults(source, kept)
    ast.parse(text)
    assert Counter(text) != Counter(source) or text != source
    assert len(text) - len(source) == sum(len(f.text) - (f.end - f.begin) for f in kept)


def test_the_command_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = data.graded
    monkeypatch.setattr(data, "graded", lambda asked, workers, store, progress, grade: real(asked, workers, store, False, fake))
    argv = [f"out={tmp_path}", f"tasks={TASK},fused_cos_signbit", "places=25", "rows=5"]
    assert doubtful.main(argv) == 0
    said = capsys.readouterr().out
    assert "demonstrations.parquet: 5 rows of 1 tasks" in said and "left out" in said and "fused_cos_signbit" in said
    places = json.loads((tmp_path / doubtful.PLACES).read_text())[TASK]
    assert len(places) == 25 and all(f"-> {p['text']}]" in p["line"] for p in places)
    assert len(data.load(tmp_path / "demonstrations.parquet")) == 5
    assert doubtful.main([str(tmp_path / "settings.yaml")]) == 0, "repeatable"
    for more, says in (
        (["odds=1"], "between 0 and 1"), (["places=0"], "at least 1"), (["places=500"], "give fewer"), (["format=csv"], "parquet"),
        (["tasks=fused_gelu_min"], "fused_gelu_min"), (["backend=auto"], "cuda"), (["repairs=-1"], "repairs"),
        (["kinds=typo"], "bracket"),
    ):  # fmt: skip
        assert doubtful.main([f"out={tmp_path}/x", f"tasks={TASK}", *more]) == 2
        assert says in capsys.readouterr().err


def test_no_task_of_the_eval_split() -> None:
    with pytest.raises(UsageError, match="outside the train split"):
        doubtful.noisy_kernels(load_tasks(split="eval")[:1], 3, grade=fake, progress=False)
