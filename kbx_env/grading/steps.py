"""How far a wrong kernel of a fused operation comes: which of the reference's intermediate results it computes at all.

The grader knows what each operator of the reference gives for the secret inputs. The engine executes the wrong call again and
looks for some of these numbers among everything that the launches compute, in whatever order and layout: nobody hits two dozen
numbers made of secret inputs but by computing them. Whether they end up in the right place is for the verdict to say.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from kbx_env.grading import inputs, reference, scheme
from kbx_env.grading.traced import EngineError
from kbx_env.task import Case, Task
from kbx_env.truth import Close

if TYPE_CHECKING:
    from kbx_env.grading.calls import Claimed, Talk

OPERATORS = "operators"
SAMPLES, ENOUGH = 24, 0.9
"""Numbers of a step that are looked for, and the share of them that one operation of the kernel must give."""
NEAR = 4e-6
"""Of a number's size, or the step's: an honest order of summation in fp32 stays below; of 10^5 others one in ten is as near."""
TORCH = 16.0
"""Times torch's own error in fp32."""
QUICK = 3.0
"""Seconds that the call may have taken: one that is executed anew must not run into a limit that ends the grading."""


def asked(task: Task) -> bool:
    """Whether steps are looked for: a fused operation, whose result is a matter of values alone."""
    return task.category == "fusion" and isinstance(task.truth, Close)


def stages(task: Task, case: Case, call: Claimed, talk: Talk, index: int) -> dict[str, float] | None:
    """The share of the reference's steps that the launches of a wrong call compute; ``None`` where it has none to look for.

    Args:
        task: a task that is ``asked``.
        case: the case.
        call: the call that was judged, the last one of the engine.
        talk: the submission.
        index: of the case.
    """
    assert talk.engine is not None
    rng = random.Random(inputs.case_seed(talk.secret, task.id, f"{talk.split} steps", index, 0))
    wanted = numbers(task, case, call.args, rng)
    if not wanted:
        return None
    try:
        shares = talk.engine.found(wanted, scheme.SECONDS)
    except EngineError as e:
        if e.kind in ("memory", "runtime", "policy"):
            return {OPERATORS: 0.0}
        raise talk.ended(e) from None
    return {OPERATORS: sum(s >= ENOUGH for s in shares) / len(shares)}


def numbers(task: Task, case: Case, args: Mapping[str, Any], rng: random.Random) -> list[tuple[list[float], list[float]]]:
    """Of each step some numbers and how near to each a kernel must come; steps with too few of their own are left out."""
    runs = list[list[torch.Tensor]]()

    def told(**given: Any) -> Any:
        with _Recorder() as recorder:
            runs.append(recorder.kept)
            return task.reference(**given)

    reference.expect(dataclasses.replace(task, reference=told), case, args)
    native, truth = runs[0], runs[-1]
    if len(runs) != 2 or [t.shape for t in native] != [t.shape for t in truth]:
        return []  # torch has no such kernel in 16 bits, or the truth is computed another way
    given = [v for v in args.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    # In 16 bits torch rounds every step, which kernels rightly do not.
    single = not any(v.dtype in reference.HALVES for v in given)
    known = torch.cat([torch.zeros(1, dtype=torch.float64), *(v.flatten().to(torch.float64) for v in given)]).unique()
    found = []
    for mine, exact in zip(native, truth, strict=True):
        flat = exact.flatten().to(torch.float64)
        own = flat[torch.isfinite(flat) & (flat != flat.round()) & ~torch.isin(flat, known)].unique()
        if len(own) < SAMPLES:
            continue
        known = torch.cat((known, own)).unique()
        size = float(own.square().mean().sqrt())
        chosen = rng.sample(range(len(own)), SAMPLES)
        values = own[torch.tensor(chosen)]
        slack = NEAR * torch.clamp(values.abs(), min=size)
        if single:
            off = (mine.flatten().to(torch.float64) - flat).abs()
            slack = torch.maximum(slack, TORCH * float(off[torch.isfinite(off)].max()) * torch.ones_like(slack))
        found.append((values.tolist(), slack.tolist()))
    return found


class _Recorder(TorchFunctionMode):
    """Keeps what every torch function gives that is new: no view of what it was given, and nothing written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else (out,)
        held = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for t in made:
            if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel() and t.device.type == "cpu":
                if t.untyped_storage().data_ptr() not in held:
                    self.kept.append(t.detach().clone())
        return out
