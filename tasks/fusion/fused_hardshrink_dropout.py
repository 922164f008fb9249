"""fusion/fused_hardshrink_dropout."""

import torch.nn.functional as F
from kbx_env.tasks._cases import stream
from kbx_env.tasks._seams import dropout
from kbx_env.tasks._varied import elementwise

from kbx_env.spec.criteria import Close, Dropout
from kbx_env.spec.task import Case, Choice, Constant, Cost, Normal, Outlier, Paper, T, Uniform, task

# For other rates than 1/2 and 3/4 no scaled value may fall on the threshold by rounding.
GRID = Choice(*(k / 8 for k in range(-30, 0)), *(k / 8 for k in range(1, 31)))
EDGES = Choice(-0.7, 0.7, -0.5, 0.5, 0.50000006, -0.49999997, 0.0, -0.0, 0.70000005, 1e30, -1e-30)
BIG = {"*": (129, 257)}


@task(
    difficulty=3,
    takes={"input": T("*")},
    truth=Dropout(rate="p", active="training", close=Close()),
    writes={"input": "inplace"},
    # Which elements are dropped is known before they are read; how many is left to chance.
    cost=Cost(flops="3 * n", reads={"input": "max(0, n - training * (p * n + 3 * n ** 0.5))"}, least="0"),
    paper=Paper(),
    differs="Any random stream is right: each element must be the kept or the dropped value and the mask must look "
    "random; as published, torch's own CUDA stream was demanded bit for bit. inplace is judged: the input becomes the "
    "result.",
    cases=(
        Case({"*": (5, 5)}),
        Case(BIG, {"training": False}),
        Case(BIG),
        Case(BIG, {"p": 0.75, "lambd": 1.25}, draw=Outlier()),
        Case(BIG, {"p": 0.1, "lambd": 0.3}, draw=GRID),
        Case({"*": (61, 300)}, {"p": 0.3, "lambd": 0.7}, draw=GRID),
        Case({"*": (3, 5, 401)}, {"p": 0.9, "lambd": 2.0}, draw=GRID),
        Case(BIG, {"inplace": True}, draw=Uniform(0.3, 4)),
        Case({"*": (40, 51)}, {"training": False, "inplace": True, "lambd": 0.7}),
        Case({"*": (33, 65)}, {"p": 0.5}, layouts={"input": "transposed"}),
        Case({"*": (40, 31)}, {"p": 0.5, "inplace": True}, layouts={"input": "strided"}, draw=Uniform(0.3, 4)),
        Case({"*": (300,)}, {"training": False}, draw=EDGES),
        Case({"*": (300,)}, {"p": 0.0, "lambd": 0.7}, draw=EDGES),
        Case({"*": (4, 9)}, {"p": 1.0}),
        Case({"*": ()}, {"training": False, "lambd": 0.1}),
        Case({"*": (0, 3)}),
        # Equal values: a mask made of them shows. Many of them: so does a pool of numbers drawn once.
        Case({"*": (365, 400)}, draw=Constant(1.25)),
        Case({"*": (40, 1000)}, {"p": 0.1, "lambd": 0.0}, draw=Constant(-0.75), held=True),
        Case({"*": (3, 5, 211)}, {"p": 0.2}, draw=GRID, held=True),
        Case({"*": (7, 333)}, {"p": 0.5, "lambd": 0.9, "inplace": True}, draw=Outlier(0.01, 30), held=True),
    ),
    varied=(
        elementwise(lambda p: {"inplace": p.chance(), "training": False, "lambd": p.real(0, 2)}, draw=Normal()),
        elementwise(lambda p: {"p": p.real(0.1, 0.8), "lambd": 0.0}, high=5, draw=Normal()),
    ),
    timed=stream(powers=(23, 25, 27), draw=Uniform()),
)
def fused_hardshrink_dropout(input, p=0.5, training=True, inplace=False, lambd=0.5):
    """hardshrink(dropout(input)), elementwise on an fp32 tensor of any shape.

    dropout (only if training): every element is zeroed with probability p and otherwise multiplied by 1 / (1 - p); p =
    1 gives zeros. Any random stream will do; it must be fresh on every call, independent between elements, and the keep
    rate must be 1 - p. hardshrink(x) = x if |x| > lambd, else 0, so that |x| = lambd gives 0; lambd >= 0 is compared
    with the scaled value, in fp32. The scaled value is x / (1 - p) or x * (1 / (1 - p)); inputs for which they fall on
    different sides of lambd are not tested.

    Example: fused_hardshrink_dropout([0.3, -0.5, 0.9, -2], training=False) = [0, 0, 0.9, -2]
    Example: fused_hardshrink_dropout([1, 2], p=1.0) = [0, 0]

    inplace=False: a new tensor; the input is not changed. inplace=True: the input is overwritten with the final result
    (after hardshrink) and returned itself. input may have any strides, also in place, be 0-d or empty.
    """
    y = F.hardshrink(dropout(input, p, training), lambd)
    return input.copy_(y) if inplace else y
