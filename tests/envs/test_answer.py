"""The source of an answer: the module itself, or the block of it in Markdown."""

from __future__ import annotations

import pytest

from kbx_env.envs.answer import strip_fences

MODULE = 'import torch\n\n\ndef f(x):\n    """Doc.\n\n    ```\n    f(1)\n    ```\n    """\n    return x\n'


def test_a_module_with_fences_in_a_docstring_is_the_module() -> None:
    assert strip_fences(MODULE) == MODULE


@pytest.mark.parametrize("answer", ["Here:\n```python\n{}```\nDone.", "```\n{}```", "```py\n{}"])
def test_a_block_is_taken_out_of_an_answer(answer: str) -> None:
    source = "import torch\n\n\ndef f(x):\n    return x\n"
    assert strip_fences(answer.format(source)).strip() == source.strip()


def test_text_without_a_fence_stays_as_it_is() -> None:
    assert strip_fences("no code at all") == "no code at all"
