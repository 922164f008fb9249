"""Families of derived cases that many tasks share (``kbx_env/spec/varied.py``); a task adds what is its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kbx_env.spec.task import Case, HalfNormal, Ints, Normal, Outlier, Uniform
from kbx_env.spec.varied import Family, Pick, flat, layout

Args = Callable[[Pick], Mapping[str, Any]] | None
"""Draws arguments that take the place of the declared ones."""
LONG = 4300
"""Length of an axis that no block of a kernel holds: kernels of whole rows stop at 4096 or before."""
WIDE = 1100
"""Length of an axis that needs a second block of a kernel for single elements."""
LARGE_BIAS = Outlier(p=0.3, scale=32)
"""Biases of a convolution's channels: some are larger than its sums."""
SMALL_BIAS = Normal(scale=2.0**-14, clamp=9e-5)
"""Biases below 0.0001."""
LONG_LINE = 1 << 15
"""Length of the lines of a large tensor that are reduced: a kernel that holds a line in one block still compiles."""
DEEP_SUM = 4096
"""Length of a product's inner axis at which a 16-bit accumulator loses more than the tolerance."""
GAPS = layout((0, 1), (1, 1), pad=1)
"""Of a matrix: lines with a gap of one element. The axes cannot be walked as one."""
UNIT_AXIS = layout((1, 0, 2, 3), (1, 1, 1, 1))
"""Contiguous if the second axis has length 1, but that axis has a stride of its own."""
LOWEST = Ints(-(2**63), -(2**63) + 5)
HIGHEST = Ints(2**63 - 6, 2**63 - 1)
"""int64 values next to the ends of their range: identities and fillers that are not exact show."""
ENDS = Ints(-(2**63), 2**63 - 1)
"""All 64 bits of int64."""


def _args(args: Args, pick: Pick) -> dict[str, Any]:
    return dict(args(pick)) if args is not None else {}


def _takes(*names: str) -> Callable[[Case], bool]:
    """Return the condition that a case passes tensors, not numbers, for these parameters."""
    return lambda case: not set(names) & set(case.args)


def either(*families: Family | tuple[Family, ...]) -> Family:
    """A case of one of several families, so that a grading has fewer cases."""
    each = flat(families)
    return lambda pick: pick.among(*each)(pick)


def elementwise(args: Args = None, *, out: bool = False, low: int = 4, high: int = 6, **fields: Any) -> Family:
    """A tensor of four to six axes in any memory layout; one of them is long and the others are short.

    Args:
        args: draws arguments.
        out: whether the signature has ``out``.
        low: least number of axes.
        high: largest number of axes.
        **fields: of the case.

    Returns:
        The family.
    """

    def family(pick: Pick) -> Case:
        shape = pick.slab(low, high, WIDE)[0]
        return pick.like({"*": shape}, _args(args, pick), **({"out": out} | fields))

    return family


def both_ways(
    *axes: str, args: Args = None, out: bool = False, tensors: tuple[str, ...] = (), low: int = 3, high: int = 5,
    **fields: Any,
) -> Family:  # fmt: skip
    """Tensors that broadcast against each other, each along an axis of another, with three to five axes.

    Args:
        *axes: names of their axes; two, ``*a`` and ``*b``, by default.
        args: draws arguments.
        out: whether the signature has ``out``.
        tensors: parameters that must be tensors, where declared cases may pass numbers.
        low: least number of axes.
        high: largest number of axes.
        **fields: of the case.

    Returns:
        The family.
    """
    names = axes or ("*a", "*b")

    def family(pick: Pick) -> Case:
        shapes = pick.both_ways(low, high, parts=len(names), longest=WIDE)
        return pick.like(
            dict(zip(names, shapes, strict=True)), _args(args, pick), where=_takes(*tensors),
            **({"out": out} | fields),
        )  # fmt: skip

    return family


def reduced(
    args: Args = None, *, out: bool = False, tuples: bool = False, none: bool = False, least: int = 1, dim: str = "dim",
    where: Callable[[Case], bool] | None = None, **fields: Any,
) -> Family:  # fmt: skip
    """A reduction of a tensor of five axes over any axes.

    Args:
        args: draws further arguments.
        out: whether the signature has ``out``.
        tuples: whether ``dim`` may be a tuple of axes, in any order.
        none: whether ``dim`` may be ``None``.
        least: least number of axes that are kept.
        dim: the parameter.
        where: condition on the declared case.
        **fields: of the case.

    Returns:
        The family.
    """

    def family(pick: Pick) -> Case:
        shape = tuple(max(n, 3) for n in pick.shape(5, 5, 700))
        over: Any = pick.axes(len(shape), 2, len(shape) - least) if tuples else pick.axis(len(shape))
        over = None if none and pick.chance(0.2) else over
        return pick.like(
            {"*": shape}, {dim: over} | _args(args, pick), where=where,
            **({"out": out} | fields),
        )  # fmt: skip

    return family


def long_axis(
    args: Args = None, *, out: bool = False, tuples: bool = False, dim: str = "dim", length: int = LONG,
    tensors: tuple[str, ...] = ("input",), lines: Mapping[str, Any] | None = MappingProxyType({}),
    where: Callable[[Case], bool] | None = None, **fields: Any,
) -> tuple[Family, ...]:  # fmt: skip
    """Reductions along a long axis, beside a long axis, of many long columns whose neighbours are adjacent in memory, of
    lines of 2**15 elements, and of a vector along its last axis, -1.

    Many kernels share a long line between programs only if the tensor is large: with these lines it has 2**19 elements
    and more. They join the parts in several programs if the kept axes are long, too. Columns are split earlier than rows, so
    that a few hundred elements to a column suffice.

    Args:
        args: draws further arguments.
        out: whether the signature has ``out``.
        tuples: whether ``dim`` may be a tuple.
        dim: the parameter.
        length: about the length of the single long axis.
        tensors: the parameters that are reduced.
        lines: fields of the case of these lines; ``None`` for no such case.
        where: condition on the declared case.
        **fields: of the case.

    Returns:
        The families.
    """

    def case(pick: Pick, shape: tuple[int, ...], over: int, **more: Any) -> Case:
        over = over - len(shape) if pick.chance() and over >= 0 else over
        return pick.like(
            {"*": shape}, {dim: (over,) if tuples and pick.chance() else over} | _args(args, pick), where=where,
            **({"out": out} | more | fields),
        )  # fmt: skip

    def along(pick: Pick) -> Case:
        return case(pick, *pick.slab(3, 5, length))

    def beside(pick: Pick) -> Case:
        shape, at = pick.slab(3, 5, length)
        over = pick.among(*(k for k in range(len(shape)) if k != at))
        return case(pick, tuple(pick.whole(2, 3) if k == over else n for k, n in enumerate(shape)), over)

    def columns(pick: Pick) -> Case:
        return case(pick, many_columns(pick), 0, layouts=adjacent(pick, 1, *tensors))

    def large(pick: Pick) -> Case:
        # Odd: blocks of lines are powers of two, and the last one is not full.
        return case(pick, (17, LONG_LINE + pick.whole(1, 900)), 1, **(lines or {}))

    def vector(pick: Pick) -> Case:
        return case(pick, (pick.whole(3, 60),), -1)

    def unit(pick: Pick) -> Case:
        return case(pick, (5, 1, 37, 4), 3, layouts=dict.fromkeys(tensors, UNIT_AXIS))

    return (along, beside, columns, unit, *(() if lines is None else (large,)), vector)


def long_slices(drawn: Callable[[Pick, tuple[int, ...], int, tuple[int, ...], int], Case]) -> tuple[Family, ...]:
    """Tensors ``*a N *b`` of which one axis is long: kernels need several blocks along the indexed axis, before it, or after it.

    Args:
        drawn: makes a case of the sizes ``*a``, N, ``*b`` and the number of indices.

    Returns:
        The families.
    """

    def family(axis: int) -> Family:
        def case(pick: Pick) -> Case:
            sizes = [pick.whole(2, 3) for _ in range(3)]
            sizes[axis] = 4300 + pick.whole(0, 90)
            return drawn(pick, (sizes[0],), sizes[1], (sizes[2],), pick.whole(2, 6))

        return case

    return tuple(map(family, range(3)))


def many_columns(pick: Pick) -> tuple[int, int]:
    """Return the shape of a matrix whose columns kernels split between programs, and join in several programs."""
    return pick.whole(260, 290), pick.whole(WIDE, WIDE + WIDE // 16)


def adjacent(pick: Pick, axis: int, *matrices: str, rank: int = 2) -> dict[str, str]:
    """Return layouts in which neighbours along an axis are adjacent in memory: kernels choose their path by that.

    Args:
        pick: makes the choices.
        axis: the axis.
        *matrices: the tensors; in half of the draws all have the same strides.
        rank: number of their axes.

    Returns:
        The layout of each tensor.
    """
    one = pick.adjacent(rank, axis) if pick.chance() else None
    return {name: one or pick.adjacent(rank, axis) for name in matrices}


Axes = Callable[[Pick], Mapping[str, Any]]
"""Draws sizes by axis name."""


def sized(make: Callable[[Pick, dict[str, Any]], Case], axes: tuple[Axes, ...]) -> tuple[Family, ...]:
    """Return a family for each way to draw the sizes.

    Args:
        make: returns a case of these sizes.
        axes: draw the sizes, such as ``longs``.

    Returns:
        The families.
    """

    def drawing(draw: Axes) -> Family:
        return lambda pick: make(pick, dict(draw(pick)))

    return tuple(map(drawing, axes))


def sizes(
    axes: Axes | tuple[Axes, ...], args: Callable[[Pick, Mapping[str, Any]], Mapping[str, Any]] | None = None,
    *, out: bool = False, where: Callable[[Case], bool] | None = None, **fields: Any,
) -> tuple[Family, ...]:  # fmt: skip
    """A declared case with other sizes.

    Args:
        axes: draws the sizes by axis name; several functions give several families.
        args: draws arguments, also from the sizes.
        out: whether the signature has ``out``.
        where: condition on the declared case.
        **fields: of the case; functions of the ``Pick`` and the sizes are called.

    Returns:
        The families, mostly one.
    """

    def make(pick: Pick, found: dict[str, Any]) -> Case:
        more = {k: v(pick, found) if callable(v) else v for k, v in fields.items()}
        return pick.like(
            found, dict(args(pick, found)) if args is not None else {}, where=where, **({"out": out} | more)
        )

    return sized(make, axes if isinstance(axes, tuple) else (axes,))


def longs(
    short: Mapping[str, tuple[int, int]], long: Mapping[str, int],
    more: Callable[[Pick, Mapping[str, int]], Mapping[str, Any]] | None = None, *, most: int = 400_000,
) -> tuple[Axes, ...]:  # fmt: skip
    """Return functions that draw sizes; in each, some axes are long, and every axis is long in one of them.

    A grading draws one case of each function, so that it always has a case with two blocks along each axis.

    Args:
        short: by axis, the range of its usual size.
        long: by axis, its size where it is a long one.
        more: draws further sizes from these.
        most: largest product of all sizes: a measure of a case's cost.

    Returns:
        Functions from ``Pick`` to the sizes by axis.
    """
    groups: list[list[str]] = []
    for name in sorted(long, key=lambda n: -long[n]):
        for group in groups:
            together = {*group, name}
            if math.prod(long[n] if n in together else sum(short[n]) // 2 for n in short) <= most:
                group.append(name)
                break
        else:
            groups.append([name])

    def drawing(group: list[str]) -> Axes:
        def axes(pick: Pick) -> dict[str, Any]:
            found: dict[str, Any] = {name: pick.whole(*ends) for name, ends in short.items()}
            found |= {name: pick.whole(long[name], long[name] + long[name] // 16) for name in group}
            return found | (dict(more(pick, found)) if more is not None else {})

        return axes

    return tuple(drawing(group) for group in groups)


def almost_certain(args: Args = None, **more: Any) -> tuple[Family, ...]:
    """Logits of rows B of two or three classes C, of which one is almost certain: some losses are near zero.

    Args:
        args: draws further arguments.
        **more: further axes.

    Returns:
        The families: one.
    """
    return sizes(
        lambda p: {"B": p.whole(50, 70), "C": p.whole(2, 3)} | more,
        lambda p, s: {"reduction": "none"} | _args(args, p),
        where=lambda c: "ignore_index" not in c.args and "target" not in c.draws, draw=Normal(scale=8),
    )  # fmt: skip


def class_weights(
    args: Callable[[Pick, Mapping[str, Any]], Mapping[str, Any]] | None = None, **more: Any
) -> tuple[Family, ...]:  # fmt: skip
    """Losses of rows B of classes C whose weights are all small, and whose weights are all large.

    Losses are not reduced: a mean is divided by the weights, so that it hides what they have in common.

    Args:
        args: draws further arguments, also from the sizes.
        **more: further axes.

    Returns:
        The families: two.
    """
    return flat(
        sizes(
            lambda p: {"B": p.whole(9, 20), "C": p.whole(3, 9)} | more,
            lambda p, s: {"reduction": "none"} | (dict(args(p, s)) if args is not None else {}),
            where=lambda c: "ignore_index" not in c.args and not {"target", "targets"} & set(c.draws), full=True,
            draw=Normal(), draws={"weight": weights},
        )
        for weights in (SMALL_POSITIVE, LARGE_POSITIVE)
    )  # fmt: skip


NEAR_ZERO = Outlier(p=0.5, scale=2.0**-14)
"""Numbers of order one, half of which are smaller by 2**-14: around 0.00006."""
TINY = Normal(scale=2.0**-16, clamp=9e-5)
"""Numbers around 0.000015, of which none is above 0.0001: a kernel that takes small numbers for zero sees zeros alone."""
SMALL_POSITIVE = Uniform(1e-5, 9e-5)
"""Positive numbers below 0.0001."""
LARGE = Normal(scale=64)
"""Numbers that a bound of 16 changes in most places."""
LARGE_POSITIVE = Uniform(20, 60)
"""Positive numbers above 16."""
SHARE = Normal(scale=2.0**-6)
"""Numbers whose products with ``LARGE`` ones are of order one."""
BOTH_ENDS = Outlier(p=0.5, scale=2.0**-19, base=24)
"""Numbers of order 24, half of which are smaller by 2**-19: around 0.00005."""


def near_zero(args: Callable[[Pick, Mapping[str, Any]], Mapping[str, Any]] | None = None, **more: Any) -> tuple[Family, ...]:
    """Logits of rows B of two or three classes C, of which half are near zero: what is taken for zero shows in the losses.

    Args:
        args: draws further arguments, also from the sizes.
        **more: further axes.

    Returns:
        The families: one.
    """
    return sizes(
        lambda p: {"B": p.whole(50, 70), "C": p.whole(2, 3)} | more,
        lambda p, s: {"reduction": "none"} | (dict(args(p, s)) if args is not None else {}),
        where=lambda c: "ignore_index" not in c.args and not {"target", "targets"} & set(c.draws), draw=NEAR_ZERO,
    )  # fmt: skip


SMALL_STATISTICS = {
    "running_mean": Normal(scale=2.0**-15), "running_var": HalfNormal(2.0**-16, 2.0**-15), "weight": NEAR_ZERO, "bias": NEAR_ZERO,
}  # fmt: skip
"""Of a batch normalisation whose input is about as small as the standard deviations."""
LARGE_STATISTICS = {
    "running_mean": LARGE, "running_var": HalfNormal(20, 8000), "weight": Normal(scale=24), "bias": Normal(scale=24),
}  # fmt: skip
"""Of one whose input is large."""


def statistics() -> tuple[Family, ...]:
    """Batch normalisations outside of training whose input and running statistics are small, or large.

    A kernel that takes small numbers for zero is wrong in every channel of the first case: the running means are a share of
    the standard deviations. Half of the weights and biases are near zero there.

    Returns:
        The families: two.
    """
    return flat(
        sizes(
            lambda p: {"N": p.whole(2, 5), "C": p.whole(20, 30), "*": p.shape(1, 3, 20)},
            lambda p, s: {"training": False, "momentum": p.real(0, 1), "eps": p.among(1e-5, 2e-5, 3e-5)}, where=plain, full=True,
            draw=draw, draws=draws,
        )
        for draw, draws in ((Normal(scale=2.0**-9), SMALL_STATISTICS), (LARGE, LARGE_STATISTICS))
    )  # fmt: skip


WHOLE_CHUNKS = 8 * 4096
"""Elements of whole chunks: kernels take long means in chunks of up to 4096 elements."""


def moments() -> tuple[Family, ...]:
    """Batch normalisations in training of channels with two elements, and of channels with many.

    Of two elements the variance of a sample is twice the mean square. The last chunk of a channel with many elements has an
    odd number above 2048, which is not exact in fp16.

    Returns:
        The families: two.
    """
    args = {"training": True, "momentum": 0.5, "eps": 0.1}
    return (
        *sizes(lambda p: {"N": 2, "C": p.whole(2, 6), "*": p.among((), (1,), (1, 1))}, lambda p, s: args, where=plain),
        *sizes(lambda p: {"N": 1, "C": 16, "*": (WHOLE_CHUNKS + 1 + 2 * p.whole(1100, 2000),)}, lambda p, s: args, where=plain,
               draw=Normal(mean=100, scale=3)),
    )


def large_conv_result(args: Args = None, **fields: Any) -> tuple[Family, ...]:
    """A convolution of 1 x 1 whose result has 2**17 elements; means over its 6,237 pixels are taken in chunks.

    A chunk has up to 4096 pixels, so that the last one has an odd number above 2048, which is not exact in fp16.

    Args:
        args: draws further arguments.
        **fields: of the case.

    Returns:
        The families: one.
    """
    options = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    usual: dict[str, Any] = {"draw": Normal(), "draws": {"input": Normal(mean=30, scale=3), "weight": Uniform(0.5, 1.5)}}
    return sizes(
        lambda p: {"N": 1, "C": 1, "D": 1, "H": 77, "W": 81, "O": 22, "R": 1, "S": 1}, lambda p, s: options | _args(args, p),
        **(usual | fields),
    )  # fmt: skip


def plain(case: Case) -> bool:
    """Return whether a case has the declared dtypes."""
    return not case.dtypes


def half(case: Case) -> bool:
    """Return whether a case has 16-bit inputs."""
    return "f16" in case.dtypes.values()


def pooled(
    make: Callable[[Pick, dict[str, Any]], Case], *, low: int = 1, high: int = 20, long: int = 300
) -> tuple[Family, ...]:  # fmt: skip
    """Pictures of any size, with a long height, and with a long width.

    Args:
        make: returns a case of these sizes, ``H`` and ``W``.
        low: least size of a short side.
        high: largest size of a short side.
        long: about the size of a long side.

    Returns:
        The families.
    """
    ends, few = (low, high), (low, low + 3)
    return (
        *sized(make, (lambda p: {"H": p.whole(*ends), "W": p.whole(*ends)},)),
        *sized(make, longs({"H": few, "W": few}, {"H": long, "W": long}, most=9000)),
    )


def adaptive(make: Callable[[Pick, dict[str, Any], Any], Case]) -> tuple[Family, ...]:
    """Adaptive pooling of the images of ``pooled``, of a long side into few bins and into many.

    Args:
        make: returns a case of these sizes and this ``output_size``.

    Returns:
        The families.
    """
    few = pooled(lambda pick, sizes: make(pick, sizes, bins(pick, sizes["H"], sizes["W"])))
    many = pooled(lambda pick, sizes: make(pick, sizes, bins(pick, sizes["H"], sizes["W"], many=True)))
    return *few, *many[1:]


def bins(pick: Pick, height: int, width: int, many: bool = False) -> Any:
    """Return an ``output_size`` of adaptive pooling: few bins, also more than pixels of a short side, or None.

    Args:
        pick: makes the choices.
        height: of the image.
        width: of the image.
        many: more bins of a long side than a block of a kernel holds.

    Returns:
        An integer or a pair.
    """
    if max(height, width) <= 200 and pick.chance(0.35):
        return pick.among(4, 6, 8, 9)
    few = [pick.among(None, pick.whole(1, 2 * min(n, 20))) for n in (height, width)]
    if not many:  # not None, which is as many bins as pixels
        return tuple(pick.whole(1, 40) if n > 200 else k for n, k in zip((height, width), few))
    return tuple(pick.whole(260, 290) if n > 200 else k for n, k in zip((height, width), few))


def small_steps(case: Case) -> bool:
    """Return whether an optimizer's step is below 0.1.

    A step of 1.0 after large gradients shows whether 1 - beta2 is an fp32 number, which kernels may take it for.
    """
    return bool(case.args.get("lr", 0.001) < 0.1)


# --- products -----------------------------------------------------------------------------------------


def balanced(pick: Pick, large: str, small: str, scale: float = 1.0) -> dict[str, Normal]:
    """Return distributions of two factors, large numbers and small ones, whose products are as large as ever.

    A power of two moves from one factor to the other, so that no rounding changes.

    Args:
        pick: makes the choices.
        large: the factor of large numbers.
        small: the other.
        scale: standard deviation of both without this.

    Returns:
        Distributions by tensor.
    """
    shift = 2.0 ** pick.among(6, 7)  # with factors of standard deviation 0.2, as in long sums, a fifth is above 16
    return {large: Normal(scale=scale * shift), small: Normal(scale=scale / shift)}


def linear(
    args: Args = None, *, halves: bool = False, out: bool = False, for_bias: Args = None
) -> tuple[Family, ...]:  # fmt: skip
    """Linear layers that need two blocks along each axis, also of one or two rows, with a large weight, and in fp16 with a
    long inner axis.

    In two cases more the biases are above 16, where the products cancel most of them so that results of order ten saturate few
    activations, and the biases are small.

    Args:
        args: draws further arguments.
        halves: whether fp16 inputs are allowed.
        out: whether the signature has ``out``.
        for_bias: draws the arguments of the case of large biases, where others would hide them.

    Returns:
        The families.
    """

    def one(pick: Pick) -> Case:
        axes = {"B": pick.whole(130, 150), "K": pick.whole(560, 640), "O": pick.whole(130, 150)}
        scale = round(axes["K"] ** -0.25, 3)
        return pick.like(
            axes, _args(args, pick), where=lambda c: not c.dtypes, draw=Normal(scale=scale),
            draws=balanced(pick, "input", "weight", scale), full=pick.chance(0.8), out=out,
        )  # fmt: skip

    def deep(pick: Pick) -> Case:
        axes = {"B": pick.among(1, 2, pick.whole(3, 12)), "K": DEEP_SUM + pick.whole(0, 200), "O": pick.whole(2, 12)}
        scale = round(axes["K"] ** -0.25, 3)
        return pick.like(axes, _args(args, pick), where=half, draw=Normal(scale=scale), out=out)

    def vector(pick: Pick) -> Case:
        axes = few_rows(pick, "B", "K", "O")
        scale = round(axes["K"] ** -0.25, 3)
        return pick.like(
            axes, _args(args, pick) | _args(for_bias, pick), draw=Normal(scale=scale),
            draws=balanced(pick, "weight", "input", scale), full=True, out=out, layouts=adjacent(pick, 1, "weight"),
        )  # fmt: skip

    def large_weight(pick: Pick) -> Case:
        axes = large_factor(pick, "B", "K", "O")
        scale = round(axes["K"] ** -0.25, 3)
        return pick.like(axes, _args(args, pick), where=plain, full=pick.chance(0.8), draw=Normal(scale=scale), out=out)

    def biased(pick: Pick) -> Case:
        axes = {"B": pick.whole(3, 9), "K": pick.whole(1, 3), "O": pick.whole(9, 20)}
        draws = {"input": Uniform(0.9, 1.1), "weight": Uniform(-30 / axes["K"], -20 / axes["K"]), "bias": Uniform(20, 30)}
        return pick.like(axes, _args(args, pick) | _args(for_bias, pick), where=plain, full=True, draws=draws, out=out)

    def slight(pick: Pick) -> Case:
        # Many rows: kernels walk the tiles in groups of rows, of which the last one is not full. And 2**17 results of one
        # product each: a kernel without masks along the inner axis shows.
        axes = {"B": pick.whole(260, 280), "K": 1, "O": pick.whole(514, 530)}
        # Products of order one: contracts write exp(z) - 1, which is inexact for a tiny z.
        draws = {"input": Normal(), "weight": Normal(scale=0.5), "bias": SMALL_BIAS}
        return pick.like(axes, _args(args, pick) | _args(for_bias, pick), where=plain, full=True, draws=draws, out=out)

    return (one, vector, large_weight, biased, slight, *((deep,) if halves else ()))


def few_rows(pick: Pick, rows: str, inner: str, columns: str) -> dict[str, int]:
    """Return sizes of a product for which kernels multiply vectors: one or two rows, a long inner axis, an odd number of columns.

    Such kernels are chosen where the inner axis of the right factor is adjacent in memory (``adjacent``), too.

    Args:
        pick: makes the choices.
        rows: name of the rows' axis.
        inner: name of the inner axis.
        columns: name of the columns' axis.

    Returns:
        Sizes by axis name.
    """
    return {rows: 2, inner: pick.whole(WIDE, WIDE + WIDE // 16), columns: pick.whole(70, 90) | 1}


def large_factor(pick: Pick, rows: str, inner: str, columns: str) -> dict[str, int]:
    """Return sizes of a product whose right factor has about 2**19 elements, none of them a multiple of a block.

    The inner axis has whole blocks and one element more. Kernels take another path for large tensors, such as one without
    masks. Few rows keep the case cheap.

    Args:
        pick: makes the choices.
        rows: name of the rows' axis.
        inner: name of the inner axis.
        columns: name of the columns' axis.

    Returns:
        Sizes by axis name.
    """
    return {rows: pick.whole(3, 9), inner: 128 * pick.whole(8, 9) + 1, columns: pick.whole(480, 500) | 1}


def bmm_rms_norm(**laws: Any) -> tuple[Family, ...]:
    """Batched products with a norm over all of the last axis, which is long in one case, and without dropout.

    Args:
        **laws: distributions of further tensors where one of the factors is large.

    Returns:
        The families.
    """

    def args(pick: Pick, found: Mapping[str, Any]) -> dict[str, Any]:
        shape = found["P"]
        return {
            "training": False, "dropout_p": pick.real(0, 1), "normalized_shape": pick.among(shape, (shape,), [shape]),
            "eps": pick.real(0, 2),
        }  # fmt: skip

    axes = {"B": (2, 4), "N": (2, 16), "M": (2, 30), "P": (2, 16)}
    return (
        *sizes(longs(axes, {"N": 140, "M": 560, "P": 1050}, most=3_000_000), args, out=True, draw=Normal()),
        # 2**17 results of one product each: a kernel without masks along the inner axis shows.
        *sizes(lambda p: {"B": 1, "N": p.whole(126, 135), "M": 1, "P": p.whole(1050, 1100)}, args, out=True, draw=Normal()),
        *vector_bmm("input2", args, draw=Normal()),
        *large_bmm(args, draw=Normal()),
        *flat(
            sizes(lambda p: {n: p.whole(2, 9) for n in axes}, args, draw=Normal(), draws={large: LARGE, small: SHARE} | laws)
            for large, small in (("input1", "input2"), ("input2", "input1"))
        ),
    )


def vector_bmm(
    right: str, args: Callable[[Pick, Mapping[str, Any]], Mapping[str, Any]] | None = None, **fields: Any
) -> tuple[Family, ...]:  # fmt: skip
    """A batch of one and a batch of two products (B, N, M) x (B, M, P) with few rows (``few_rows``).

    Args:
        right: the right factor.
        args: draws arguments, also from the sizes.
        **fields: of the case.

    Returns:
        The families: two.
    """
    return sizes(
        (lambda p: {"B": 1} | few_rows(p, "N", "M", "P"), lambda p: {"B": 2} | few_rows(p, "N", "M", "P")), args, out=True,
        **({"layouts": lambda p, s: adjacent(p, 1, right, rank=3)} | fields),
    )  # fmt: skip


def large_bmm(
    args: Callable[[Pick, Mapping[str, Any]], Mapping[str, Any]] | None = None, **fields: Any
) -> tuple[Family, ...]:  # fmt: skip
    """A batch of one product (1, N, M) x (1, M, P) with a large right factor (``large_factor``).

    Args:
        args: draws arguments, also from the sizes.
        **fields: of the case.

    Returns:
        The families: one.
    """
    return sizes(lambda p: {"B": 1} | large_factor(p, "N", "M", "P"), args, **fields)


def matmul(dtypes: tuple[Mapping[str, str], ...] = ({},), right: str = "other") -> tuple[Family, ...]:
    """Products whose batch axes broadcast both ways, with a long inner axis, with few rows, with long outer axes, with a
    large right factor, and of large numbers and numbers near zero.

    Args:
        dtypes: sets of dtypes by tensor, of which each case has one.
        right: the right factor.

    Returns:
        The families.
    """
    left = {"tensor2": "tensor1"}.get(right, "input")

    def batched(pick: Pick) -> Case:
        m, k, n = pick.whole(2, 20), pick.whole(2, 40), pick.whole(2, 20)
        a, b = pick.both_ways(2, 3, 12)
        axes = {"*a": (*a, m, k), "*b": (*b, k, n), "N": n}
        return pick.like(axes, draw=Normal(), draws=balanced(pick, right, left), dtypes=pick.among(*dtypes))

    def long(pick: Pick) -> Case:
        # Few rows: kernels for products of a matrix and a vector.
        m, k, n = pick.among(1, 2, pick.whole(3, 12)), DEEP_SUM + pick.whole(0, 200), pick.whole(2, 12)
        return pick.like({"*a": (m, k), "*b": (k, n), "N": n}, draw=Normal(), draws={}, dtypes=dtypes[-1])

    def vector(pick: Pick) -> Case:
        m, k, n = few_rows(pick, "m", "k", "n").values()
        return pick.like(
            {"*a": (m, k), "*b": (k, n), "N": n}, draw=Normal(), draws={}, dtypes=pick.among(*dtypes),
            layouts=adjacent(pick, 0, right),
        )  # fmt: skip

    def vectors(pick: Pick) -> Case:
        m, k, n = few_rows(pick, "m", "k", "n").values()
        return pick.like(
            {"*a": (2, m, k), "*b": (2, k, n), "N": n}, draw=Normal(), draws={}, dtypes=pick.among(*dtypes),
            layouts=adjacent(pick, 1, right, rank=3),
        )  # fmt: skip

    def wide(pick: Pick) -> Case:
        # 2**17 results of one product each: a kernel without masks along the inner axis shows.
        m, k, n = pick.whole(364, 372), 1, pick.whole(364, 372)
        draws = balanced(pick, left, right)
        return pick.like({"*a": (m, k), "*b": (k, n), "N": n}, draw=Normal(), draws=draws, dtypes=pick.among(*dtypes))

    def large_right(pick: Pick) -> Case:
        m, k, n = large_factor(pick, "m", "k", "n").values()
        return pick.like({"*a": (m, k), "*b": (k, n), "N": n}, draw=Normal(), draws={}, dtypes=pick.among(*dtypes))

    def scaled(pick: Pick, large: str, small: str) -> Case:
        m, k, n = pick.whole(3, 9), pick.whole(4, 8), pick.whole(3, 9)
        draws = {large: LARGE, small: TINY}
        return pick.like({"*a": (m, k), "*b": (k, n), "N": n}, draws=draws, dtypes=pick.among(*dtypes))

    scales = (lambda pick: scaled(pick, left, right), lambda pick: scaled(pick, right, left))
    return batched, long, vector, vectors, wide, large_right, *scales


# --- convolutions -------------------------------------------------------------------------------------


LONG_CONV: tuple[dict[str, int], ...] = ({"C": 130}, {"O": 130, "P": 140}, {"N": 20, "Q": 140})
"""Long axes of the derived cases of a convolution: each case has few elements, and together all axes are long once."""
LARGE_IMAGE = {"N": 1, "C": 33, "D": 33, "H": 65, "W": 65, "R": 3, "S": 3, "P": 9, "Q": 9}
"""An image of 2**17 elements, of which few windows are taken: kernels take another path for large tensors. The windows reach
beyond all sides."""
LARGE_FLAT_IMAGE = {"N": 1, "C": 5, "D": 5, "H": 166, "W": 166, "R": 3, "S": 3, "P": 12, "Q": 12}
"""The same of five channels: kernels take another path for short sums."""
LARGE_GREY_IMAGE = {"N": 1, "C": 1, "D": 1, "H": 365, "W": 365, "R": 7, "S": 7, "P": 25, "Q": 25}
"""The same of one channel, where blocks of channels are never full; windows are too large for a path of short sums."""


def conv_sizes(
    pick: Pick, long: Mapping[str, int], *, prefix: str = "", out_step: int = 1, least: int = 2, groups: bool = True
) -> tuple[dict[str, int], dict[str, Any]]:  # fmt: skip
    """Return sizes and options of a small convolution of which some axes are long.

    Args:
        pick: makes the choices.
        long: by axis, about its size: one of ``LONG_CONV``. ``C`` are the channels of a group.
        prefix: of the names stride, padding, dilation and groups.
        out_step: the number of output channels is a multiple of this.
        least: least height and width of the result.
        groups: whether the signature has ``groups`` and ``dilation``.

    Returns:
        Sizes by axis name, with ``P`` and ``Q`` the height and width of the result; arguments by name.
    """

    def size(name: str, low: int, high: int) -> int:
        return pick.whole(long[name], long[name] + long[name] // 16) if name in long else pick.whole(low, high)

    g = pick.among(5, 6, 7) if "C" in long else pick.among(1, 2, 3)
    g = g if groups else 1
    few = "C" in long  # many channels: small pictures
    r, s = pick.whole(1, 3 if few else 4), pick.whole(1, 3 if few else 4)
    stride, dilation = (pick.whole(1, 2 if few else 3), pick.whole(1, 2 if few else 3)), (1, 1)
    if groups:
        dilation = (pick.whole(1, 2), pick.whole(1, 3))
    if "Q" in long:  # many images: small ones
        stride = (pick.whole(1, 2), 1)
    paddings = [pick.whole(0, 2), pick.whole(0, 2)]
    if "O" in long and r * s == 1:
        s = 2  # a norm of the channels takes the size of a single weight away
    # Not a large tensor by chance, for which kernels are compiled once more.
    n = size("N", 1, 1 if "O" in long else 2)
    c, rows, columns = size("C", 1, 3), size("P", least, least + 2), size("Q", least, least + 2)
    # The long axis of output channels is shared by the groups.
    o = out_step * max(1, -(-size("O", 1, 2) // (out_step * (g if "O" in long else 1))))

    def extent(result: int, k: int, i: int) -> int:
        """Return the size of the image for a size of the result, plus what stride leaves unread."""
        reach = (result - 1) * stride[i] + dilation[i] * (k - 1) + 1 - 2 * paddings[i]
        return max(1, reach + pick.whole(0, stride[i] - 1))

    def read(result: int, k: int, i: int) -> bool:
        """Return whether a window reads a pixel, and not padding alone."""
        at = (j * stride[i] + t * dilation[i] - paddings[i] for j in range(result) for t in range(k))
        return any(0 <= x < image[i] for x in at)

    image = [extent(rows, r, 0), extent(columns, s, 1)]
    for i, (result, k) in enumerate(((rows, r), (columns, s))):
        if not read(result, k, i):
            paddings[i] = 0
            image[i] = extent(result, k, i)
    (h, w), padding = image, tuple(paddings)
    p, q = (
        (size + 2 * padding[i] - dilation[i] * (k - 1) - 1) // stride[i] + 1
        for i, (size, k) in enumerate(((h, r), (w, s)))
    )
    axes = {"N": n, "C": c * g, "D": c, "H": h, "W": w, "O": o * g, "R": r, "S": s, "P": p, "Q": q}
    args: dict[str, Any] = {prefix + "stride": stride, prefix + "padding": padding}
    if groups:
        args |= {prefix + "dilation": dilation, prefix + "groups": g}
    return axes, args


def images_first(pick: Pick, image: str) -> dict[str, str]:
    """Return a layout of images, one after the other in memory: what is behind the last one is out of bounds.

    Args:
        pick: makes the choices.
        image: the parameter of the images.
    """
    order = (0, *pick.shuffled((1, 2, 3)))
    return {image: layout(order, (1, 1, 1, 1), pick.among(0, 1, 5), pick.among(0, 1))}


def convs(
    args: Args = None, *, image: str = "input", weight: str = "weight", prefix: str = "", out: bool = False,
    out_step: Callable[[Pick], int] = lambda pick: 1, groups: bool = True, least: int = 2,
    long: tuple[dict[str, int], ...] = LONG_CONV, small: float = 2.0**-12, added: tuple[str, ...] = (),
    more: Callable[[Pick, Mapping[str, int]], Mapping[str, Any]] | None = None,
    where: Callable[[Case], bool] | None = None, **fields: Any,
) -> tuple[Family, ...]:  # fmt: skip
    """Convolutions with pairs for all options, groups, any layouts, long axes (``LONG_CONV``), and large and small factors,
    and three of a large image (``LARGE_IMAGE``, ``LARGE_FLAT_IMAGE``, ``LARGE_GREY_IMAGE``).

    In the case of many images pixels and biases are small, so that biases near zero show.

    Args:
        args: draws further arguments.
        image: the parameter of the images.
        weight: the parameter of the weights.
        prefix: of the names stride, padding, dilation and groups.
        out: whether the signature has ``out``.
        out_step: draws a number of which the number of output channels is a multiple; ``more`` gets it as ``step``.
        groups: whether the signature has ``groups`` and ``dilation``.
        least: least height and width of the result.
        long: the long axes of each case, or all sizes of its image (``LARGE_IMAGE``).
        small: standard deviation of the pixels in the case of many images.
        added: tensors that are added to the result, which are large and small where the biases are.
        more: draws further axes and arguments (``axes``, ``args``) from the sizes.
        where: condition on the declared case.
        **fields: of the case.

    Returns:
        The families.
    """

    def drawing(axis: Mapping[str, int]) -> Family:
        def family(pick: Pick) -> Case:
            step = out_step(pick)
            if "H" in axis:
                axes = {**axis, "O": 3 * step}
                options = {prefix + "stride": (axis["H"] + 2 - axis["R"]) // (axis["P"] - 1), prefix + "padding": 1}
                options |= {prefix + "dilation": 1, prefix + "groups": 1} if groups else {}
            else:
                axes, options = conv_sizes(pick, axis, prefix=prefix, out_step=step, groups=groups, least=least)
            extra = dict(more(pick, axes | {"step": step})) if more is not None else {}
            kept = {k: v for k, v in axes.items() if k not in ("P", "Q")}
            factors = (weight, image) if "O" in axis else (image, weight)
            draws = balanced(pick, *factors) if "draw" not in fields else {}
            draws = {image: Normal(scale=small)} if "N" in axis and draws else draws
            usual: dict[str, Any] = {"out": out, "draw": Normal(), "draws": draws, "full": "C" not in axis or pick.chance()}
            usual |= {"layouts": images_first(pick, image)} if "H" in axis else {}
            case = pick.like(
                kept | extra.get("axes", {}), options | _args(args, pick) | extra.get("args", {}), where=where,
                **(usual | fields),
            )  # fmt: skip
            biases = [name for name in case.given if name.endswith("bias")]
            law = None if "draws" in fields else LARGE_BIAS if "O" in axis else SMALL_BIAS if "N" in axis else None
            laws: dict[str, Any] = dict.fromkeys(biases, law) | dict.fromkeys(added, LARGE_POSITIVE if law is LARGE_BIAS else law)
            return replace(case, draws={**case.draws, **(laws if law is not None else {})})

        return family

    large = (LARGE_IMAGE, LARGE_FLAT_IMAGE, LARGE_GREY_IMAGE)
    return tuple(map(drawing, (*long, *large) if long is LONG_CONV else long))


# --- matrices -----------------------------------------------------------------------------------------


def batches(
    batch: str = "*batch", *, n: tuple[int, int] = (1, 12), large: tuple[int, int] = (65, 90), args: Args = None,
    more: Mapping[str, tuple[int, int]] | None = None, out: bool = False, where: Callable[[Case], bool] | None = None,
    fields: Callable[[int], Mapping[str, Any]] | None = None, side: str = "n",
) -> tuple[Family, ...]:  # fmt: skip
    """Small matrices with two or three batch axes, and one large matrix.

    Args:
        batch: name of the batch axes.
        n: range of the size of small matrices.
        large: range of the size of the large matrix.
        args: draws arguments.
        more: ranges of further axes.
        out: whether the signature has ``out``.
        where: condition on the declared case.
        fields: fields of the case from the matrix size.
        side: name of the axis that is the matrix size.

    Returns:
        The families.
    """

    def large_enough(case: Case) -> bool:
        # A declared matrix of one element may have any distribution.
        return case.axes[side] > 1 and (where is None or where(case))

    def draw(pick: Pick, size: int, shape: tuple[int, ...]) -> Case:
        extra = {name: pick.whole(*ends) for name, ends in (more or {}).items()}
        return pick.like(
            {batch: shape, side: size} | extra, _args(args, pick), where=large_enough,
            **({"out": out} | dict(fields(size) if fields is not None else {})),
        )  # fmt: skip

    def small(pick: Pick) -> Case:
        return draw(pick, pick.whole(*n), pick.batch())

    def one(pick: Pick) -> Case:
        return draw(pick, pick.whole(*large), ())

    return small, one


def unit_determinant(n: int) -> Normal:
    """Return the distribution of independent elements with which n x n matrices have determinants around 1.

    The expectation of the squared determinant is n! times the variance to the power n.
    """
    return Normal(scale=round(math.exp(-math.lgamma(n + 1) / (2 * n)), 4))
