"""Tensor descriptors that gather, scatter and reduce."""

from __future__ import annotations

import numpy as np
import pytest
import triton
import triton.language as tl
from ttir_helper import execute, to_ttir


@triton.jit
def rows_kernel(x, o, index, M, N):
    d = tl.make_tensor_descriptor(x, [M, N], [N, 1], [1, 16])
    r = tl.load(index + tl.arange(0, 8))
    e = tl.make_tensor_descriptor(o, [M, N], [N, 1], [1, 16])
    e.scatter(d.gather(r, 16), r + 1, 0)


def test_gather_and_scatter_of_rows() -> None:
    x = np.random.default_rng(0).standard_normal((12, 24)).astype(np.float16)
    o = np.zeros_like(x)
    index = np.array([3, 0, 11, 5, 20, 7, 9, -4], np.int32)
    sig = {"x": "*fp16", "o": "*fp16", "index": "*i32", "M": "i32", "N": "i32"}
    execute(to_ttir(rows_kernel, sig), (1,), [x, o, index, 12, 24])
    want = np.zeros_like(x)
    for r in index:
        if 0 <= r + 1 < 12:
            want[r + 1, :16] = 0
            if 0 <= r < 12:
                want[r + 1, :8] = x[r, 16:]
    assert (o == want).all()


@triton.jit
def reduce_kernel(x, o, M, N, KIND: tl.constexpr):
    d = tl.make_tensor_descriptor(x, [M, N], [N, 1], [8, 16])
    e = tl.make_tensor_descriptor(o, [M, N], [N, 1], [8, 16])
    v = d.load([4, 8])
    if KIND == "add":
        e.atomic_add([4, 8], v)
    elif KIND == "max":
        e.atomic_max([4, 8], v)
    elif KIND == "min":
        e.atomic_min([4, 8], v)
    elif KIND == "and":
        e.atomic_and([4, 8], v)
    elif KIND == "or":
        e.atomic_or([4, 8], v)
    else:
        e.atomic_xor([4, 8], v)


FUNCTIONS = {"add": np.add, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or,
             "xor": np.bitwise_xor}  # fmt: skip


@pytest.mark.parametrize("dtype", ["i32", "u32"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_reductions_into_memory(kind: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, o = (rng.integers(0, 2**32, (10, 20)).astype(np.uint32).view(f"{dtype[0]}4") for _ in range(2))
    want = o.copy()
    want[4:, 8:] = FUNCTIONS[kind](o[4:, 8:], x[4:, 8:])
    sig = {"x": "*" + dtype, "o": "*" + dtype, "M": "i32", "N": "i32"}
    execute(to_ttir(reduce_kernel, sig, {"KIND": kind}), (1,), [x, o, 10, 20])
    assert (o == want).all()
