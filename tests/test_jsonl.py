"""Files of JSON lines: whole lines, clear errors."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from kbx_env import jsonl
from kbx_env.errors import UsageError


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path, values = tmp_path / "a.jsonl", [{"x": "a\u2028b\x0c\n€"}, [1, None], 2.5]
    jsonl.write(path, values)
    jsonl.append(path, "more")
    assert jsonl.read(path) == [*values, "more"] and [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    jsonl.write(path, values, ensure_ascii=False)
    assert jsonl.read(path) == values and "€" in path.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="JSON compliant"):
        jsonl.append(path, float("nan"), allow_nan=False)
    assert jsonl.read(path) == values


def test_a_write_that_fails_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    jsonl.write(path, [1])
    with pytest.raises(TypeError):
        jsonl.write(path, [2, object()])
    assert jsonl.read(path) == [1]


def test_a_broken_line_is_named_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"x": 1}\n\n{"x": 2\n' + "[" * 100_000 + "\n3", encoding="utf-8")
    with pytest.raises(UsageError, match=r"a\.jsonl, line 3: not JSON"):
        jsonl.read(path)
    assert jsonl.read(path, skip_broken=True) == [{"x": 1}, 3]


def test_a_line_after_one_that_was_cut_off_is_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1}\n{"x": 2, "y')
    jsonl.append(path, {"x": 3})
    assert jsonl.read(path, skip_broken=True) == [{"x": 1}, {"x": 3}]


def _many(path: Path, name: int) -> None:
    for i in range(200):
        jsonl.append(path, [name, i, "x" * 500])


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    processes = [multiprocessing.get_context("fork").Process(target=_many, args=(path, n)) for n in range(3)]
    for p in processes:
        p.start()
    for p in processes:
        p.join()
    assert sorted(v[:2] for v in jsonl.read(path)) == [[n, i] for n in range(3) for i in range(200)]
