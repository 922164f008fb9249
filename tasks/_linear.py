"""Cases that the tasks with a linear layer (input @ weight^T + bias) share."""

from __future__ import annotations

from typing import Any

from kbx_env.spec.task import Case, Normal, Outlier, T

TAKES = {"input": T("B K"), "weight": T("O K"), "bias": T("O", optional=True)}
FLOPS = "2 * B * K * O"
HALF = {"input": "f16", "weight": "f16", "bias": "f16"}
GIVEN = ("bias",)


def linear_cases(*more: dict[str, Any], half: bool = False, scale: float = 0.3, **fixed: Any) -> tuple[Case, ...]:
    """Linear layers of odd sizes, strided, empty, with and without bias.

    Args:
        more: sets of further arguments, which take turns; ``given`` and ``out`` are the case's.
        half: also fp16.
        scale: of the inputs and weights, so that activations do not saturate everywhere.
        fixed: fields of every case.
    """
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"B": 3, "K": 4, "O": 5}, {}),
        ({"B": 2, "K": 2, "O": 2}, {"given": GIVEN}),
        ({"B": 64, "K": 100, "O": 96}, {"given": GIVEN}),
        ({"B": 33, "K": 257, "O": 70}, {"given": GIVEN, "draw": Outlier(scale=3)}),
        ({"B": 48, "K": 64, "O": 40}, {"layouts": {"input": "transposed", "weight": "transposed"}}),
        ({"B": 17, "K": 31, "O": 29}, {"given": GIVEN, "layouts": {"input": "strided", "bias": "strided"}}),
        ({"B": 1, "K": 130, "O": 200}, {"given": GIVEN}),
        ({"B": 0, "K": 5, "O": 7}, {}),
        ({"B": 29, "K": 140, "O": 83}, {"given": GIVEN, "held": True}),
    ]
    cases = []
    for k, (axes, case) in enumerate(rows):
        mine = dict(more[k % len(more)]) if more else {}
        fields = {"draw": Normal(scale=scale)} | dict(fixed) | case
        fields["given"] = (*fields.get("given", ()), *mine.pop("given", ()))
        fields["out"] = bool(mine.pop("out", False))
        cases.append(Case(axes, mine, **fields))
    # Two rows, for which kernels multiply vectors, with a long inner axis.
    first = {k: v for k, v in (more[0] if more else {}).items() if k not in ("given", "out")}
    cases.append(Case({"B": 2, "K": 1030, "O": 5}, first, **({"draw": Normal(scale=0.1)} | fixed)))
    if half:
        last = dict(more[-1]) if more else {}
        given = (*GIVEN, *last.pop("given", ()))
        for held, b in ((False, 60), (True, 23)):
            cases.append(
                Case({"B": b, "K": 160, "O": 72}, last, draw=Normal(scale=scale), given=given, dtypes=HALF, held=held)
            )
    return tuple(cases)


def linear_timed(*sizes: tuple[int, int, int], given: tuple[str, ...] = GIVEN, **args: Any) -> tuple[Case, ...]:
    """Timed layers (B, K, O); inputs are scaled so that the sums have variance 1."""
    return tuple(
        Case({"B": b, "K": k, "O": o}, args, draw=Normal(scale=k**-0.25), given=given)
        for b, k, o in sizes or ((1024, 1024, 1024), (1024, 4096, 1024), (4096, 4096, 4096))
    )
