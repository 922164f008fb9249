"""fusion/fused_cross_entropy_softmax_layernorm."""

import torch
import torch.nn.functional as F
from kbx_env.tasks._varied import class_weights, longs, near_zero, sizes

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Ints, Literal, Normal, Outlier, Paper, T, Uniform, task

IGNORED = {"targets": Ints(0, "C", special=-100, p=0.3)}
WEIGHT = ("weight",)


def _case(b, c, args=None, **more):
    return Case({"B": b, "C": c}, {"normalized_shape": c} | (args or {}), **more)


def _one_unit_off(logits, targets, normalized_shape, weight=None, *, eps=1e-5, out=None, **of_loss):
    # A right softmax may be off by a unit in the last place. Where a row's classes are about equally likely, normalisation makes
    # that large, by chance far larger than torch's own error there.
    p = F.softmax(logits, -1)
    off = torch.where(torch.arange(logits.shape[1]) % 2 == 0, 1 + 2.0**-23, 1 - 2.0**-23)
    loss = F.cross_entropy(logits, targets, weight, **of_loss)
    return loss, F.layer_norm(p * off.to(p.dtype), (normalized_shape,), eps=eps)


@task(
    difficulty=3,
    takes={
        "logits": T("B C"),
        "targets": T("B", "i64", Ints(0, "C")),
        "weight": T("C", draw=Uniform(0.1, 2), optional=True),
    },
    truth=Close(ulps=32, rival=_one_unit_off),
    cost=Cost(
        flops="12 * numel(logits)",
        reads={"weight": "distinct(targets, ignore_index) + numel(weight) * nonzero(label_smoothing)"},
        least="numel(logits)",
    ),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="out receives the loss, the first result; as published it was the destination of the normalised tensor. "
    "Tensors are judged, where the published tests compared Python floats and numpy arrays.",
    cases=(
        _case(2, 3, draws={"logits": Literal(1, 2, 3, 3, 2, 1), "targets": Literal(1, 2)}),
        _case(4, 3, given=WEIGHT, draw=Normal(scale=3)),
        _case(64, 100, {"ignore_index": -100}, draws=IGNORED),
        _case(32, 128, {"label_smoothing": 0.1}, out=True),
        _case(32, 128, {"label_smoothing": 0.1}, given=WEIGHT, draw=Outlier()),
        _case(70, 7, {"ignore_index": 3, "reduction": "sum"}, draw=Normal(scale=2)),
        _case(70, 7, {"ignore_index": 1, "reduction": "none", "eps": 0.1}, given=WEIGHT, draw=Normal(scale=2)),
        _case(33, 1001, {"label_smoothing": 1.0, "reduction": "none", "eps": 1e-12}),
        _case(64, 130, {"reduction": "none"}, draw=Normal(scale=1e4)),
        _case(3, 9001, {"label_smoothing": 0.2, "eps": 1e-10}, given=WEIGHT),
        _case(1, 2, {"eps": 1e-3}),
        _case(60, 2, {"reduction": "none"}, draw=Normal(scale=8)),
        _case(20, 36, {"label_smoothing": 0.5, "reduction": "sum"}, layouts={"logits": "transposed"}, draws=IGNORED),
        _case(31, 17, {"reduction": "none"}, layouts={"logits": "strided", "targets": "strided"}, out=True),
        _case(0, 7, {"reduction": "none"}),
        _case(57, 211, {"label_smoothing": 0.05, "eps": 1e-8}, given=WEIGHT, draws=IGNORED, held=True),
        _case(203, 19, {"reduction": "sum"}, draw=Normal(scale=2), out=True, held=True),
    ),
    varied=(
        sizes(longs({"B": (2, 20), "C": (3, 20)}, {"B": 1100, "C": 4300}),
              lambda p, s: {"reduction": p.among("none", "sum", "mean"), "label_smoothing": p.real(0, 1),
                    "normalized_shape": s["C"], "ignore_index": p.among(-100, 1, 2),
                            "eps": p.among(1e-5, 0.01, 1e-8, 1e-4, 0.003)},
              where=lambda c: "ignore_index" not in c.args and c.args.get("eps", 1e-5) == 1e-5, draws={}, full=True),
        near_zero(lambda p, s: {"normalized_shape": s["C"], "label_smoothing": p.real(0, 0.2), "eps": p.among(1e-5, 0.01)}),
        class_weights(lambda p, s: {"normalized_shape": s["C"], "label_smoothing": p.real(0, 0.2), "eps": 1e-5}),
    ),
    timed=tuple(_case(b, 1024) for b in (16384, 65536, 262144)),
)  # fmt: skip
def fused_cross_entropy_softmax_layernorm(
    logits, targets, normalized_shape, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, eps=1e-5,
    *, out=None,
):  # fmt: skip
    """A tuple (loss, y): the cross entropy of logits, and the layer normalisation of their softmax.

    logits fp32 (B, C), targets int64 (B,) with class ids, normalized_shape an int, always C. With p = softmax(logits)
    along the classes, y = (p - mean(p)) / sqrt(var(p) + eps) per row, biased variance, no affine part: fp32 (B, C).

    loss: with class weights w (weight, fp32 (C,), or None, the default, for 1), s = label_smoothing in [0, 1] and t =
    targets[b], row b costs (1 - s) * w[t] * -log p[b, t] + s / C * sum over c of w[c] * -log p[b, c], and 0 where t ==
    ignore_index (which may be a valid class id; y is not concerned). reduction="none": the costs, (B,). "sum": their
    sum. "mean": the sum divided by the sum of w[t] over the rows that are not ignored; all rows ignored is not tested.

    Example: fused_cross_entropy_softmax_layernorm([[1, 2, 3], [3, 1, 0]], [1, 0], 3) = (0.788726, [[-1.000984,
    -0.364534, 1.365518], [1.409470, -0.605077, -0.804393]])

    Compute in fp32; logits of +-1e5 must not overflow. The loss is 0-d for "sum" and "mean". out: None (the default: a
    new tensor), or a contiguous tensor of the loss's shape and dtype with any contents, which is filled and returned as
    the first result; y is new. logits, targets and weight may have any strides; B may be 0 with "none" only.
    """
    loss = F.cross_entropy(logits, targets, weight, ignore_index=ignore_index, reduction=reduction,
                           label_smoothing=label_smoothing)  # fmt: skip
    y = F.layer_norm(F.softmax(logits, -1), (normalized_shape,), eps=eps)
    return loss if out is None else out.copy_(loss), y
