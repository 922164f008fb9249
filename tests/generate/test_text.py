"""Pieces of source text that the families share, and what contracts must not say."""

from __future__ import annotations

import random
import re

import pytest

from kbx_env.generate import build, text
from kbx_env.generate.families import families

UNCLEAR = (
    r"times weight", r"that is z", r"to those of the inputs", r"\bz = \w+[,;.:] ", r", and r is the result",
    r"There may be no row ", r"for z > 0 and", r"\(V, C\), all of", r"mean of z\^2 \+", r"param and \w+ and",
)  # fmt: skip
"""Phrases that players of generated prompts had to read twice."""


def test_lines_of_kernels_and_fields_of_tasks() -> None:
    assert text.pointers(("x", "y")) == "p_x, p_y"
    assert text.loads(["x"], "at") == ["x = tl.load(p_x + at, mask=inside, other=0.0).to(tl.float32)"]
    assert text.loads(["x"], "row", mask=False) == ["x = tl.load(p_x + row).to(tl.float32)"]
    assert text.stores({"out": "v"}, "at") == ["tl.store(out + at, v.to(out.dtype.element_ty), mask=inside)"]
    assert text.indented(text.contiguous(("x", "y"))) == "    x = x.contiguous()\n    y = y.contiguous()"
    assert text.block(("1", "2")) == "(\n        1,\n        2,\n    )"
    assert eval(text.mapping({"a": "1", "b": "(2,)"})) == {"a": 1, "b": (2,)}


def test_flat_cases_pass_a_number_only_where_the_function_takes_one() -> None:
    plain, given = text.flat_cases("x", "y"), text.flat_cases("x", "y", "alpha")
    assert not any("alpha" in c for c in plain) and len(given) == len(plain) + 1
    assert sum("alpha" in c for c in given) == 6 and sum("held=True" in c for c in given) == 1


def test_examples_have_the_shape_that_is_asked_for() -> None:
    rng = random.Random(1)
    assert len(eval(text.vector(rng, 4))) == 4
    assert [len(row) for row in eval(text.matrix(rng, 2, 5, (1, 2)))] == [5, 5]


@pytest.mark.parametrize("family", families())
def test_no_contract_has_a_phrase_that_was_unclear(family: str) -> None:
    settings = build.Settings(1, 23, families=(family,))
    for index in range(25):
        draft = settings.candidate(index)
        said = " ".join(filter(None, (draft.summary, *draft.details)))
        assert not [p for p in UNCLEAR if re.search(p, said)], said
        assert "  " not in said and ".." not in said.replace("...", ""), said
