"""The policy ``deepseek-coder``: one call of DeepSeek-Coder, a code model without training for kernels (sec. 3).

A server with the model's chat template gets the messages. With ``--api completions`` the prompt is rendered here, in
the format of DeepSeek-Coder's README: the system line, ``### Instruction:``, ``### Response:``, ended by ``<|EOT|>``.
Decoding is greedy, as in the README.
"""

from __future__ import annotations

from collections.abc import Sequence

from kbx_env.baselines.llm.access import Access
from kbx_env.baselines.llm.chat import Message
from kbx_env.baselines.llm.method import Sampling, SingleShot

NAME = "deepseek-coder"
SAMPLING = Sampling(max_tokens=4096, temperature=0.0)
SYSTEM = (
    "You are a programming assistant. You write GPU kernels in Triton and the Python functions that launch them. "
    "Answer with code that runs as it is."
)
END = "<|EOT|>"
"""Ends an answer."""


def render(prompt: str, entry: str) -> Sequence[Message]:
    """Return the messages for a task: a system line and the instruction.

    Args:
        prompt: the task's instruction.
        entry: name of the entry function; not used.

    Returns:
        Two messages.
    """
    return ({"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt})


def raw(messages: Sequence[Message]) -> str:
    """Render messages in the model's own format, up to where its answer begins."""
    heads = {"user": "### Instruction:\n", "assistant": "### Response:\n"}
    tails = {"assistant": f"\n{END}"}
    parts = [heads.get(m["role"], "") + m["content"] + tails.get(m["role"], "") for m in messages]
    return "\n".join([*parts, "### Response:\n"])


def build(argument: str | None, access: Access) -> SingleShot:
    """Make the policy.

    Args:
        argument: the model's name, in place of ``access.model``.
        access: how to reach the model.

    Returns:
        The policy.
    """
    return SingleShot(NAME, access, argument, SAMPLING, render, raw=raw, stop=(END,))
