"""The source of an answer: the module itself, or the block of it in Markdown, after the reasoning."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbx_env.envs.answer import strip_fences, without_reasoning

MODULE = 'import torch\n\n\ndef f(x):\n    """Doc.\n\n    ```\n    f(1)\n    ```\n    """\n    return x\n'
TAGGED = 'import torch\n\n\ndef f(x):\n    return "<think>", x\n'


@pytest.mark.parametrize("source", [MODULE, TAGGED])
def test_a_module_with_fences_or_tags_in_a_text_is_the_module(source: str) -> None:
    assert strip_fences(source) == source


def test_fences_in_a_docstring_do_not_end_a_block() -> None:
    assert strip_fences(f"So:\n```python\n{MODULE}```\nDone.", "f") == MODULE


@pytest.mark.parametrize("answer", ["Here:\n```python\n{}```\nDone.", "```\n{}```", "```py\n{}", "Here: ```python\n{}```\n"])
def test_a_block_is_taken_out_of_an_answer(answer: str) -> None:
    source = "import torch\n\n\ndef f(x):\n    return x\n"
    assert strip_fences(answer.format(source)).strip() == source.strip()


def test_text_without_a_fence_stays_as_it_is() -> None:
    assert strip_fences("no code at all") == "no code at all"


DRAFT, FINAL = "def f(x):\n    return x + 0  # a long first draft\n", "def f(x):\n    return x\n"
TEST, NEW = f"assert f(1) == 1  # {'x' * 99}\n", "\n"


def fenced(source: str) -> str:
    return f"```python\n{source}```\n"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (f"<think>\n{fenced(DRAFT)}Better:</think>\n{fenced(FINAL)}", FINAL),
        (f"{fenced(DRAFT)}So:\n</think>\n{fenced(FINAL)}", FINAL),  # the chat template wrote the tag that begins
        (f"<think>a</think>\n{fenced(FINAL)}<think>is it right?\n{fenced(DRAFT)}", FINAL),
        (f"<think>\n{fenced(DRAFT)}and so on", ""),  # never answered
        (f"<think>I end with </think> and {fenced(DRAFT)}</think>\n{fenced(FINAL)}", FINAL),
        (f"<think>hm</think>\n{FINAL}", f"\n{FINAL}"),
        (f"{fenced(DRAFT)}No:\n{fenced(FINAL)}Try it:\n{fenced(TEST)}", FINAL),  # the last one that defines the entry
        (f"{fenced(FINAL)}Or:\n```python\n{DRAFT}", FINAL),  # the last one is not complete
        (f"```python\n{DRAFT}No, again:\n{fenced(FINAL)}", FINAL),
        (f"{fenced('f = abs' + NEW)}Then:\n{fenced('x = (' + NEW)}", "f = abs"),
    ],
)  # fmt: skip
def test_reasoning_and_drafts_are_not_the_answer(answer: str, found: str) -> None:
    assert strip_fences(answer, "f").strip() == found.strip()


def test_without_an_entry_the_largest_block_counts_and_tags_can_be_chosen() -> None:
    assert strip_fences(f"{fenced(FINAL)}or\n{fenced(DRAFT)}or\n{fenced(FINAL)}") == DRAFT
    assert strip_fences(f"{fenced(FINAL)}or\n{fenced(DRAFT)}", "g") == DRAFT, "no block defines the entry"
    assert strip_fences(f"[[{fenced(DRAFT)}]]{fenced(FINAL)}", "f", ("[[", "]]")).strip() == FINAL.strip()
    assert DRAFT in strip_fences(f"<think>\n{fenced(DRAFT)}", "f", ()), "no tags: nothing is cut"


WORDS = st.text(st.sampled_from("ab \n`<>/"), max_size=20)
PARTS = st.lists(
    st.one_of(WORDS, st.sampled_from(["<think>", "</think>", fenced(DRAFT), fenced(TEST), "```\n", "\n```python\n", "\n"])),
    max_size=8,
).map("".join)  # fmt: skip


@given(PARTS, st.sampled_from(["", "<think>\n"]))
def test_whatever_was_thought_the_block_behind_it_is_the_answer(thought: str, begun: str) -> None:
    assert strip_fences(f"{begun}{thought}</think>\n\n{fenced(FINAL)}", "f") == FINAL
    assert strip_fences(f"{thought.replace('<think>', '')}\n</think>\n\n{fenced(FINAL)}Done.", "f") == FINAL
    assert strip_fences(f"<think>{thought.replace('</think>', '')}", "f") == ""


@given(PARTS)
def test_nothing_is_made_up(text: str) -> None:
    left = without_reasoning(text)
    assert without_reasoning(left) == left or "think" in left
    assert ("<think>" in left, "</think>" in left) == (False, False) or left != text
    found = strip_fences(text, "f")
    assert set(found) <= set(text) and len(found) <= len(text)


def test_answers_are_read_in_threads() -> None:
    """Python 3.11's parser raises a SystemError where two threads parse at once."""
    text = "def f(x):\n    return " + " + ".join(f"g(x[{i}], y={i})" for i in range(300)) + "\n"
    with ThreadPoolExecutor(8) as pool:
        assert all(found == text for found in pool.map(strip_fences, [text] * 200))
