"""The benchmarks of training, with tiny models on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")
from benchmarks import grading_overlap, train_shapes  # noqa: E402

pytestmark = pytest.mark.full


def test_a_tiny_shape_is_measured_and_resumed(tmp_path: Path) -> None:
    more = ["shape=tiny", "backend=cpu", "engine=generate", "steps=2", "prompts=2", "answers=2", "tokens=8", f"out={tmp_path}"]
    assert train_shapes.main(more) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    found = [step for part in ("begin", "resume") for step in result["parts"][part]["steps"]]
    assert [x["step"] for x in found] == [1, 2] and all(x["tokens"] == 4 * 8 and x["grading_seconds"] > 0.1 for x in found)
    assert all(abs(x["seconds"] - x["generation_seconds"] - x["grading_seconds"] - x["update_seconds"]) < 0.01 for x in found)
    means = result["by_overlap"]["with"]
    assert means["tokens_per_second"] > 0 and means["allocated_gib"] is None, "not known is not 0"


def test_answers_of_a_tiny_shape_end_and_are_graded_early_in_every_other_step(tmp_path: Path) -> None:
    more = ["shape=tiny", "backend=cpu", "engine=generate", "steps=3", "prompts=2", "answers=4", "tokens=64", "mean=16",
            "overlap=alternate", "part=begin", f"out={tmp_path}"]  # fmt: skip
    assert train_shapes.main(more) == 0
    first, second = json.loads((tmp_path / "begin.json").read_text())["steps"]
    assert all(8 * 4 < x["tokens"] < 8 * 40 for x in (first, second)), "about 16 tokens an answer"
    assert first["overlaps"] and first["handed_in_early"] > 0
    assert not second["overlaps"] and second["handed_in_early"] == 0


@pytest.mark.parametrize("given", ["shape=9b", "engine=other", "overlap=maybe", "mean=1"])
def test_unknown_settings_of_a_shape_are_named(tmp_path: Path, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_shapes.main([given, f"out={tmp_path}"]) == 2
    assert given.partition("=")[2] in capsys.readouterr().err


def test_gradings_that_begin_early_shorten_the_wait(tmp_path: Path) -> None:
    more = ["steps=2", "tokens=60", "ends=0.05", "seconds=0.5", "workers=4", f"out={tmp_path}"]
    assert grading_overlap.main(more) == 0
    result = json.loads((tmp_path / "overlap.json").read_text())
    assert result["with"]["stall"] < 0.8 * result["without"]["stall"] and result["with"]["early"] > 0
    assert result["with"]["lengths"] == result["without"]["lengths"], "the same answers"
