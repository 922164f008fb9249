"""fusion/fused_repeat_interleave_log_softmax."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._varied import LONG_LINE, NEAR_ZERO

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, DtypeArg, Ints, Literal, Normal, Outlier, Paper, Shuffled, T, Uniform, task

F32, F64 = {"dtype": DtypeArg("f32")}, {"dtype": DtypeArg("f64")}
CYCLE = {"repeats": Shuffled(2, 0, 3, 1)}
"""The sum is known, which output_size needs; what stands where is not."""


def _case(shape, repeats, dim=None, args=None, **more):
    """``repeats`` is a number, or the length of a tensor."""
    number = {} if isinstance(repeats, tuple) else {"repeats": repeats}
    where = {} if dim is None else {"dim": dim}
    axes = {"*": shape, "R": repeats[0] if isinstance(repeats, tuple) else 1}
    return Case(axes, number | where | (args or {}), **more)


def _small(p):
    return _repeated(p, p.shape(4, 5, 200), p.whole(0, 3))


def _long(p):
    return _repeated(p, *p.slab(4, 5, 1100))


def _columns(p):
    # Kernels split these sums, and take several columns at a time. The largest values are near zero, elsewhere they are not.
    return _repeated(p, (p.among(1, 2), p.whole(530, 560), p.whole(36, 60)), 1, Uniform(-p.whole(2, 5), 0))


def _almost_certain(p):
    # One of few values is far above the others, and is not repeated: its logarithm is near zero.
    shape = (p.whole(1100, 1200), p.whole(2, 3))  # also: many lines
    return p.like({"*": shape, "R": 1}, {"dim": 1, "repeats": 1, "output_size": None}, where=lambda c: "repeats" in c.args,
                  draw=Normal(scale=8), out=True)  # fmt: skip


def _beyond_exp(p):
    # Without the largest value of each line exp overflows, or gives zeros only.
    return _repeated(p, (p.whole(50, 70), p.whole(9, 20)), 1, Normal(mean=p.among(-300.0, 300.0), scale=9))


def _long_lines(p):
    # Kernels share long lines between programs if the tensor is large.
    # Five copies: neither one, nor a power of two.
    return p.like({"*": (16, LONG_LINE + p.whole(1, 900)), "R": 1}, {"dim": 1, "repeats": 5, "output_size": None},
                  where=lambda c: "repeats" in c.args, draw=Normal(scale=3))  # fmt: skip


def _long_columns(p):
    # The same of columns, of a result of 2**19 elements: with 512 elements kernels share each between two programs.
    return p.like({"*": (8, 512, p.whole(36, 60)), "R": 1}, {"dim": 1, "repeats": 5, "output_size": None},
                  where=lambda c: "repeats" in c.args, draw=Normal(scale=3))  # fmt: skip


def _near_zero(p):
    return _repeated(p, (p.whole(50, 70), p.whole(2, 3)), 1, NEAR_ZERO)


def _repeated(p, shape, at, draw=Normal(scale=3)):
    n = shape[at]
    args = {"dim": at - len(shape) if p.chance() else at, "output_size": None,
            "dtype": p.among(None, DtypeArg("f32"), DtypeArg("f64"))}  # fmt: skip
    if p.chance(0.7):
        args["repeats"] = p.whole(1, 5)
        args["output_size"] = n * args["repeats"]
    draws = {"repeats": Ints(1, p.whole(3, 9))}
    return p.like({"*": shape, "R": n}, args, where=lambda c: ("repeats" in c.args) == ("repeats" in args), draw=draw, draws=draws,
                  out=True)  # fmt: skip


@task(
    difficulty=3,
    takes={"input": T("*"), "repeats": T("R", "i64", Ints(0, 4))},
    truth=Close(ulps=16),
    cost=Cost(
        flops="4 * numel(input)",
        # output_size tells the last count from the others.
        reads={
            "input": "numel(input) * nonzero(repeats) / max(1, numel(repeats))",
            "repeats": "max(0, numel(repeats) - 1)",
        },
        least="0",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="out is filled and returned and output_size is exercised; as published both were ignored. Tensors of "
    "counts, other axes and higher ranks are timed too.",
    cases=(
        _case((3,), 2, draw=Literal(1, 2, 3)),
        _case((2, 2), 2, 1, draw=Literal(1, 2, 3, 4)),
        _case((3,), 3, None, F64, draw=Literal(1, 2, 3)),
        _case((32, 128), 2, 1, F32),
        _case((64,), (64,), 0, F32, draw=Outlier()),
        _case((64, 130), 3, 0, draw=Outlier(scale=20)),
        _case((20, 33), 5),
        _case((20, 33), (660,)),
        _case((20, 33), (33,), -1),
        _case((300, 17), (300,), 0, F64),
        _case((5, 37, 6), (37,), 1, draw=Normal(mean=50, scale=20)),
        _case((5, 37, 6), 7, -2, {"output_size": 259}),
        # In many lines the largest value is not repeated, and so far above the others that their exponentials vanish beside it.
        _case((64, 40), (40,), 1, {"output_size": 60}, draw=Normal(scale=1000), draws=CYCLE),
        _case((40001,), 2, 0, draw=Normal(scale=3)),
        _case((3, 20011), (20011,), 1),
        _case((33, 65), 2, 0, layouts={"input": "transposed"}),
        _case((9, 20), 3, layouts={"input": "transposed"}),
        _case((7, 31), (31,), 1, layouts={"input": "strided", "repeats": "strided"}),
        _case((6, 77), 2, 1, out=True),
        _case((24,), (24,), 0, {"output_size": 36}, draws=CYCLE, out=True),
        _case((4, 5), 0, 1),
        _case((0, 5), 3, 1),
        _case((7, 5, 101), (101,), -1, held=True),
        _case((29, 6, 7), 4, 0, held=True),
    ),
    varied=(_small, _long, _columns, _long_lines, _long_columns, _almost_certain, _near_zero, _beyond_exp),
    timed=(
        *(_case((1 << k,), 2, 0) for k in (23, 26)), _case((16384, 4096), 2, 1),
        _case((8192, 4096), (8192,), 0, {"output_size": 12288}, draws=CYCLE),
    ),
    held_timed=(
        *(_case((n,), 2, 0) for n in (6_000_000, 50_000_000)), _case((12000, 3000), 2, 1),
        _case((6000, 3000), (6000,), 0, {"output_size": 9000}, draws=CYCLE),
    ),
)  # fmt: skip
def fused_repeat_interleave_log_softmax(input, repeats, dim=None, *, output_size=None, dtype=None, out=None):
    """log_softmax(torch.repeat_interleave(input, repeats, dim)) along the same axis, for an fp32 tensor of rank >= 1.

    Example: fused_repeat_interleave_log_softmax([1, 2], 2) = [-2.006409, -2.006409, -1.006409, -1.006409]
    Example: fused_repeat_interleave_log_softmax([[0, 1, 3], [2, 2, 2]], [2, 0, 1], 1) = [[-3.094924, -3.094924,
    -0.094924], [-1.098612, -1.098612, -1.098612]]

    dim may be negative; dim=None flattens input first, in row-major order, and works along the only axis. Along it,
    element i is repeated repeats times, for an int repeats >= 0, or repeats[i] times, for an int64 vector of counts
    >= 0 as long as the axis; copies of an element stand next to each other. With u the repeated values (an element that
    is repeated 0 times takes no part at all), the result is u - log(sum over the axis of exp(u)), which must not
    overflow for |u| up to 1e4. output_size is None (the default) or the length of the repeated axis, and spares reading
    the sum of the counts back to the host, which is allowed otherwise; it always agrees with repeats.

    dtype is None (the default: all is fp32), torch.float32 or torch.float64: the values are converted to it before the
    log_softmax, which is computed in it, and the result has it. The result is empty where nothing is repeated. out:
    None (the default: a new tensor), or a tensor of the result's shape and dtype with any strides and any contents,
    which is filled and returned. Inputs may have any strides or be empty and are not changed. Infinities and NaN are
    not tested.
    """
    u = torch.repeat_interleave(input, repeats, dim, output_size=output_size)
    y = F.log_softmax(u, 0 if dim is None else dim, dtype=dtype)
    return y if out is None else out.copy_(y)
