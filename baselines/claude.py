"""Claude, single shot: the task's instruction as one message, one completion, no tools, no retries (paper, sec. 3)."""

from __future__ import annotations

from collections.abc import Sequence

from kbx_env.baselines.llm.access import Access
from kbx_env.baselines.llm.chat import Message
from kbx_env.baselines.llm.method import Sampling, SingleShot

NAME = "claude"
SAMPLING = Sampling(max_tokens=16384)
"""The paper tells neither version nor temperature; newer models refuse sampling parameters, so none is sent."""


def render(prompt: str, entry: str) -> Sequence[Message]:
    """One message of the user's."""
    return ({"role": "user", "content": prompt},)


def build(argument: str | None, access: Access) -> SingleShot:
    """``argument`` is the model's name; Anthropic's own API unless ``--base-url`` says otherwise."""
    return SingleShot(NAME, access, argument, SAMPLING, render, api="anthropic")
