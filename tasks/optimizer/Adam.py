"""optimizer/Adam."""

from kbx_env.tasks._varied import LARGE, elementwise, sizes, small_steps

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Constant, Cost, HalfNormal, Normal, Paper, T, task

LATER = {"exp_avg": Normal(scale=0.1), "exp_avg_sq": HalfNormal(offset=0, scale=0.01)}
FIRST = {"exp_avg": Constant(0), "exp_avg_sq": Constant(0)}
OTHER = {"lr": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.3}


@task(
    difficulty=3,
    takes={"param": T("*"), "grad": T("*"), "exp_avg": T("*"), "exp_avg_sq": T("*", draw=HalfNormal(0, 0.01))},
    writes={"param": "always", "exp_avg": "always", "exp_avg_sq": "always"},
    # 512 ulps of exp_avg_sq: 1 - beta2 computed in fp32 is 250 off its double value, and "compute in fp32" allows that. The
    # parameters move by little: there it is less than one, and so they are held as AdamW's.
    truth=Close(of=(16, 16, 512)),
    cost=Cost(flops="14 * numel(param)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="One step on tensors (entry adam_step); as published the task built a torch.optim.Adam object and compared "
    "its dictionary of options, so that there was nothing to compute.",
    cases=(
        Case({"*": (2, 2)}, {"step": 1}, draws=FIRST),
        Case({"*": (10, 5)}, {"step": 1, "lr": 0.01}, draws=FIRST),
        # Moments that are no zeros at the first step, and gradients that are none at the tenth: the step does not tell.
        Case({"*": (60, 9)}, {"step": 1}, draws=LATER),
        Case({"*": (9, 50)}, {"step": 10, "lr": 0.02}, draws=LATER),
        Case({"*": (10, 5)}, {"step": 100, "beta1": 0.85, "beta2": 0.95}, draws=LATER),
        Case({"*": (10, 5)}, {"step": 4, "weight_decay": 0.01}, draws=LATER),
        Case({"*": (1000,)}, {"step": 7} | OTHER, draws=LATER),
        Case({"*": (257, 33)}, {"step": 3}, draws=LATER),
        Case({"*": (31, 40)}, {"step": 12} | OTHER, draws=LATER, layouts={"grad": "transposed"}),
        Case({"*": (8, 30)}, {"step": 2}, draws=LATER, layouts={"param": "strided", "exp_avg": "transposed"}),
        Case({"*": (9, 14)}, {"step": 2}, draws=LATER, layouts={"exp_avg_sq": "transposed"}),
        Case({"*": (64,)}, {"step": 10, "weight_decay": 0.5}, draws=LATER | {"grad": Constant(0)}),
        Case({"*": (64,)}, {"step": 100000, "lr": 1.0}, draws=LATER | {"grad": Normal(scale=1e-6)}),
        Case({"*": ()}, {"step": 5}, draws=LATER),
        Case({"*": (0,)}, {"step": 5}),
        Case({"*": (3, 7, 111)}, {"step": 42} | OTHER, draws=LATER, held=True),
    ),
    varied=(
        elementwise(
            lambda p: {
                "step": p.whole(1, 3000),
                "lr": p.real(0.001, 0.5),
                "beta1": p.real(0.1, 0.99),
                "beta2": p.real(0.5, 0.999),
                "weight_decay": p.real(0, 0.5),
                "eps": p.among(1e-8, p.real(0.001, 0.1), p.real(0.001, 0.1), p.real(0.001, 0.1)),
            },
            draws={"exp_avg": Normal(scale=0.1), "exp_avg_sq": HalfNormal(0, 0.01)},
        ),
        *sizes(lambda p: {"*": p.shape(2, 3, 60)}, draws=LATER | {"grad": LARGE}, where=small_steps),
    ),
    timed=tuple(Case({"*": (1 << k,)}, {"step": 10}, draws=LATER) for k in (22, 24, 26)),
)
def adam_step(param, grad, exp_avg, exp_avg_sq, step, lr=0.001, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
    """One Adam step on fp32 tensors of one shape, in place; returns (param, exp_avg, exp_avg_sq), the same tensors.

    With g = grad + weight_decay * param (L2 decay, of param before the step) and t = step (an int >= 1), in this order:
    exp_avg = beta1 * exp_avg + (1 - beta1) * g; exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g^2;
    param -= lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^t) + eps).

    Example: adam_step([1, 1], [0.5, -2], [0, 0], [0, 0], 1) = ([0.999, 1.001], [0.05, -0.2], [0.00025, 0.004])
    Example: adam_step([1], [0.5], [0], [0], 1, weight_decay=0.5) = ([0.999], [0.1], [0.001])

    grad is not changed. The tensors may each have any strides, be 0-d or empty. Compute in fp32; what follows from the
    numbers alone, such as 1 - beta2 and lr / (1 - beta1^t), in double precision, as Python does.
    """
    g = grad.add(param, alpha=weight_decay)
    exp_avg.mul_(beta1).add_(g, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = exp_avg_sq.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    param.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))
    return param, exp_avg, exp_avg_sq
