"""The policy ``autotriton``: one call of AutoTriton, an 8B model trained with SFT and GRPO to write Triton.

The prompt follows its TritonBench prompt. The model thinks before it answers, between ``<think>`` and ``</think>``; its
limit of 16,384 tokens covers both. The method states no sampling settings: temperature 0.6 and top-p 0.95 are those of
a public driver.
"""

from __future__ import annotations

from collections.abc import Sequence

from kbx_env.baselines.llm.access import Access
from kbx_env.baselines.llm.chat import Message
from kbx_env.baselines.llm.method import Sampling, SingleShot

NAME = "autotriton"
SAMPLING = Sampling(max_tokens=16384, temperature=0.6, top_p=0.95)
_ASK = """\
Write a Triton kernel, and the Python wrapper that launches it, for this instruction:

{prompt}

The wrapper takes the same inputs and returns the same outputs as the instruction says. Define it directly as
`def {entry}`, not inside of a class. Fill in this frame and give the whole of it:

```python
import torch
import triton
import triton.language as tl


@triton.jit
def {entry}_kernel(...):
    ...


def {entry}(...):
    ...
```
"""


def render(prompt: str, entry: str) -> Sequence[Message]:
    """Return the messages for a task: one with the request, the instruction, and a frame of two functions.

    Args:
        prompt: the task's instruction.
        entry: name of the entry function.

    Returns:
        One message of the user.
    """
    return ({"role": "user", "content": _ASK.format(prompt=prompt, entry=entry)},)


def build(argument: str | None, access: Access) -> SingleShot:
    """Make the policy.

    Args:
        argument: the model's name, in place of ``access.model``.
        access: how to reach the model.

    Returns:
        The policy.
    """
    return SingleShot(NAME, access, argument, SAMPLING, render)
