"""index/masked_select."""

import torch
from kbx_env.tasks._varied import BOTH_ENDS, ENDS, both_ways

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import Bernoulli, Case, Cost, Ints, Outlier, Paper, T, task


def _dense(p):
    # Declared masks of more than a block are half full at most: a kernel might have room for no more.
    return both_ways("*", "*m", dtypes={"input": "f32"}, draws={"mask": Bernoulli(p.among(0.9, 1.0))})(p)


def _both_ends(p):
    shape = p.shape(3, 3, 90)
    return p.like({"*": shape, "*m": shape}, dtypes={}, draws={"input": BOTH_ENDS, "mask": Bernoulli(0.9)})


def _half(p):
    shape = p.shape(3, 4, 200)
    return p.like({"*": shape, "*m": shape}, dtypes={}, draws={"mask": Bernoulli(0.5)})


def _of_any_dtype(p):
    dtype = p.among("f16", "bf16", "f64", "i8", "u8", "i16", "i32", "i64", "bool")
    values = {"i8": Ints(-128, 128), "u8": Ints(0, 256), "i16": Ints(-(2**15), 2**15), "i32": Ints(-(2**31), 2**31), "i64": ENDS,
              "bool": Bernoulli()}  # fmt: skip
    shape = p.shape(1, 5, 600)
    return p.like({"*": shape, "*m": p.broadcast(shape)}, dtypes={"input": dtype},
                  draws={"input": values.get(dtype, Outlier(p=0.2, scale=50)), "mask": Bernoulli(0.4)})  # fmt: skip


@task(
    difficulty=4,
    takes={"input": T("*"), "mask": T("*m", "bool", Bernoulli(0.5))},
    truth=Exact(),
    picks=True,
    # How many elements are selected differs from call to call: nonzero(mask) is a bound for all of them.
    cost=Cost(
        bytes="numel(mask) + itemsize(input) * (under(input, mask) + single_call * numel(result)"
        " + (1 - single_call) * nonzero(mask))",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="The timing mask is random; as published it alternates, which a strided copy would solve.",
    cases=(
        Case({"*": (16,), "*m": (16,)}),
        Case({"*": (4, 5), "*m": (4, 5)}),
        Case({"*": (2, 3, 4), "*m": (1, 3, 1)}, draws={"mask": Bernoulli(0.7)}),
        Case({"*": (64, 128), "*m": (64, 128)}),
        Case({"*": (64, 128), "*m": (64, 128)}, draw=Outlier(scale=20), draws={"mask": Bernoulli(0.02)}),
        Case({"*": (1, 77), "*m": (50, 1)}),
        Case({"*": (333,), "*m": (333,)}, draws={"mask": Bernoulli(0.0)}),
        Case({"*": (333,), "*m": (333,)}, draws={"mask": Bernoulli(1.0)}),
        Case({"*": (40, 51), "*m": (40, 51)}, layouts={"input": "transposed", "mask": "transposed"}),
        # Full from end to end: a kernel might have room for a part of a block only, and derived masks may fit into one block.
        Case({"*": (2050,), "*m": (2050,)}, draws={"input": Ints(-(10**9), 10**9), "mask": Bernoulli(0.95)},
             dtypes={"input": "i64"}),
        Case({"*": (9, 31), "*m": (9, 31)}, dtypes={"input": "f16"}, layouts={"input": "strided"}),
        Case({"*": (300,), "*m": (300,)}, draws={"input": Bernoulli(0.5)}, dtypes={"input": "bool"}),
        Case({"*": (5, 7), "*m": ()}, draws={"mask": Bernoulli(1.0)}),
        Case({"*": (), "*m": (3, 50)}),
        Case({"*": (), "*m": ()}, draws={"mask": Bernoulli(1.0)}),
        Case({"*": (0,), "*m": (0,)}),
        Case({"*": (7, 1, 301), "*m": (7, 5, 301)}, draws={"mask": Bernoulli(0.3)}, held=True),
    ),
    varied=(
        _dense,
        _both_ends,
        _half,
        _of_any_dtype,
    ),
    timed=tuple(Case({"*": (n,), "*m": (n,)}) for n in (1 << 20, 1 << 22, 1 << 25)),
)
def masked_select(input, mask):
    """The elements of input where mask is True, as a new 1-D tensor in row-major order.

    Example: masked_select([[1, 2], [3, 4]], [True, False]) = [1, 3]

    input (fp32, fp16, int64, or any other real dtype or bool; any shape, 0-d too) and mask (bool) are broadcast against
    each other first, as torch broadcasts. The length of the result is the number of True elements of the broadcast mask
    and may be 0. Values are moved, not changed, and a Triton kernel selects them: torch may copy whole tensors, in any
    order and broadcast, but no part of one. Both may be non-contiguous or empty. Reading the length back to the host is
    allowed.
    """
    return torch.masked_select(input, mask)
