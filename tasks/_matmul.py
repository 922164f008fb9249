"""Cases of products with torch.matmul's shapes."""

from __future__ import annotations

from typing import Any

from kbx_env.spec.task import Case, Eye, Normal, Outlier


def _case(left: tuple[int, ...], right: tuple[int, ...], **more: Any) -> Case:
    # N belongs to no tensor on its own; the count of operations needs it.
    return Case({"*a": left, "*b": right, "N": right[-1] if len(right) > 1 else 1}, **more)


def matmul_cases(a: str, b: str) -> tuple[Case, ...]:
    """1-D, 2-D, batched and broadcast operands ``a`` (axes ``*a``) and ``b`` (axes ``*b``)."""
    return (
        _case((64, 128), (128, 256)),
        _case((4, 64, 128), (4, 128, 64)),
        _case((128,), (128, 96)),
        _case((96, 128), (128,)),
        _case((1100,), (1100,)),
        _case((40,), (3, 40, 24)),
        _case((128, 512), (512, 128)),
        _case((64, 128), (128, 64), draw=Normal(clamp=5)),
        _case((4, 33, 65), (4, 65, 17), draw=Outlier(clamp=5)),
        _case((37, 53), (53, 71)),
        _case((2, 3, 16, 40), (3, 40, 24)),
        _case((48, 64), (64, 40), layouts={a: "transposed", b: "transposed"}),
        _case((40, 40), (40, 40), draws={b: Eye()}),
        _case((1, 1), (1, 1)),
        # Many rows: kernels walk the tiles in groups of rows, of which the last one is not full.
        _case((270, 3), (3, 40)),
        _case((0, 8), (8, 4)),
        _case((3, 5, 20), (20, 9), layouts={a: "strided", b: "transposed"}),
        _case((5, 29, 130), (130, 67), held=True),
    )


def square(*sizes: int, **more: Any) -> tuple[Case, ...]:
    """Timed square products."""
    return tuple(_case((n, n), (n, n), **more) for n in sizes)
