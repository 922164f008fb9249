"""Families of cases that many tasks share; a task adds what is its own."""

from __future__ import annotations

from typing import Any

from kbx_env.spec.task import Case, Choice, Distribution, Outlier

TIMED_POINTWISE = (23, 25, 27)
"""2**k elements. An H200 moves 2**23 fp32 values in and out in about 16 us, the shortest time worth measuring."""


def pointwise(
    name: str, draw: Distribution, *, special: Distribution | None = None, args: tuple[dict[str, Any], ...] = ({},),
    out: bool = False,
    tail: bool = True,
) -> tuple[Case, ...]:  # fmt: skip
    """Cases of a function of one tensor ``name`` with axes ``*``, elementwise.

    Args:
        name: the tensor.
        draw: the law that covers the function's domain.
        special: values worth a case of their own (edges of the domain, zeros, infinities).
        args: sets of arguments; each is used with large shapes, the layouts take turns.
        out: whether the signature has ``out``.
        tail: also draw normal values with outliers (the domain is the whole line).
    """

    def turn(k: int) -> dict[str, Any]:
        return args[k % len(args)]

    cases = [Case({"*": (129, 257)}, a, draw=draw) for a in args]
    cases += [Case({"*": (5,)}, turn(1), draw=draw), Case({"*": (3, 1, 1025)}, turn(0), draw=draw)]
    if tail:
        cases += [Case({"*": (128, 512)}, turn(1), draw=Outlier())]
    if special is not None:
        cases += [Case({"*": (3, 50)}, a, draw=special) for a in args]
    cases += [
        Case({"*": (33, 65)}, turn(0), draw=draw, layouts={name: "transposed"}),
        Case({"*": (7, 31)}, turn(1), draw=draw, layouts={name: "strided"}),
        Case({"*": ()}, turn(0), draw=draw),
        Case({"*": (0, 3)}, turn(1), draw=draw),
    ]
    if out:
        cases += [Case({"*": (6, 77)}, turn(0), draw=draw, out=True)]
    return (*cases, *(Case({"*": (3, 5, 211)}, a, draw=draw, held=True) for a in args[:2]))


def broadcast(
    a: str, b: str, draw: Distribution | None = None, *, args: tuple[dict[str, Any], ...] = ({},), out: bool = False,
    special: Distribution | None = None,
) -> tuple[Case, ...]:  # fmt: skip
    """Cases of an elementwise function of two tensors with axes ``*a`` and ``*b``, which broadcast.

    Arguments as for ``pointwise``; ``draw=None`` leaves the laws to the task's tensors.
    """
    law = {} if draw is None else {"draw": draw}

    def turn(k: int) -> dict[str, Any]:
        return args[k % len(args)]

    def case(x: tuple[int, ...], y: tuple[int, ...], k: int = 0, **more: Any) -> Case:
        return Case({"*a": x, "*b": y}, turn(k), **(law | more))

    cases = [case((129, 257), (129, 257), k) for k in range(len(args))]
    cases += [
        case((5,), (5,), 1),
        case((64, 130), (130,), 0),
        case((7, 1, 33), (5, 1), 1),
        case((1, 40), (3, 20, 1), 0),
        case((40, 51), (40, 51), 0, layouts={a: "transposed"}),
        case((9, 34), (9, 34), 1, layouts={a: "strided", b: "strided"}),
        case((31, 17), (31, 17), 0, layouts={b: "transposed"}),
        case((), (6, 7), 1),
        case((), (), 0),
        case((0, 3), (3,), 1),
    ]
    if special is not None:
        cases += [case((3, 50), (3, 50), k, draw=special) for k in range(len(args))]
    if out:
        cases += [case((6, 77), (77,), 0, out=True)]
    return (*cases, *(case((3, 5, 211), (5, 1), k, held=True) for k in range(min(2, len(args)))))


def stream(axis: str = "*", *more: str, args: dict[str, Any] | None = None, powers: tuple[int, ...] = TIMED_POINTWISE,
           **case: Any) -> tuple[Case, ...]:  # fmt: skip
    """Timed cases of an elementwise function: 1-D tensors of 2**k elements (all of the named axes alike)."""
    return tuple(Case({a: (1 << k,) for a in (axis, *more)}, args or {}, **case) for k in powers)


ZEROS = Choice(-0.0, 0.0, 1.0, -1.0, 6e-39, -6e-39, 1e-30, -1e-30)
"""Zeros of both signs and very small numbers."""
