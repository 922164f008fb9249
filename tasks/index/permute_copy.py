"""index/permute_copy."""

from kbx_env.spec.criteria import Exact
from kbx_env.spec.task import Case, Choice, Cost, Ints, Literal, Outlier, Paper, T, Uniform, task

LONG = {"dtypes": {"input": "i64"}}


def _eager(input, dims):
    return input.permute(dims).contiguous()


def _long(p):
    return _any_order(p, p.slab(4, 5, 1100)[0])


def _short(p):
    return _any_order(p, p.shape(4, 5, 1200))


def _any_order(p, shape):
    rank = len(shape)
    return p.like({"*": shape}, {"dims": tuple(d - rank if p.chance() else d for d in p.shuffled(range(rank)))})


@task(
    difficulty=4,
    takes={"input": T("*")},
    truth=Exact(),
    moves=True,
    cost=Cost(),
    paper=Paper(rtol=1e-5, atol=1e-5),
    eager=_eager,
    differs="The result is contiguous; the published reference kept the input's order in memory, a plain copy. Timed "
    "over several orders.",
    cases=(
        Case({"*": (2, 3)}, {"dims": (1, 0)}, draw=Literal(1, 2, 3, 4, 5, 6), **LONG),
        Case({"*": (2, 3, 4)}, {"dims": (2, 0, 1)}, draw=Ints(-(2**62), 2**62), **LONG),
        Case({"*": (5,)}, {"dims": (0,)}, draw=Uniform()),
        Case({"*": (2, 3, 4, 5)}, {"dims": (3, 2, 1, 0)}, draw=Uniform()),
        Case({"*": (129, 257)}, {"dims": (1, 0)}),
        Case({"*": (4, 8, 16, 32)}, {"dims": (3, 0, 2, 1)}, draw=Outlier(scale=20)),
        # An even number of matrices of more than one tile: their numbers show in the wrong order.
        Case({"*": (8, 65, 33)}, {"dims": (0, 2, 1)}),
        Case({"*": (3, 7, 2100)}, {"dims": (1, 0, 2)}, draw=Ints(-(10**9), 10**9), **LONG),
        Case({"*": (40, 51, 3)}, {"dims": (-1, 0, -2)}, draw=Choice(float("nan"), float("-inf"), -0.0, 1e-40, 3.5)),
        Case({"*": (3, 5, 2, 4, 7)}, {"dims": (4, 1, 3, 0, 2)}),
        Case({"*": (33, 65)}, {"dims": (1, 0)}, layouts={"input": "transposed"}),
        Case({"*": (33, 65)}, {"dims": (0, 1)}, layouts={"input": "transposed"}),
        Case({"*": (3, 8, 9, 11)}, {"dims": (0, 2, 3, 1)}, layouts={"input": "channels_last"}),
        Case({"*": (6, 31, 14)}, {"dims": (2, 1, 0)}, layouts={"input": "strided"}),
        Case({"*": (3, 0, 5)}, {"dims": (2, 0, 1)}),
        Case({"*": (9, 4, 37, 10)}, {"dims": (2, 3, 0, 1)}, held=True),
        Case({"*": (211, 5, 17)}, {"dims": (1, 2, 0)}, draw=Ints(-99, 99), **LONG, held=True),
    ),
    varied=(_long, _short),
    timed=(
        *(Case({"*": (n, n, n, n)}, {"dims": (3, 2, 1, 0)}, draw=Uniform()) for n in (64, 96)),
        Case({"*": (8192, 8192)}, {"dims": (1, 0)}, draw=Uniform()),
        Case({"*": (64, 1024, 16, 64)}, {"dims": (0, 2, 1, 3)}, draw=Uniform()),
    ),
)
def permute_copy(input, dims):
    """The axes of input in the order dims, moved in memory: y[i_dims[0], i_dims[1], ..] = input[i_0, i_1, ..].

    Example: permute_copy([[1, 2, 3], [4, 5, 6]], (1, 0)) = [[1, 4], [2, 5], [3, 6]]

    input is an fp32 or int64 tensor of rank 1 to 5 with any strides; dims is a tuple that names every axis once and may
    hold negative numbers. The result is a new contiguous tensor of the permuted shape and the same dtype, not a view
    and not a copy that keeps the order in memory of the input. Values are moved, not changed (NaN, infinities and zeros
    of both signs pass), and a Triton kernel moves them: torch may copy a whole tensor in its own order (contiguous) and
    nothing else. Sizes may be 0.
    """
    return input.permute(dims).contiguous()
