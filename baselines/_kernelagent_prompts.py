"""Prompts of the policy ``kernelagent``: test, first kernels, repair. They follow Meta's KernelAgent, in our words."""

from __future__ import annotations

from collections.abc import Sequence

_TEST = """\
Write a test for a Triton kernel that somebody else will write. The task of the kernel:

{prompt}

The kernel will be in the file kernel.py, as `kernel_function{signature}`: the function of the task under that name.
Write the file test_kernel.py:
- `from kernel import kernel_function`; the test runs as `python test_kernel.py`.
- Make inputs on the device "{device}" with fixed seeds, in the dtypes of the task: a usual size, a size that is no multiple of
  a power of two, every option of the signature.
- Compute what is expected with plain PyTorch in the test itself, and compare shape, dtype and values with
  torch.testing.assert_close: rtol = atol = 1e-3 for float32, 1e-2 for half precision, exactly for integers.
- On a difference print the input's shape, the largest error and where it is, then exit with status 1; exit with status 0 when
  everything agrees. Let no exception be swallowed. Finish within 20 seconds.

Answer with the file in one ```python block.
"""

_GUIDE = """\
How Triton kernels are built
- A kernel is a function under @triton.jit that a grid of programs runs; program_id tells which part is one's own.
- Blocks are made with tl.arange(0, BLOCK), whose length is a tl.constexpr power of two; a mask keeps what lies outside of the
  tensor out of loads and stores.
- Masked lanes need a value that changes nothing later: 0 for sums, minus infinity for maxima and before exponentials.
- Reductions over more than a block go in a loop with an accumulator in float32; matrix products in tiles with tl.dot.
- Indices are computed from strides that the wrapper passes; use 64 bits where they may pass 2**31.
- The wrapper checks its arguments, allocates the result, computes the grid with triton.cdiv, launches, and returns.
"""

_SEED = """\
Write a Triton kernel that passes this test:

```python
{test}
```

{guide}
Fuse what can share one pass over memory. At run time the wrapper may only check arguments, allocate and launch: all arithmetic
on data happens in Triton kernels.

Forbidden: torch.nn, torch.nn.functional, torch's matrix products, convolutions, activations, pooling and reductions, einsum,
torch.ops, calling forward of a module, looking at the caller or the test by any means.
Required: the file kernel.py with all imports, at least one @triton.jit kernel, and `def kernel_function{signature}`.

The least that a file looks like:
```python
import torch
import triton
import triton.language as tl


@triton.jit
def _double(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


def kernel_function(x):
    y = torch.empty_like(x)
    _double[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y
```

Answer with the whole file in one ```python block.
"""

_REFINE = """\
This Triton kernel does not pass its test. The test:

```python
{test}
```

The kernel:
```python
{code}
```

Standard error of the test:
{stderr}

Standard output:
{stdout}
{history}
{guide}
Find the cause, mend it, and keep `def kernel_function{signature}`. The same things are forbidden as before: torch.nn,
torch.nn.functional, torch's own products, convolutions, activations and reductions, torch.ops, looking at the test.
Answer with the whole file in one ```python block.
"""


def write_test(prompt: str, signature: str, device: str) -> str:
    """Return the prompt for a test.

    Args:
        prompt: the task's instruction.
        signature: of the entry function.
        device: torch device on which the test runs.

    Returns:
        The text of the user's message.
    """
    return _TEST.format(prompt=prompt, signature=signature, device=device)


def seed(test: str, signature: str) -> str:
    """Return the prompt for a first kernel. As in the published code it shows the test and not the task.

    Args:
        test: the test's source.
        signature: of the entry function.

    Returns:
        The text of the user's message.
    """
    return _SEED.format(test=test, guide=_GUIDE, signature=signature)


def refine(
    test: str, signature: str, code: str, stderr: str, stdout: str, history: Sequence[tuple[str, str, str]]
) -> str:
    """Return the prompt for a repair.

    Args:
        test: the test's source.
        signature: of the entry function.
        code: the kernel.
        stderr: standard error of the test.
        stdout: standard output of the test.
        history: code, standard error and standard output of earlier rounds, already shortened; the oldest first.

    Returns:
        The text of the user's message.
    """
    shown = ""
    if history:
        rows = "\n".join(f"Kernel:\n{code}\nErrors:\n{err}\nOutput:\n{out}\n" for code, err, out in history)
        shown = f"\nEarlier rounds, the oldest first:\n{rows}"
    return _REFINE.format(
        test=test, signature=signature, code=code, stderr=stderr or "(nothing)", stdout=stdout or "(nothing)",
        history=shown, guide=_GUIDE,
    )  # fmt: skip
