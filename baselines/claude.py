"""The policy ``claude``: the instruction as one message, one completion, no tools, no retries (paper, sec. 3)."""

from __future__ import annotations

from collections.abc import Sequence

from kbx_env.baselines.llm.access import Access
from kbx_env.baselines.llm.chat import Message
from kbx_env.baselines.llm.method import Sampling, SingleShot

NAME = "claude"
SAMPLING = Sampling(max_tokens=16384)
"""Without sampling parameters: the paper states neither version nor temperature, and newer models refuse them."""


def render(prompt: str, entry: str) -> Sequence[Message]:
    """Return the messages for a task.

    Args:
        prompt: the task's instruction.
        entry: name of the entry function; not used.

    Returns:
        One message of the user.
    """
    return ({"role": "user", "content": prompt},)


def build(argument: str | None, access: Access) -> SingleShot:
    """Make the policy; without ``--base-url`` it uses Anthropic's own API.

    Args:
        argument: the model's name, in place of ``access.model``.
        access: how to reach the model.

    Returns:
        The policy.
    """
    return SingleShot(NAME, access, argument, SAMPLING, render, api="anthropic")
