"""Prompts of the policy ``geak``: generation, self-evaluation, reflection; after AMD's GEAK v2, for NVIDIA."""

from __future__ import annotations

import json
from collections.abc import Sequence

CRITERIA = {
    "fusion": "work that could share a pass over memory shares it",
    "autotuning": "block sizes, warps and stages are chosen for the sizes at hand",
    "memory": "accesses are coalesced, nothing is read twice without need",
    "complexity": "no more arithmetic than the task needs",
    "warps": "the number of warps suits the work of a program",
    "pipelining": "loads overlap with arithmetic where a loop allows it",
    "stability": "sums and exponentials keep their accuracy",
    "portability": "nothing depends on one GPU model",
    "scope": "every shape, dtype and option of the contract is served",
}
"""Criteria of the self-evaluation, with a number from 0 to 1 each; the sum orders a slot's history."""

_GENERATE = """\
You are an expert in GPU kernels on NVIDIA hardware, writing Triton. Write the kernel that this task asks for, and make it
correct first and fast second.

{prompt}

The module must define exactly this function, with these parameters:
    {entry}{signature}

Keep to these points:
1. One complete Python file: all imports, every kernel under @triton.jit, the wrapper.
2. Portable Triton 3: no inline assembly, no features of one GPU alone.
3. Compile-time sizes are tl.constexpr parameters; tl.arange needs powers of two.
4. Mask every load and store that may leave a tensor; give masked lanes a value that the following reduction ignores
   (minus infinity before a maximum or an exponential, 0 before a sum).
5. Accumulate in fp32, convert when storing; return the dtype that the contract names.
6. Take strides from the tensors, or make them contiguous first; do not assume a layout.
7. Launch with a grid that covers every element, for sizes that are no multiple of a block too.

Before you answer, check: imports there? signature exact? every pointer masked? dtypes right? empty and odd sizes served?
"""

_EXAMPLE = """
A kernel for a related task ({task}), for its style:
```python
{code}
```
"""

_HISTORY = """
Earlier attempts at this task, the most promising first:
"""

_ATTEMPT = """
Attempt {number}
```python
{code}
```
Result: {result}
Analysis: {reflection}
"""

_DEBUG = "\nThe attempts failed. Find the cause, then write the corrected file.\n"

_OPTIMISE = """
These correct kernels exist already, the fastest first. Think of a strategy that beats them, in how memory is read, what is
fused, how work is split, then write it. Do not hand in one of them again.
"""

_ANSWER = """
Answer with one JSON object and nothing else: {"strategy": "what you do and why, in a few sentences", "code": "the whole file"}
"""

_EVALUATE = """\
Judge this Triton kernel before it is run. The task:

{prompt}

The kernel:
```python
{code}
```

Give each point a number from 0 (not at all) to 1 (fully):
{criteria}

Answer with one JSON object and nothing else, with exactly these keys: {keys}
"""

_WRONG = """\
A Triton kernel failed. The task:

{prompt}

The kernel:
```python
{code}
```

What the tests said:
{result}

Why did it fail, and what exactly has to change? Answer in a few sentences, without writing the whole file.
"""

_SLOW = """\
A Triton kernel is correct. The task:

{prompt}

The kernel:
```python
{code}
```

What was measured:
{result}

Summarise its strategy, say what holds it back, and how to make it faster. Answer in a few sentences, without code.
"""


def generate(prompt: str, entry: str, signature: str, rest: str) -> str:
    """Return the prompt for a candidate.

    Args:
        prompt: the task's instruction.
        entry: name of the entry function.
        signature: its signature.
        rest: an example, failed attempts, or correct kernels to beat; may be empty.

    Returns:
        The text of the user's message.
    """
    return _GENERATE.format(prompt=prompt, entry=entry, signature=signature) + rest + _ANSWER


def example(task: str, code: str) -> str:
    """Return the part of a prompt with a kernel for another task, as an example of style.

    Args:
        task: id of the other task.
        code: its kernel.

    Returns:
        The text.
    """
    return _EXAMPLE.format(task=task, code=code)


def attempts(rows: Sequence[tuple[str, str, str]], *, failed: bool) -> str:
    """Return the part of a prompt with earlier kernels.

    Args:
        rows: code, result and reflection of each, the best first.
        failed: whether they failed and are to be repaired; else they are correct and to be beaten.

    Returns:
        The text.
    """
    shown = "".join(
        _ATTEMPT.format(number=n, code=code, result=result, reflection=reflection or "none")
        for n, (code, result, reflection) in enumerate(rows, 1)
    )
    return (_HISTORY + shown + _DEBUG) if failed else (_OPTIMISE + shown)


def evaluate(prompt: str, code: str) -> str:
    """Return the prompt for a self-evaluation.

    Args:
        prompt: the task's instruction.
        code: the candidate.

    Returns:
        The text of the user's message.
    """
    listed = "\n".join(f"- {name}: {text}" for name, text in CRITERIA.items())
    return _EVALUATE.format(prompt=prompt, code=code, criteria=listed, keys=json.dumps(list(CRITERIA)))


def reflect(prompt: str, code: str, result: str, *, correct: bool) -> str:
    """Return the prompt for an analysis of a result.

    Args:
        prompt: the task's instruction.
        code: the candidate.
        result: its verdict as text.
        correct: whether the candidate is correct.

    Returns:
        The text of the user's message.
    """
    return (_SLOW if correct else _WRONG).format(prompt=prompt, code=code, result=result)
