"""DeepSeek-Coder, single shot: a code model that has not been trained for kernels (paper, sec. 3).

Served with its chat template, the messages are enough. ``--api completions`` renders the model's own format here: the system
line, ``### Instruction:``, ``### Response:``, ended by ``<|EOT|>`` (DeepSeek-Coder's README). Greedy decoding, as there.
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


def render(prompt: str, entry: str) -> Sequence[Message]:
    """A system line and the instruction."""
    return ({"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt})


def raw(messages: Sequence[Message]) -> str:
    """The model's own format."""
    heads = {"user": "### Instruction:\n", "assistant": "### Response:\n"}
    tails = {"assistant": f"\n{END}"}
    parts = [heads.get(m["role"], "") + m["content"] + tails.get(m["role"], "") for m in messages]
    return "\n".join([*parts, "### Response:\n"])


def build(argument: str | None, access: Access) -> SingleShot:
    """``argument`` is the model's name."""
    return SingleShot(NAME, access, argument, SAMPLING, render, raw=raw, stop=(END,))
