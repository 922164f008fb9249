"""Optimizer steps in place: a direction from the gradient and its averages, weight decay, clipping, and an update."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kbx_env.generate import text
from kbx_env.generate.drafts import Draft, Voice, listed
from kbx_env.generate.expressions import head


@dataclass(frozen=True)
class Rule:
    """How a direction d follows from the gradient g.

    Attributes:
        word: part of the function's name.
        state: names of the averages, which are updated in place.
        positive: those of them that are not negative.
        numbers: parameters with their defaults.
        torch: statements in torch; at the end ``d`` is the direction.
        triton: statements in Triton.
        text: what the contract says.
        flops: operations for each element.
    """

    word: str
    state: tuple[str, ...]
    positive: tuple[str, ...]
    numbers: tuple[tuple[str, float], ...]
    torch: tuple[str, ...]
    triton: tuple[str, ...]
    text: str
    flops: int


RULES = (
    Rule("sgd", (), (), (), ("d = g",), ("d = g",), "d = g", 2),
    Rule(
        "momentum",
        ("buf",),
        (),
        (("momentum", 0.9),),
        ("buf.mul_(momentum).add_(g)", "d = buf"),
        ("buf = momentum * buf + g", "d = buf"),
        "buf = momentum * buf + g, and d = buf",
        4,
    ),
    Rule(
        "nesterov",
        ("buf",),
        (),
        (("momentum", 0.9),),
        ("buf.mul_(momentum).add_(g)", "d = g + momentum * buf"),
        ("buf = momentum * buf + g", "d = g + momentum * buf"),
        "buf = momentum * buf + g, and d = g + momentum * buf (with the new buf)",
        6,
    ),
    Rule(
        "ema",
        ("avg",),
        (),
        (("beta", 0.9),),
        ("avg.mul_(beta).add_((1 - beta) * g)", "d = avg"),
        ("avg = beta * avg + (1.0 - beta) * g", "d = avg"),
        "avg = beta * avg + (1 - beta) * g, and d = avg",
        5,
    ),
    Rule(
        "adagrad",
        ("acc",),
        ("acc",),
        (("eps", 1e-6),),
        ("acc.add_(g * g)", "d = g / (torch.sqrt(acc) + eps)"),
        ("acc = acc + g * g", "d = g / (tl.sqrt_rn(acc) + eps)"),
        "acc = acc + g^2, and d = g / (sqrt(acc) + eps)",
        6,
    ),
    Rule(
        "rmsprop",
        ("sq",),
        ("sq",),
        (("alpha", 0.95), ("eps", 1e-6)),
        ("sq.mul_(alpha).add_((1 - alpha) * g * g)", "d = g / torch.sqrt(sq + eps)"),
        ("sq = alpha * sq + (1.0 - alpha) * g * g", "d = g / tl.sqrt_rn(sq + eps)"),
        "sq = alpha * sq + (1 - alpha) * g^2, and d = g / sqrt(sq + eps)",
        8,
    ),
    Rule(
        "rmsprop_momentum",
        ("sq", "buf"),
        ("sq",),
        (("alpha", 0.95), ("momentum", 0.8), ("eps", 1e-6)),
        ("sq.mul_(alpha).add_((1 - alpha) * g * g)", "buf.mul_(momentum).add_(g / (torch.sqrt(sq) + eps))", "d = buf"),
        ("sq = alpha * sq + (1.0 - alpha) * g * g", "buf = momentum * buf + g / (tl.sqrt_rn(sq) + eps)", "d = buf"),
        "sq = alpha * sq + (1 - alpha) * g^2, buf = momentum * buf + g / (sqrt(sq) + eps), and d = buf",
        10,
    ),
    Rule(
        "adam_plain",
        ("m", "v"),
        ("v",),
        (("beta1", 0.9), ("beta2", 0.99), ("eps", 1e-6)),
        (
            "m.mul_(beta1).add_((1 - beta1) * g)",
            "v.mul_(beta2).add_((1 - beta2) * g * g)",
            "d = m / (torch.sqrt(v) + eps)",
        ),
        ("m = beta1 * m + (1.0 - beta1) * g", "v = beta2 * v + (1.0 - beta2) * g * g", "d = m / (tl.sqrt_rn(v) + eps)"),
        "m = beta1 * m + (1 - beta1) * g, v = beta2 * v + (1 - beta2) * g^2, and d = m / (sqrt(v) + eps), without bias correction",
        12,
    ),
    Rule(
        "adamax",
        ("m", "u"),
        ("u",),
        (("beta1", 0.9), ("beta2", 0.99), ("eps", 1e-6)),
        ("m.mul_(beta1).add_((1 - beta1) * g)", "u.copy_(torch.maximum(beta2 * u, torch.abs(g)))", "d = m / (u + eps)"),
        ("m = beta1 * m + (1.0 - beta1) * g", "u = tl.maximum(beta2 * u, tl.abs(g))", "d = m / (u + eps)"),
        "m = beta1 * m + (1 - beta1) * g, u = max(beta2 * u, |g|), and d = m / (u + eps)",
        9,
    ),
    Rule(
        "yogi",
        ("m", "v"),
        ("v",),
        (("beta1", 0.9), ("beta2", 0.99), ("eps", 1e-3)),
        (
            "m.mul_(beta1).add_((1 - beta1) * g)",
            "v.add_((1 - beta2) * torch.tanh(g * g - v) * g * g)",
            "d = m / (torch.sqrt(torch.abs(v)) + eps)",
        ),
        (
            "m = beta1 * m + (1.0 - beta1) * g",
            "v = v + (1.0 - beta2) * libdevice.tanh(g * g - v) * g * g",
            "d = m / (tl.sqrt_rn(tl.abs(v)) + eps)",
        ),
        "m = beta1 * m + (1 - beta1) * g, v = v + (1 - beta2) * tanh(g^2 - v) * g^2 (the old v on the right), and d = "
        "m / (sqrt(|v|) + eps)",
        18,
    ),
    Rule(
        "soft_lion",
        ("m",),
        (),
        (("beta1", 0.9), ("beta2", 0.98)),
        ("d = torch.tanh(beta1 * m + (1 - beta1) * g)", "m.mul_(beta2).add_((1 - beta2) * g)"),
        ("d = libdevice.tanh(beta1 * m + (1.0 - beta1) * g)", "m = beta2 * m + (1.0 - beta2) * g"),
        "d = tanh(beta1 * m + (1 - beta1) * g) with the old m, then m = beta2 * m + (1 - beta2) * g",
        11,
    ),
)
SHARES = {0.9: 0.6, 0.95: 0.7, 0.99: 0.8, 0.98: 0.75, 0.8: 0.5}
"""Defaults of parameters that stay between 0 and 1, and another value of each."""
KERNEL = """@triton.jit
def _kernel({pointers}, n, {numbers}, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
{loads}
{body}
{stores}


def ENTRY({parameters}):
    changed = {changed}
    dense = [t.contiguous() for t in changed]
    n = param.numel()
    if n:
        _kernel[(triton.cdiv(n, 1024),)](*dense, grad.contiguous(), n, {passed}, BLOCK=1024, num_warps=4)
        for old, new in zip(changed, dense):
            if not old.is_contiguous():
                old.copy_(new)
    return {returned}
"""


def _steps(rule: Rule, clip: str, decay: str) -> tuple[list[str], list[str], list[str]]:
    """Return the statements of a step in torch and in Triton, and its description.

    Args:
        rule: for the direction.
        clip: of the gradient: ``value``, ``soft``, or empty for none.
        decay: of the weights: ``coupled``, ``decoupled``, ``cautious``, or empty for none.

    Returns:
        Statements in torch, statements in Triton, and clauses of the contract.
    """
    torch_lines, triton_lines, clauses = ["g = grad"], ["g = grad"], []
    if clip == "value":
        torch_lines += ["g = torch.clamp(g, -limit, limit)"]
        triton_lines += ["g = tl.minimum(tl.maximum(g, -limit), limit)"]
        clauses += ["g is grad, with every element clipped to [-limit, limit]"]
    elif clip == "soft":
        torch_lines += ["g = limit * torch.tanh(g / limit)"]
        triton_lines += ["g = limit * libdevice.tanh(g / limit)"]
        clauses += ["g = limit * tanh(grad / limit)"]
    else:
        clauses += ["g = grad"]
    if decay == "coupled":
        torch_lines += ["g = g + weight_decay * param"]
        triton_lines += ["g = g + weight_decay * param"]
        clauses += ["g = g + weight_decay * param"]
    torch_lines += rule.torch
    triton_lines += rule.triton
    clauses += [rule.text]
    if decay == "decoupled":
        torch_lines += ["param.mul_(1 - lr * weight_decay)"]
        triton_lines += ["param = param * (1.0 - lr * weight_decay)"]
        clauses += ["param = param * (1 - lr * weight_decay)"]
    elif decay == "cautious":
        torch_lines += ["d = d + weight_decay * torch.tanh(param)"]
        triton_lines += ["d = d + weight_decay * libdevice.tanh(param)"]
        clauses += ["d = d + weight_decay * tanh(param)"]
    torch_lines += ["param.add_(d, alpha=-lr)"]
    triton_lines += ["param = param - lr * d"]
    clauses += ["param = param - lr * d"]
    return torch_lines, triton_lines, clauses


def _of_numbers(numbers: Sequence[str]) -> dict[str, str]:
    """Return what statements in Triton compute from numbers alone, by the name of the argument that replaces it."""
    return {f"one_{n}": f"(1.0 - {n})" for n in numbers} | {"keep": "(1.0 - lr * weight_decay)"}


def optimizer(rng: random.Random, level: int) -> Draft:
    """Draw one step of an optimizer on fp32 tensors."""
    voice = Voice(rng)
    rule = rng.choice([r for r in RULES if abs((r.flops + 3) // 4 - level) <= 1] or RULES)
    clip = rng.choice(("", "", "value", "soft"))
    decay = rng.choice(("", "coupled", "decoupled", "cautious" if level > 2 else "decoupled"))
    numbers = [
        ("lr", 0.1),
        *rule.numbers,
        *([("weight_decay", 0.1)] if decay else []),
        *([("limit", 1.5)] if clip else []),
    ]
    torch_lines, triton_lines, clauses = _steps(rule, clip, decay)
    # Numbers that follow from numbers are computed by the host in double precision: 1 - 0.99f has an error of 25 units.
    ready = {n: n for n, _ in numbers}
    for k, line in enumerate(triton_lines):
        for short, made in _of_numbers([n for n, _ in numbers]).items():
            if made in line:
                triton_lines[k] = line = line.replace(made, short)
                ready[short] = made[1:-1]
    ready = {n: made for n, made in ready.items() if any(re.search(rf"\b{n}\b", line) for line in triton_lines)}
    changed = ("param", *rule.state)
    tensors = ("param", "grad", *rule.state)
    returned = "param" if not rule.state else "(" + ", ".join(changed) + ")"
    parameters = ", ".join([*tensors, *(f"{n}={v!r}" for n, v in numbers)])
    pointers = (*changed, "grad")
    expert = head("\n".join(triton_lines)) + KERNEL.format(
        pointers=text.pointers(pointers),
        numbers=", ".join(ready),
        loads=text.indented([f"{t} = tl.load(p_{t} + at, mask=inside, other=0.0)" for t in pointers]),
        body=text.indented(triton_lines),
        stores=text.indented([f"tl.store(p_{t} + at, {t}, mask=inside)" for t in changed]),
        parameters=parameters,
        changed="(" + ", ".join(changed) + ",)",
        passed=", ".join(f"float({made})" for made in ready.values()),
        returned=returned,
    )
    body = [*torch_lines, f"return {returned}"]
    words = (rule.word, *((clip + "_clip",) if clip else ()), *((decay + "_decay",) if decay else ()), "step")
    names = listed([n for n, _ in numbers])
    summary = voice.one(
        "One step of an optimizer on fp32 tensors of one shape, in place.",
        f"Update {listed(changed)} in place by one optimizer step; all tensors are fp32 and have one shape.",
    )
    details = (
        "In this order: " + "; ".join(clauses) + ".",
        f"{names} {'are floats' if len(numbers) > 1 else 'is a float'}. "
        + (
            f"{listed(changed)} are updated in place, and the tuple ({', '.join(changed)}) of these same tensors is returned."
            if rule.state
            else "param is updated in place, and returned itself."
        )
        + " grad is not changed.",
        " ".join(
            filter(
                None,
                (
                    voice.one(
                        "Compute in fp32, but what follows from the numbers alone in double precision, as Python does.",
                        "Compute in fp32; numbers that follow from lr and the other floats are formed in double precision.",
                    )
                    if len(ready) > len([n for n in ready if n in dict(numbers)])
                    else "Compute in fp32.",
                    f"{listed(tensors)} may each have any strides, be 0-d or empty.",
                    f"No element of {listed(rule.positive, 'or')} is negative." if rule.positive else "",
                    voice.untested(),
                ),
            )
        ),
    )

    def other(factor: float) -> str:
        """Return arguments away from their defaults; shares stay below 1."""
        return text.mapping({n: repr(round(SHARES.get(v, v * factor), 7)) for n, v in numbers})

    drawn = text.mapping(
        {n: "p.real(0.05, 0.95)" if v in SHARES else f"p.real({round(v / 2, 8)!r}, {2 * v!r}, 8)" for n, v in numbers}
    )
    cases = (
        'Case({"*": (129, 257)})',
        f'Case({{"*": (129, 257)}}, {other(0.5)})',
        f'Case({{"*": (128, 512)}}, {other(1.5)}, draw=Outlier())',
        'Case({"*": (5,)})',
        f'Case({{"*": (33, 65)}}, {other(2)}, layouts={{"grad": "transposed"}})',
        'Case({"*": (7, 31)}, layouts={"param": "strided"})',
        f'Case({{"*": (12, 35)}}, layouts={{"{changed[-1]}": "transposed"}})',
        'Case({"*": ()})',
        'Case({"*": (0, 3)})',
        f'Case({{"*": (3, 5, 211)}}, {other(0.7)}, held=True)',
    )
    fields = {
        "takes": text.mapping({t: 'T("*", draw=HalfNormal())' if t in rule.positive else 'T("*")' for t in tensors}),
        "writes": text.mapping(dict.fromkeys(changed, '"always"')),
        "truth": "Close(ulps=16)",
        "cost": f'Cost(flops="{rule.flops + 4} * numel(param)", least="numel(param)")',
        "cases": text.block(cases),
        "varied": f"(elementwise(lambda p: {drawn}),)",
        "timed": text.flat_timed("f32"),
    }
    positive = "[0.5, 1, 2]"
    return Draft(
        family="optimizer",
        category="optimizer",
        words=words,
        parameters=parameters,
        body=tuple(body),
        summary=summary,
        details=details,
        examples=(", ".join(positive if t in rule.positive else text.vector(rng) for t in tensors),),
        takes=dict.fromkeys(tensors, "f32"),
        fields=fields,
        expert=expert,
        size=rule.flops // 2 + 2 * bool(clip) + bool(decay),
        imports=("from kbx_env.tasks._varied import elementwise",),
    )


FAMILIES = {"optimizer": optimizer}
