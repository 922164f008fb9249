"""math/bitwise_and_binomial."""

import torch

from kbx_env.spec.criteria import Sample
from kbx_env.spec.task import Case, Choice, Cost, Ints, Literal, Normal, Paper, T, Uniform, task

CHANCES = {"probs": Uniform(0.05, 0.95)}
ODD = {"input": Choice(1, 3, 5, 7), "other": Choice(1, 9, 5)}
"""The lowest bit of the AND is always set: every element shows a sample."""


def _case(shape, count=None, prob=None, logits=False, **more):
    sizes = {"*": shape, "*n": shape if count is None else count, "*p": shape if prob is None else prob}
    draws = {"total_count": Ints(1, 60)} | CHANCES | {"logits": Normal(scale=4, clamp=10)} | more.pop("draws", {})
    return Case(sizes, draws=draws, given=("logits",) if logits else ("probs",), **more)


def _timed(k):
    return _case((1 << k,), (), draws={"total_count": Choice(10), **ODD})


def _any_shape(p):
    shape = p.shape(3, 5, 900)
    return p.like(
        {"*": shape, "*n": p.broadcast(shape), "*p": p.broadcast(shape)},
        where=lambda c: c.axes["*"] in ((64, 130), (60, 80)),
    )


@task(
    difficulty=2,
    takes={
        "input": T("*", "i32", Ints(0, 256)),
        "other": T("*", "i32", Ints(0, 256)),
        "total_count": T("*n", "i32"),
        "probs": T("*p", optional=True),
        "logits": T("*p", optional=True),
    },
    truth=Sample(law="binomial"),
    cost=Cost(
        flops="20 * numel(input)",
        # Of a sample that is 0 no factor has to be known; how many there are is left to chance.
        reads={
            "input": "nonzero(result) - 3 * numel(input) ** 0.5",
            "other": "nonzero(result) - 3 * numel(input) ** 0.5",
            "probs": "under(probs, input, other)",
            "logits": "under(logits, input, other)",
            "total_count": "under(total_count, input, other)",
        },
        least="numel(input)",
    ),
    paper=Paper(),
    differs="The samples are multiplied by the bitwise AND, as documented; as published the AND was computed and thrown away, and "
    "torch's own rejection sampler had to be reproduced bit for bit. Any stream of right samples is right.",
    cases=(
        _case((4,), draws=ODD),
        _case((4,), logits=True, draws=ODD),
        _case((256,), draws=ODD),
        _case((64, 130), draws=ODD),
        _case((64, 130), (130,), (64, 1)),
        _case((45, 90), (), (90,), logits=True),
        _case((4097,), (), (), draws={"total_count": Choice(1), "probs": Choice(0.3), **ODD}),
        # In fp16 the second chance is 1.
        _case((9000,), draws={"probs": Choice(0.001, 0.99976), "total_count": Choice(100), **ODD}),
        _case((60, 80), logits=True, layouts={"input": "transposed", "total_count": "transposed", "logits": "strided"}),
        # Numbers that fp16 does not have.
        _case((70, 33), draws={"input": Ints(-(2**16), 2**16), "other": Ints(2**14, 2**16)},
              layouts={"other": "strided", "probs": "transposed"}),
        _case((0, 5), (5,), (0, 5)),
        # Few trials, many elements: what looks like a binomial sample from afar does not up close.
        _case((256, 300), (), (), draws={"total_count": Choice(10), "probs": Choice(0.504), **ODD}),
        # Two numbers of trials, and two chances.
        _case((2, 1999), (2, 1), (2, 1), draws={"total_count": Literal(5, 60), "probs": Literal(0.2, 0.7), **ODD}),
        _case((256, 300), (), (), draws={"total_count": Choice(8), "probs": Choice(0.3), **ODD}, held=True),
        _case((3, 1999), (1999,), draws=ODD, held=True),
        _case((77, 61), logits=True, held=True),
    ),
    varied=(_any_shape,),
    timed=(_timed(22), _timed(24), _timed(26)),
)
def bitwise_and_binomial(input, other, total_count, probs=None, logits=None):
    """(input & other) times a binomial sample, elementwise: an fp32 tensor of whole numbers.

    input and other (int32, one shape) give their bitwise AND; total_count (int32, 0 to 100) and the chance of success
    broadcast (0-d too) to that shape. Exactly one of probs (fp32, in [0, 1]) and logits (fp32, chance = 1 / (1 +
    exp(-logits)), within
    [-10, 10]) is given, the other is None. y = (input & other) * k, where k is the number of successes in total_count
    independent trials. Any random stream will do; it must be fresh on every call and independent between elements. A new
    tensor of the shape of input is returned; inputs may have any strides or be empty.
    """
    p = probs if probs is not None else torch.sigmoid(logits)
    both = input & other
    count, p = torch.broadcast_tensors(total_count.to(p.dtype), p)
    samples = torch.binomial(count.expand(both.shape).contiguous(), p.expand(both.shape).contiguous())
    return samples * both
