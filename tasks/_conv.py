"""Cases that the tasks with a 2-D convolution share."""

from __future__ import annotations

from typing import Any

from kbx_env.spec.task import Case, Outlier, T, Uniform

SMALL = {"N": 1, "C": 3, "D": 3, "H": 5, "W": 5, "O": 2, "R": 3, "S": 3}
IMAGE = {"N": 2, "C": 3, "D": 3, "H": 16, "W": 16, "O": 4, "R": 3, "S": 3}
ONE = Case(
    {"N": 1, "C": 3, "D": 3, "H": 3, "W": 3, "O": 1, "R": 3, "S": 3},
    draws={"input": Uniform(1, 2), "weight": Uniform(0.5, 1)},
)
"""One result."""
TAKES = {"input": T("N C H W"), "weight": T("O D R S"), "bias": T("O", optional=True)}
FLOPS = "2 * N * O * H * W * D * R * S"
"""An upper bound: the output is as large as the image only with padding and stride 1."""
LEAST = "2 * N * O * H * W * D"
"""One product for each result and channel: what is left of large tiles of Winograd's, with padding and stride 1 as timed."""
TF32 = (
    "IEEE fp32 products are demanded of candidate, reference and timed baseline alike; as published, the reference "
    "could silently be TF32 (its defect 6.2). "
)


def conv_reads(prefix: str = "", image: str = "input") -> dict[str, str]:
    """Elements of the image that windows touch: strides and dilations may leave some out.

    Args:
        prefix: of the names stride, padding and dilation.
        image: the image's parameter.
    """
    rows, columns = (
        f"touched({size}, {pick}({prefix}stride), {pick}({prefix}padding), {pick}({prefix}dilation))"
        for size, pick in (("H, R", "first"), ("W, S", "second"))
    )
    return {image: f"N * C * {rows} * {columns}"}


READS = conv_reads()


def conv_cases(
    *more: dict[str, Any], prefix: str = "", bias: str = "bias", names: tuple[str, str] = ("input", "weight"),
    out_step: int = 1, **fixed: Any,
) -> tuple[Case, ...]:  # fmt: skip
    """Cases that use every option of a convolution.

    Args:
        more: sets of further arguments (of the activation), which take turns; ``given``, ``out`` and ``axes`` are the case's.
        prefix: of the names stride, padding, dilation and groups.
        bias: name of the bias parameter.
        names: the image's and the weight's parameter.
        out_step: the numbers of output channels are multiples of this.
        fixed: fields of every case.
    """
    x, w = names
    rows: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        (SMALL, {}, {}),
        (SMALL, {"padding": 1}, {"given": (bias,)}),
        (SMALL, {"dilation": 2, "padding": 1}, {}),
        (IMAGE, {"stride": 2, "padding": 1}, {"given": (bias,), "draw": Outlier(scale=20)}),
        (IMAGE | {"C": 32, "D": 32, "H": 9, "W": 13, "O": 33}, {"padding": (1, 0), "stride": (1, 2)}, {}),
        (IMAGE | {"C": 6, "D": 2, "O": 9}, {"groups": 3, "padding": 1}, {"given": (bias,)}),
        (IMAGE | {"C": 4, "D": 1, "O": 4, "R": 5, "S": 1}, {"groups": 4, "dilation": (1, 2)}, {}),
        (
            IMAGE | {"C": 17, "D": 17, "R": 2, "S": 3},
            {},
            {"layouts": {x: "channels_last", w: "transposed", bias: "strided"}, "given": (bias,)},
        ),
        (IMAGE | {"C": 20, "D": 10, "H": 11, "W": 7, "O": 14}, {"groups": 2, "padding": 2}, {"held": True}),
    ]
    cases = []
    for k, (axes, args, case) in enumerate(rows):
        mine = dict(more[k % len(more)]) if more else {}
        axes = axes | mine.pop("axes", {})
        fields = dict(fixed) | case
        fields["given"] = (*fields.get("given", ()), *mine.pop("given", ()), *fixed.get("given", ()))
        fields["out"] = bool(mine.pop("out", False))
        sizes = axes | {
            "O": -(-axes["O"] // out_step) * out_step if args.get("groups", 1) == 1 else axes["O"] * out_step
        }
        cases.append(Case(sizes, {prefix + n: v for n, v in args.items()} | mine, **fields))
    return tuple(cases)


def conv_timed(
    prefix: str = "", given: tuple[str, ...] = ("bias",), axes: tuple[dict[str, Any], ...] = ({}, {}, {}),
    **args: Any,
) -> tuple[Case, ...]:  # fmt: skip
    """The first layer of a network, a middle one and a deep one."""
    sizes = ((16, 3, 224, 64), (32, 64, 56, 64), (32, 256, 16, 512))
    return tuple(
        Case({"N": n, "C": c, "D": c, "H": h, "W": h, "O": o, "R": 3, "S": 3} | more,
             {prefix + "padding": 1} | args, given=given)
        for (n, c, h, o), more in zip(sizes, axes, strict=True)
    )  # fmt: skip
