"""The study of generated tasks: how demonstrations are written, drawn and packed, one tiny run, and its figures."""

from __future__ import annotations

import ast
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.generated_tasks import learn, study
from experiments.generated_tasks.demonstrations import callers_first, rewritten
from experiments.generated_tasks.files import ARMS, PACK, TRAIN, read, run_folder
from kbx_env import jsonl
from kbx_env.errors import UsageError
from kbx_env.outcome import Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import expert_source, load_tasks


def documents(lengths: dict[str, list[int]], head: int = 2) -> dict[str, list[list[tuple[np.ndarray, int]]]]:
    """Return demonstrations of given lengths, one a task; the tokens of a task are all the same number."""
    count = itertools.count(10)
    return {name: [[(np.full(n, next(count), np.uint16), head)] for n in some] for name, some in lengths.items()}


def test_callers_come_before_what_they_call() -> None:
    source = "import torch\n\ndef f(x):\n    return g(x)\n\ndef h(x):\n    return x\n\ndef g(x):\n    return h(x)\n"
    names = [n.name for n in ast.parse(callers_first(source, "f")).body if isinstance(n, ast.FunctionDef)]
    assert names == ["f", "g", "h"]
    early = source + "\nK = h(1)\n"
    assert callers_first(early, "f") == early, "h has to be there before K"


def test_rewritten_kernels_begin_as_the_template_begins_answers() -> None:
    for task in load_tasks(split="train")[::10]:
        source = expert_source(task.id)
        assert source is not None
        text = rewritten(source, task.entry)
        compile(text, task.id, "exec")
        functions = {n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
        assert task.entry in functions


def test_arms_draw_what_they_may_in_the_given_share() -> None:
    some = documents({TRAIN: [30, 50], PACK: [20, 10, 40]})
    train = {int(t[0]) for one in some[TRAIN] for t, _ in one}
    alone = list(itertools.islice(learn.drawn(some, "train", 0.5, 0), 200))
    assert {int(t[0]) for t, _ in alone} == train
    both = list(itertools.islice(learn.drawn(some, "both", 0.25, 0), 2000))
    tokens = sum(len(t) for t, _ in both)
    assert sum(len(t) for t, _ in both if int(t[0]) not in train) / tokens == pytest.approx(0.25, abs=0.02)


def test_rows_hold_whole_demonstrations_and_learn_only_answers() -> None:
    some = documents({TRAIN: [30, 50, 17], PACK: [20]})
    rows = list(itertools.islice(learn.packed(learn.drawn(some, "train", 0.5, 1), 64, pad=0), 50))
    for tokens, positions, owner, learnt in rows:
        for number in range(int(owner.max()) + 1):
            one = np.flatnonzero(owner == number)
            assert len(one) in (30, 50, 17) and len(set(tokens[one])) == 1
            assert (positions[one] == np.arange(len(one))).all()
            assert (learnt[one] == (np.arange(len(one)) >= 2)).all()
        assert not learnt[owner < 0].any() and (tokens[owner < 0] == 0).all()
    assert np.mean([(owner >= 0).mean() for _, _, owner, _ in rows]) > 0.85
    again = list(itertools.islice(learn.packed(learn.drawn(some, "train", 0.5, 1), 64, pad=0), 50))
    assert all((a[0] == b[0]).all() for a, b in zip(rows, again, strict=True)), "a continued run has the same rows"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a prepared study with six demonstrations and two evaluated tasks."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocab = {"<|endoftext|>": 0, "<|im_end|>": 1, **{chr(97 + k): 2 + k for k in range(26)}}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    folder = tmp_path / "data"
    folder.mkdir()
    tokenizer.save_pretrained(folder / "base")
    for name in (TRAIN, PACK):
        np.savez_compressed(folder / f"documents-{name}.npz", tokens=np.tile(np.arange(2, 12, dtype=np.uint16), 3), sizes=[10] * 3,
                            heads=[4] * 3, owners=[0, 0, 1])  # fmt: skip
    prompts = [{"set": "eval", "task": "math/trunc", "entry": "trunc", "tokens": [2, 3, 4], "begun": "x = 1\n"},
               {"set": "held", "task": "math/erf", "entry": "erf", "tokens": [2, 3], "begun": "x = 1\n"}]  # fmt: skip
    (folder / "prompts.json").write_text(json.dumps(prompts))
    (folder / "about.json").write_text("{}")
    settings = {"hidden": 16, "layers": 1, "heads": 2, "context": 64, "lr": 0.01, "share": 0.5, "length": 32, "rows": 2, "steps": 6,
                "samples": 1, "temperature": 0.7, "answer": 4, "threads": 1, "keep": False}  # fmt: skip
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    return tmp_path


def test_demonstrations_in_a_row_do_not_see_each_other(small: Path) -> None:
    import torch

    settings = json.loads((small / "settings.json").read_text())
    model, _ = learn.model_of(settings, small / "data/base", 0)
    owners = torch.tensor([[0] * 4 + [1] * 4 + [-1] * 2])
    places = torch.tensor([[*range(4), *range(4), 0, 0]])

    def hidden(first: list[int], second: list[int]) -> Any:
        ids = torch.tensor([[*first, *second, 0, 0]])
        with torch.no_grad():
            return model.eval().model(input_ids=ids, attention_mask=learn.visible(owners), position_ids=places).last_hidden_state[0]

    one, other, later = hidden([2, 3, 4, 5], [6, 7, 8, 9]), hidden([9, 9, 9, 9], [6, 7, 8, 9]), hidden([2, 3, 4, 5], [6, 7, 8, 2])
    assert torch.allclose(one[4:8], other[4:8], atol=1e-6) and not torch.allclose(one[:4], other[:4], atol=1e-3)
    assert torch.allclose(one[:7], later[:7], atol=1e-6), "and no token sees a later one"
    assert torch.isfinite(one).all()


def test_a_run_that_is_interrupted_continues_and_answers(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(seed: int) -> list[dict[str, Any]]:
        log = jsonl.read(run_folder(small, "both", seed) / "log.jsonl")
        return [{k: x[k] for k in ("step", "loss", "tokens")} for x in log if "step" in x]

    monkeypatch.setattr(learn, "LOG_EVERY", 1)
    assert learn.main([str(small), "both", "0", "cpu", "600"]) == 0
    whole, saves = losses(0), learn._save
    run_folder(small, "both", 0).rename(small / "whole")
    # The clock of the first attempt passes its end after three steps.
    ticks = iter([0.0] * 4)
    monkeypatch.setattr(learn.time, "time", lambda: next(ticks, 1000.0))
    assert learn.main([str(small), "both", "0", "cpu", "600"]) == 3
    monkeypatch.undo()
    monkeypatch.setattr(learn, "LOG_EVERY", 1)
    assert learn.main([str(small), "both", "0", "cpu", "600"]) == 0
    assert losses(0) == whole and len(whole) == 6 and saves is learn._save
    answers = jsonl.read(run_folder(small, "both", 0) / "answers.jsonl")
    assert [(a["task"], a["sample"]) for a in answers] == [(t, k) for t in ("math/trunc", "math/erf") for k in (0, 1)]
    assert read(small / "data").documents[TRAIN][0][0][1] == 4


def test_answers_are_graded_once_and_lost_gradings_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[str, bytes]]()

    class Pool:
        width = 1

        def __init__(self, workers: int) -> None:
            pass

        def grade(self, request: Any, deadline: float) -> Outcome:
            asked.append((request.task, request.source))
            if request.source == b"lost":
                return Outcome(request.task, Verdict.INFRA_FAULT, Stage.COMPILE, "cpu", "contract", Fault.INFRA)
            return Outcome(request.task, Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY)

        def close(self) -> None:
            pass

    monkeypatch.setattr(study, "ProcessPool", Pool)
    sources = ("x", "y", "x", "lost")
    answers = [{"task": "math/trunc", "set": "eval", "sample": k, "source": s} for k, s in enumerate(sources)]
    for _ in range(2):
        grading = study.Gradings(tmp_path, 1, 5.0)
        grading.submit(answers)
        while grading.take():
            pass
        grading.close()
        assert sorted(a for a in asked if a[1] != b"lost") == [("math/trunc", b"x"), ("math/trunc", b"y")]
    assert [r["verdict"] for r in jsonl.read(tmp_path / study.GRADINGS)] == ["incorrect"] * 2
    assert sum(a[1] == b"lost" for a in asked) % 2 == 0, "asked again by the second command"


def rows_of(rates: dict[str, list[bool]], which: str = "eval", sample: int = 0) -> list[dict[str, Any]]:
    """Return one answer for each task and arm."""
    return [{"arm": arm, "seed": 0, "set": which, "task": f"math/t{k}", "sample": sample, "verdict": "correct" if v else "wrong",
             "compiles": True, "correct": v} for arm, values in rates.items() for k, v in enumerate(values)]  # fmt: skip


def test_rates_and_their_difference_are_over_tasks() -> None:
    figures = study.summarised(rows_of({ARMS[0]: [True, False, False, False], ARMS[1]: [True, True, False, True]}))
    one = figures["eval, greedy"]
    assert one["correct"]["train"]["value"] == 0.25 and one["correct"]["both"]["value"] == 0.75
    difference = one["correct"]["difference"]
    assert difference["value"] == 0.5 and difference["low"] <= 0.5 <= difference["high"] and difference["tasks"] == 4
    assert one["compiles"]["difference"]["value"] == 0 and one["correct"]["tasks_with_one"]["train"] == ["math/t0"]
    assert "| eval, greedy | correct | 25.0 %" in study.table(figures)


def test_the_difference_leaves_out_answers_that_one_arm_lacks() -> None:
    rows = rows_of({ARMS[0]: [True, False], ARMS[1]: [True, False]}) + rows_of({ARMS[1]: [True, True]}, sample=1)
    figures = study.summarised(rows)
    assert figures["eval, greedy"]["answers_of_both_arms"] == 2
    assert figures["eval, sampled"]["correct"]["train"] is None and figures["eval, sampled"]["correct"]["difference"] is None


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures = study.summarised(rows_of({ARMS[0]: [True, False], ARMS[1]: [True, True]}, "held"))
    assert study.draw(figures, tmp_path / "x.png").stat().st_size > 1000


def test_a_folder_takes_no_results_of_other_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(tmp_path), "--pack", "p", "--device", "cpu", "--prepare-only"]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/prompts.json").write_text("[]")
    assert study.main(words) == 0
    assert study.main([*words, "--steps", "3"]) == 0, "no run has begun"
    assert study.main([*words, "--steps", "3", "--vocab", "999"]) == 2
    assert "vocab was" in capsys.readouterr().err
    (tmp_path / "runs").mkdir()
    assert study.main([*words, "--steps", "4"]) == 2
    assert "steps was 3" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no GPU"):
        study.devices_of("cuda", 1)


def test_a_run_finds_the_packages_that_the_study_finds_and_tells_why_it_failed(tmp_path: Path, monkeypatch) -> None:
    """A run that saw only the repository's folder could not import gymnasium, and the study named a file and no reason."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    for name, text in (("torch", "raise ImportError('this is not torch')"),):
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / f"{name}.py").write_text(text)
    (tmp_path / "data").mkdir()
    child = study._start(tmp_path, ("train", 0), "cpu", 30.0)
    status = child.wait(60)
    assert status and "this is not torch" in study._failure(tmp_path, ("train", 0), status)
