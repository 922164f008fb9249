"""Options of a grading: one declaration, checked once, wherever a user gives them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kbx_env
from kbx_env.errors import UsageError
from kbx_env.options import BACKENDS, GRADINGS, SIZES, SPLITS, TARGETS, TORCH_OPS, GradeOptions

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"backend": "gpu"}, "unknown backend 'gpu'"),
    ({"grading": "strict"}, "unknown grading 'strict'"),
    ({"torch_ops": "yes"}, "unknown torch policy 'yes'"),
    ({"sizes": "all"}, "unknown sizes 'all'"),
    ({"split": "test"}, "unknown split 'test'"),
    ({"targets": ("sm_90", "sm_42")}, "unknown target 'sm_42'"),
    ({"wall": 0}, "wall is 0"),
    ({"wall": "30"}, "wall is '30'"),
    ({"wall": float("nan")}, "wall is nan"),
    ({"seed": 1.5}, "seed is 1.5"),
    ({"estimate": "h2000"}, "h2000"),
    ({"walls": 3}, "unknown option 'walls'"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda v: str(v)[:40])
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        GradeOptions.of(options)
    for entry in (kbx_env.grade, lambda task, source, **o: kbx_env.grade_many([(task, source)], **o)):
        with pytest.raises(UsageError, match=message):
            entry("activation/relu", "x", **{"backend": "cpu", **options})


def test_comparing_with_torch_compile_needs_times() -> None:
    with pytest.raises(UsageError, match="compiled=True"):
        GradeOptions(backend="cpu", compiled=True).resolved()


@given(
    backend=st.sampled_from(BACKENDS[1:]), grading=st.sampled_from(GRADINGS), split=st.sampled_from(SPLITS),
    torch_ops=st.sampled_from(TORCH_OPS), sizes=st.sampled_from(SIZES), timing=st.booleans(),
    targets=st.none() | st.lists(st.sampled_from(TARGETS), max_size=3), wall=st.floats(0.1, 1e6), seed=st.none() | st.integers(),
)  # fmt: skip
def test_options_survive_a_round_trip(**options: Any) -> None:
    made = GradeOptions.of(options)
    again = GradeOptions.of({f.name: getattr(made, f.name) for f in dataclasses.fields(made)})
    assert again == made and hash(again) == hash(made)
    assert made.ahead_of_time == tuple(TARGETS if options["targets"] is None else options["targets"])
    assert made.timed is (options["backend"] == "cuda" and options["timing"] and options["grading"] == "contract")
    assert made.deadline >= made.wall
