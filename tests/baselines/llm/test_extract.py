"""What counts as the kernel in an answer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kbx_env.baselines.llm.chat import Finish, Reply
from kbx_env.baselines.llm.extract import kernel_in, object_in, without_thinking

from kbx_env.envs.answer import defines, strip_fences
from kbx_env.errors import NoAnswer

GOOD = "import triton\n\n\ndef relu(x):\n    return x\n"


def _kernel(text: str, finish: Finish = Finish.STOP, thinking: str = "") -> str:
    return kernel_in(Reply(text, finish, thinking), "relu")


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"```python\n{GOOD}```",
        f"Sure, here it is:\n\n```py\n{GOOD}```\nGood luck!",
        f"<think>maybe ```python\ndef relu(x): pass\n# much longer than the answer is\n```</think>\n```python\n{GOOD}```",
        f"I think ```\n<think> no\n</think>\n```python\n{GOOD}```",
        f"  reasoning that the template opened itself </think>\n```python\n{GOOD}```",
        f"```bash\npip install a-very-long-list-of-packages and much more than the kernel itself\n```\n```python\n{GOOD}```",
        f"```python\n# usage\nrelu(1)\n```\n```python\n{GOOD}```",
        f"~~~python\n{GOOD}~~~",
        f"```python\n{GOOD}```<|EOT|>",
        f"```python\n{GOOD}",  # cut off after the code
        f"    ```python\n{GOOD}    ```",
    ],
)
def test_the_kernel_is_found(text: str) -> None:
    assert _kernel(text).strip() == GOOD.strip()


def test_of_two_that_define_the_entry_the_last_complete_one_is_meant_as_in_training() -> None:
    longer = GOOD + "\n\ndef helper():\n    pass\n"
    use = "from kernel import relu\n\nprint(relu(1), 'and much more text than the kernel itself has, to be the longest')\n"
    answers = {
        f"```python\n{longer}```\nno:\n```python\n{GOOD}```": GOOD,
        f"```python\n{longer}```\nUse it:\n```python\n{use}```": longer,
        f"```python\n{GOOD}```\nor\n```python\n{longer}": GOOD,  # the last one is not complete
    }
    for text, meant in answers.items():
        assert _kernel(text) == meant == strip_fences(text, "relu")


def test_tags_and_fences_in_a_string_of_a_module_belong_to_it() -> None:
    source = GOOD.replace("return x", 'return "<think>", """\n~~~\n```\n"""')
    assert _kernel(source) == source
    fenced = source.replace("<think>", "")
    assert _kernel(f"Here:\n~~~python\n{fenced}~~~\n") == fenced


def test_a_block_without_the_entry_is_still_judged() -> None:
    assert _kernel("```python\nx = 1\n```") == "x = 1\n"


@pytest.mark.parametrize(
    ("text", "finish", "thinking", "says"),
    [
        ("", Finish.STOP, "", "empty"),
        ("  \n", Finish.STOP, "", "empty"),
        ("", Finish.STOP, "I wonder", "thinking"),
        ("<think>so long</think>", Finish.STOP, "", "thinking"),
        ("<think>so long and", Finish.LENGTH, "", "token limit"),
        ("I'm sorry, but I can't help with that.", Finish.STOP, "", "refused"),
        ("As an AI language model, I'm unable to do this.", Finish.STOP, "", "refused"),
        ("No.", Finish.REFUSAL, "", "refused"),
        ("A kernel is a small program.", Finish.STOP, "", "no code"),
    ],
)
def test_no_kernel_says_why(text: str, finish: Finish, thinking: str, says: str) -> None:
    with pytest.raises(NoAnswer, match=says):
        _kernel(text, finish, thinking)


def test_an_apology_before_code_is_no_refusal() -> None:
    assert _kernel(f"I'm sorry for the earlier mistake.\n```python\n{GOOD}```") == GOOD


@pytest.mark.parametrize(
    "source", ["def relu(x): ...", "relu = f", "class relu: ...", "relu: object = f", "async def relu(): ..."]
)
def test_what_defines_a_name(source: str) -> None:
    assert defines(source, "relu") and not defines(f"if x:\n    {source}", "relu") and not defines("def (", "relu")
    assert not defines("from kernel import relu", "relu"), "an example of use imports it"


def test_objects() -> None:
    code = 'def f():\n    return {"a": 1}\n'
    assert object_in(json.dumps({"strategy": "s", "code": code})) == {"strategy": "s", "code": code}
    assert object_in(f"Here:\n```json\n{json.dumps({'code': code})}\n```")["code"] == code  # type: ignore[index]
    assert object_in('{"code": "line\nline"}') == {"code": "line\nline"}, "raw newlines in strings are forgiven"
    assert object_in("x = {broken} then {\"a\": 0.5}") == {"a": 0.5}
    assert object_in("no object, [1, 2]") is None and object_in('{"code": "cut off') is None


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="`~ \n<>/think{}\"\\abdef:()=1", max_size=80), st.sampled_from(list(Finish)))
def test_any_text_is_a_kernel_or_says_why(text: str, finish: Finish) -> None:
    object_in(text), without_thinking(text)
    try:
        assert isinstance(kernel_in(Reply(text, finish), "f"), str)
    except NoAnswer as e:
        assert str(e)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_prose_around_a_fenced_kernel_changes_nothing(before: str, after: str) -> None:
    for c in "`~<":
        before, after = before.replace(c, ""), after.replace(c, "")
    assert _kernel(f"{before}\n```python\n{GOOD}```\n{after}") == GOOD
