"""Small tensors share the compiled forms of a kernel; timed ones have their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kbx_env.tasks._varied import LARGE_FLAT_IMAGE, LARGE_GREY_IMAGE, LARGE_IMAGE

from benchmarks.compile_cost import specialisations, timed_code


def test_a_grading_compiles_one_form_for_all_small_convolutions(grader: Any) -> None:
    found, errors = specialisations(grader.processes, "convolution/conv2d", 0)
    assert not errors
    graded, timed = [s for s in found if s.cases and not s.timed], [s for s in found if s.timed]
    images = (LARGE_IMAGE, LARGE_FLAT_IMAGE, LARGE_GREY_IMAGE)
    large = [s for s in graded if any(f"H={image['H']}" in s.cases[0] for image in images)]
    small = [s for s in graded if s not in large]
    assert len(large) == len(images), "each large image has a form of its own"
    # With and without bias: strides, sizes and paddings of 17 cases are no constants.
    assert {s.constants.split(", GAIN")[0] for s in small} == {"MODE=0, BIAS=False", "MODE=0, BIAS=True"} and len(small) == 2
    assert timed and all(":16" in s.signature and "xw=1" in s.constants for s in timed), "timed launches stay specialised"


def test_equal_code_is_found_without_source_lines(grader: Any) -> None:
    (one,) = [s for s in specialisations(grader.processes, "math/abs", 0)[0] if s.timed][:1]
    moved = type(one)(**{**one.__dict__, "text": one.text.replace("submission.py\":", "submission.py\":9")})
    other = type(one)(**{**one.__dict__, "text": one.text.replace("tt.store", "tt.stored")})
    assert moved.text != one.text and moved.code() == one.code() != other.code()
    assert timed_code({"rows": [one.row()]}) == [(one.kernel, one.code())]
