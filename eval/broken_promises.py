"""Breaks one promise of a contract at a time in our own kernels, and asks whether the grader refuses them.

    python eval/broken_promises.py [--tasks GLOBS] [--families GLOB] [--times N] [--workers N] [--json FILE]
    python eval/broken_promises.py --arguments [--tasks GLOBS]
    python eval/broken_promises.py --values [--tasks GLOBS]

Each kernel is an expert behind a wrapper that goes wrong exactly where one promise of the contract matters: it takes a
tensor of three axes as contiguous, knows the listed arguments only, leaves out the second block along an axis. The
promises are those of ``eval/promises.py``. Every kernel is graded ``--times`` times, since each grading draws cases of its
own; a kernel that is paid once is a gap. ``--arguments`` ignores one optional argument at a time instead: where the judge
refuses the reference's own answer with the default in its place, nothing is graded. It also lists ``CHANGES`` of arguments,
such as their absolute value, that no case tells from the right value. Arguments without an effect by contract
are in ``NO_EFFECT``, with the reason. ``--values`` does the same with the values of one tensor (``VALUES``) and lists how
many of four gradings tell them from the right ones. ``FILE`` gets one JSON object a line, and an interrupted run
goes on where its file ends.
"""

from __future__ import annotations

import argparse
import fnmatch
import inspect
import itertools
import json
import math
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from kbx_env.eval import promises
from rich.progress import track

from kbx_env.executor.direct import retrying
from kbx_env.grading import derived_cases, inputs, reference
from kbx_env.grading import judge as judges
from kbx_env.grading.grader import Grader
from kbx_env.spec.catalog import expert_source, load_tasks
from kbx_env.spec.criteria import Close, Exact
from kbx_env.spec.task import Case, Task

WALL = 60.0
"""Seconds of wall time for one kernel."""
NO_EFFECT: Mapping[tuple[str, str], str] = {
    ("activation/gelu_int8", "approximate"): "both formulas give the same integer for all 256 inputs",
    ("fusion/fused_embedding_add_tanh", "padding_idx"): "concerns gradients, which are not computed",
    ("fusion/fused_embedding_add_tanh", "scale_grad_by_freq"): "concerns gradients, which are not computed",
    ("fusion/fused_embedding_add_tanh", "sparse"): "concerns gradients, which are not computed",
    ("fusion/fused_gather_masked_fill", "sparse_grad"): "concerns gradients, which are not computed",
    ("fusion/fused_instance_norm_selu_conv2d", "num_features"): "accepted without effect: there are no weights",
    ("fusion/fused_instance_norm_selu_conv2d", "momentum"): "accepted without effect: there are no running statistics",
    ("fusion/fused_instance_norm_selu_conv2d", "affine"): "accepted without effect: there are no weights",
    ("fusion/fused_instance_norm_selu_conv2d", "track_running_stats"): "accepted without effect: there are no statistics",
    ("fusion/fused_layer_norm_relu_linear", "elementwise_affine"): "accepted without effect: there are no weights",
    ("fusion/fused_repeat_interleave_log_softmax", "output_size"): "always agrees with repeats; it spares a read only",
    ("fusion/fused_sum_std", "keepdim"): "concerns the sums, which are not returned",
    ("linearalgebra/determinant_lu", "pivot"): "another way to the same number",
    ("linearalgebra/determinant_via_qr", "mode"): "another way to the same number",
    ("linearalgebra/invert_matrix_lu", "pivot"): "another way to the same inverse",
    ("linearalgebra/low_rank_svd_approximation", "full_matrices"): "the product of the factors is the same",
    ("linearalgebra/pseudoinverse_svd", "full_matrices"): "the product of the factors is the same",
    ("linearalgebra/solve_symmetric_ldl", "hermitian"): "a solver that reads the whole matrix does not need it",
    ("fusion/fused_mv_logsoftmax_dropout", "dim"): "the product has one axis: both dims name it",
    ("random/rand", "device"): "inputs give the same device to kernels that look no argument up",
    ("random/logspace", "device"): "inputs give the same device to kernels that look no argument up",
}
"""Optional arguments, by task and name, without an effect on the result, and why."""
NO_DIFFERENCE: Mapping[tuple[str, str], str] = {
    ("fusion/fused_silu_layer_norm_conv2d", "weight: any strides"): "accepted without effect",
    ("math/abs", "signed zeros"): "the absolute value of both zeros is the same",
    ("math/erf", "infinities"): "erf of the largest number is 1, as that of infinity",
    ("math/softmax", "infinities"): "exp of the lowest number is 0, as that of -infinity; +infinity is not tested",
    ("reduce/argmax", "signed zeros"): "both zeros are equal, and the result is an index",
}
"""Promises, by task and text, that make no difference to the result where our kernel breaks them, and why."""

PRELUDE = '''
import torch as _torch
import triton as _triton
import triton.language as _tl


def _tensors(p):
    for name, v in p.items():
        if isinstance(v, _torch.Tensor):
            yield name, v
        elif isinstance(v, (list, tuple)):
            for k, t in enumerate(v):
                if isinstance(t, _torch.Tensor):
                    yield name + "." + str(k), t


def _dense(t):
    steps, inner = [], 1
    for n in reversed(t.shape):
        steps.append(inner)
        inner *= n
    return t.as_strided(t.shape, tuple(reversed(steps)), t.storage_offset())


@_triton.jit
def _through(x, y, n, HOW: _tl.constexpr, B: _tl.constexpr):
    o = _tl.program_id(0) * B + _tl.arange(0, B)
    v = _tl.load(x + o, mask=o < n)
    if HOW == 0:
        v = v.to(_tl.float32).to(v.dtype)
    if HOW == 1:
        v = _tl.where(v == 0, v * v, v)
    if HOW == 2:
        v = _tl.where(v != v, v * 0 + 1, v)
        v = _tl.where(v != v, 1.0, v)
    if HOW == 3:
        v = _tl.minimum(_tl.maximum(v, -3e38), 3e38)
    if HOW == 4:
        v = _tl.where(_tl.abs(v) < 1e-4, 0.0, v).to(v.dtype)
    if HOW == 5:
        v = _tl.where(v > 16, 16.0, _tl.where(v < -16, -16.0, v)).to(v.dtype)
    _tl.store(y + o, v, mask=o < n)


def _changed(t, how):
    x = t.contiguous()
    y = _torch.empty_like(x)
    if x.numel():
        _through[(_triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), HOW=how, B=1024)
    return y
'''
"""Helpers of the wrappers: the tensors of a call, a tensor read as contiguous, and a kernel that changes special values."""

Broken = Iterator[tuple[str, str]]
"""Pairs of a promise and the statements of a wrapper that breaks it. ``p`` are the arguments by name."""


def wrapped(task: Task, body: str) -> str | None:
    """Return the expert's source with an entry that runs ``body`` and then calls the expert with the arguments ``p``.

    Args:
        task: the task.
        body: statements that may change ``p``, raise or return.

    Returns:
        The source; ``None`` if the expert has no entry of this name.
    """
    text = expert_source(task.id) or ""
    renamed, count = re.subn(rf"^def {re.escape(task.entry)}\(", "def _honest(", text, flags=re.MULTILINE)
    found = re.search(r"^def _honest\((.*?)\):", renamed, re.MULTILINE | re.DOTALL)
    if count != 1 or found is None:
        return None
    names = ", ".join(f"{n}={n}" for n in task.signature.parameters)
    lines = "\n".join("    " + line for line in body.strip("\n").splitlines())
    return (
        f"{renamed}\n{PRELUDE}\n\ndef {task.entry}({found[1]}):\n    p = dict({names})\n{lines}\n    return _honest(**p)\n"
    )


def _stop(condition: str) -> str:
    return f"if {condition}:\n    raise NotImplementedError('this kernel does not support it')"


def _layouts(task: Task, texts: Sequence[str]) -> Broken:
    """Break the promises on strides, numbers of axes, empty tensors, ``out=`` and broadcasting."""
    for text in texts:
        name = text.partition(":")[0]
        read = f"p[{name!r}] = _dense(p[{name!r}])"
        plain = name in task.signature.parameters and name not in task.writes
        given = f"isinstance(p.get({name!r}), _torch.Tensor)"
        if text.endswith("three or more axes in any order in memory") and plain:
            yield text, f"if {given} and p[{name!r}].dim() > 2:\n    {read}"
        elif text.endswith(": any strides") and plain:
            yield text, f"if {given}:\n    {read}"
        elif text.endswith("more than three axes") and name in task.signature.parameters:
            yield text, _stop(f"{given} and p[{name!r}].dim() > 3")
        elif text == "empty":
            yield text, _stop("any(t.numel() == 0 for n, t in _tensors(p) if n != 'out')")
        elif text == promises.NEW_CONTIGUOUS:
            known = sorted({tuple(promises.shapes(task, c).values()) for c in task.cases})
            yield text, (
                "given = [t for n, t in _tensors(p) if n != 'out']\n"
                + _stop(
                    "all(t.is_contiguous() for t in given) and "
                    f"tuple(tuple(t.shape) for t in given) not in {known!r}"
                )
            )
        elif text == "out= of any strides":
            yield text, "if p['out'] is not None and not p['out'].is_contiguous():\n    return p['out']"
        elif text == "broadcasting both ways":
            yield text, (
                "shapes = [t.shape for n, t in _tensors(p) if n != 'out']\n"
                + _stop("_torch.broadcast_shapes(*shapes) not in shapes")
            )


def _sizes(task: Task, texts: Sequence[str]) -> Broken:
    """Break the promises on lengths of axes."""
    for text in texts:
        axis = text.partition(":")[0]
        if text == "an axis of more than one block":
            yield text, _stop(f"any(n >= {promises.FLAT} for _, t in _tensors(p) for n in t.shape)")
        elif text.endswith(": more than one block"):
            name, at = next(
                (n, axes.index(axis) if not any(a.startswith("*") for a in axes[: axes.index(axis)])
                 else axes.index(axis) - len(axes))
                for n, axes in ((n, t.axes.split()) for n, t in task.takes.items()) if axis in axes
            )  # fmt: skip
            images = axis == "N" and "C" in task.takes[name].axes
            least = promises.MATRIX if axis in ("n", "m") else 20 if images else promises.BLOCK
            yield text, _stop(f"isinstance(p.get({name!r}), _torch.Tensor) and p[{name!r}].shape[{at}] >= {least}")


def _arguments(task: Task, texts: Sequence[str]) -> Broken:
    """Break the promises on arguments."""
    for text in texts:
        name = text.partition(":")[0]
        if text.endswith("values of no declared case"):
            values = {repr(c.args[name]) for c in task.cases if name in c.args}
            known = sorted(values | {repr(task.signature.parameters[name].default)})
            yield text, _stop(f"repr(p[{name!r}]) not in {known!r}")
        elif text.endswith(": tuples"):
            yield f"{name}: tuples in any order", _stop(
                f"isinstance(p[{name!r}], tuple) and list(p[{name!r}]) != sorted(p[{name!r}])"
            ) if name == "dim" else "pass"


def _values(task: Task, texts: Sequence[str]) -> Broken:
    """Break the promises on special values, by a kernel that changes these values before the expert sees them."""
    plain = [n for n in task.takes if n in task.signature.parameters and n not in task.writes]

    def change(kind: str, how: int) -> str:
        return "\n".join(
            f"if isinstance(p.get({n!r}), _torch.Tensor) and p[{n!r}].dtype == _torch.{kind}:\n"
            f"    p[{n!r}] = _changed(p[{n!r}], {how})"
            for n in plain
        )  # fmt: skip

    if not plain:
        return
    for text in texts:
        if text.startswith("int64"):
            yield f"{text}: values through fp32", change("int64", 0)
        elif text == "NaN":
            yield text, change("float32", 2)
        elif text == "infinities":
            yield text, change("float32", 3)
    if isinstance(task.truth, Exact) and task.takes[plain[0]].dtype == "f32":
        yield "signed zeros", change("float32", 1)


def kernels(task: Task) -> list[tuple[str, str]]:
    """Return the kernels of a task that break one promise each.

    Args:
        task: the task.

    Returns:
        Pairs of the promise and the source.
    """
    texts = list(promises.promises(task))
    found = []
    for family in (_layouts, _sizes, _arguments, _values):
        for text, body in family(task, texts):
            if body != "pass" and (source := wrapped(task, body)) is not None:
                found.append((text, source))
    text = expert_source(task.id) or ""
    half, count = re.subn(r"^(\s+)acc = (tl\.dot\(.*, acc\b.*\))$", r"\1acc = \2.to(tl.float16).to(tl.float32)", text, flags=re.M)
    if count and any("f16" in c.dtypes.values() or any(t.dtype == "f16" for t in task.takes.values()) for c in task.cases):
        found.append(("16-bit accumulator", half))
    return found


def ignoring(task: Task) -> list[tuple[str, str]]:
    """Return kernels that ignore one optional argument each, for arguments that cases pass.

    Args:
        task: the task.

    Returns:
        Pairs of the argument and the source.
    """
    found = []
    for name, p in task.signature.parameters.items():
        if p.default is p.empty or name in ("out", "inplace") or name in task.takes:
            continue
        if any(name in c.args and c.args[name] != p.default for c in task.cases) and (
            source := wrapped(task, f"del p[{name!r}]")
        ):
            found.append((name, source))
    return found


DRAWS = 4
"""Gradings whose derived cases are asked whether they need an argument."""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


Change = Callable[[Any, Any], Any]
"""What a wrong kernel takes for an argument: a function of its value and its default."""
CHANGES: Mapping[str, Change] = {
    "its default": lambda v, d: d,
    "its default where it is zero or empty": lambda v, d: d if not v and not isinstance(v, bool) and v is not None else v,
    "its absolute value": lambda v, d: abs(v) if _number(v) else v,
    "one more": lambda v, d: v + 1 if _number(v) and isinstance(v, int) else v,
    "one percent more": lambda v, d: v * 1.01 if _number(v) and isinstance(v, float) else v,
    "one at most": lambda v, d: min(v, 1) if _number(v) else v,
    "its first number twice": lambda v, d: type(v)([v[0]] * len(v)) if isinstance(v, tuple | list) and v else v,
    "its first number alone": lambda v, d: type(v)(v[:1]) if isinstance(v, tuple | list) else v,
}
"""Changes of arguments, by name."""
SAME: Mapping[tuple[str, str, str], str] = {
    ("fusion/fused_cross_entropy_log_softmax", "dim", "its absolute value"): "the last of two axes is axis 1",
    ("linearalgebra/pseudoinverse_svd", "rcond", "one percent more"): "no singular value is that close to the bound",
    ("loss/cross_entropy", "ignore_index", "its absolute value"): "where -100 is passed, nothing is ignored",
    ("loss/nll_loss", "ignore_index", "its absolute value"): "where -100 is passed, nothing is ignored",
    ("normalization/symmetric_matrix_vector_norm", "alpha", "its absolute value"): "a norm does not depend on the sign",
}  # fmt: skip
"""Changes that make no difference, by task, argument and change, and why."""


def noticed(task: Task, name: str, change: str = "its default") -> bool | None:
    """Return whether the judge refuses the reference's own answer with something else in the place of an argument.

    Args:
        task: the task.
        name: the argument.
        change: one of ``CHANGES``.

    Returns:
        ``None`` for judges of random or quantized results, whose answers the reference alone does not give: there a
        kernel must be graded; and where no case has a value that is changed.
    """
    if not isinstance(task.truth, Close | Exact):
        return None
    default, tried = task.signature.parameters[name].default, False
    if default is inspect.Parameter.empty and "default" in change:
        return None
    drawn = (c for k in range(DRAWS) for c in derived_cases.derive(task, b"arguments %d" % k, "eval"))
    for k, case in enumerate(itertools.chain(task.cases, drawn)):
        if name not in case.args or _alike(case.args[name], value := CHANGES[change](case.args[name], default)):
            continue
        tried = True
        case = replace(case, out=False, layouts={n: v for n, v in case.layouts.items() if n != "out"})
        args = inputs.draw(task, case, k + 1)
        without = {n: v for n, v in args.items() if n != name} | ({} if change == "its default" else {name: value})
        if _refused(task, case, args, without):
            return True
    return False if tried else None


def _refused(task: Task, case: Case, args: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Return whether the judge refuses the reference's own answer for other arguments, or there is none."""
    try:
        other = reference.expect(task, case, others, "cpu", exact=False)
    except Exception:
        return True  # the call needs the argument
    kept = {n: v for n, v in {**others, **args}.items() if isinstance(v, torch.Tensor)} | dict(other.native_written)
    plain = tuple(o.requires_grad for o in other.native)
    made = judges.Answer(tuple(other.native), other.is_tuple, kept, other.aliases, other.aliases, grads=plain)
    return not judges.judge(task, case, args, [made] * judges.calls_needed(task, case)).passed


VALUES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "numbers below 0.0001 taken for zero": lambda t: torch.where(t.abs() < 1e-4, torch.zeros_like(t), t),
    "numbers bounded by 16": lambda t: t.clamp(-16, 16),
}
"""What a wrong kernel takes for the values of a tensor of floating point, by name."""
SMALL, LARGE = VALUES
SAME_VALUES: Mapping[tuple[str, str, str], str] = {
    ("activation/tanh", "input_tensor", LARGE): "tanh(16) is 1 in fp32",
    ("fusion/fused_cos_avg_pool1d", "input", SMALL): "cos(0.0001) is 1 in fp32",
    ("fusion/fused_cos_signbit", "input", SMALL): "cos(0.0001) is 1 in fp32",
    ("fusion/fused_dropout_relu_batch_norm_conv2d", "bias", SMALL): "the mean of the batch takes the bias away",
    ("fusion/fused_dropout_relu_batch_norm_conv2d", "bias", LARGE): "the mean of the batch takes the bias away",
    ("fusion/fused_log_tanh", "input", SMALL): "tanh(log(x)) is -1 in fp32, as for zero",
    ("fusion/fused_silu_layer_norm_conv2d", "weight", SMALL): "accepted without effect",
    ("fusion/fused_silu_layer_norm_conv2d", "weight", LARGE): "accepted without effect",
    ("math/cos", "input_tensor", SMALL): "cos(0.0001) is 1 in fp32",
    ("math/erf", "input_tensor", LARGE): "erf(16) is 1 in fp32",
    ("math/i0", "input_tensor", SMALL): "i0(0.0001) is 1 in fp32",
    ("math/signbit", "input", LARGE): "the sign stays",
    ("loss/binary_cross_entropy", "input", LARGE): "the contract takes probabilities in [0, 1]",
    ("loss/binary_cross_entropy", "target", LARGE): "the contract takes targets in [0, 1]",
    ("math/asin", "input_tensor", LARGE): "asin is NaN above 1",
    ("math/bitwise_and_binomial", "probs", SMALL): "a few thousand samples do not show a chance of 0.0001",
    ("math/bitwise_and_binomial", "probs", LARGE): "the contract takes chances in [0, 1]",
    ("math/bitwise_and_binomial", "logits", SMALL): "a few thousand samples do not tell the chance from 1/2",
    ("math/bitwise_and_binomial", "logits", LARGE): "the contract takes logits in [-10, 10]",
    ("math/chebyshev_polynomial_t", "input", LARGE): "the contract takes numbers up to 2",
    ("math/digamma", "input_tensor", SMALL): "the contract takes numbers from 0.05 on, and negative ones away from zero",
    ("math/gammaln", "input", SMALL): "the contract takes numbers from 0.01 on, and negative ones away from zero",
    ("math/logit", "input", LARGE): "logit is NaN above 1, or that of 1 - eps",
    ("math/polygamma", "input", SMALL): "the contract takes numbers from 0.05 on",
    ("math/zeta", "input", SMALL): "the contract takes numbers from 1.05 on; zeta is NaN below 1",
    ("math/zeta", "other", SMALL): "the contract takes numbers from 0.2 on",
}  # fmt: skip
"""Changes of values that make no difference, by task, tensor and change, and why."""


def values_told(task: Task, name: str, change: str, secret: bytes) -> bool | None:
    """Return whether one grading tells changed values of a tensor from the right ones.

    Args:
        task: the task.
        name: the tensor.
        change: one of ``VALUES``.
        secret: of the grading.

    Returns:
        ``None`` for judges of random or quantized results, and where nothing that is drawn is changed.
    """
    if not isinstance(task.truth, Close | Exact) or name not in task.signature.parameters:
        return None
    told: bool | None = None
    for k, case in enumerate((*task.cases, *derived_cases.derive(task, secret, "eval"))):
        case = replace(case, out=False, layouts={})
        args = inputs.draw(task, case, inputs.case_seed(secret, task.id, "eval", k, 0))
        value = args.get(name)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        changed = VALUES[change](value)
        if torch.equal(changed.nan_to_num(), value.nan_to_num()):
            continue
        if _refused(task, case, args, args | {name: changed}):
            return True
        told = False
    return told


def changing(task: Task) -> list[tuple[str, str]]:
    """Return kernels that change the values of one tensor each.

    Args:
        task: the task.

    Returns:
        Pairs of the tensor and the change, as ``tensor, change``, and the source.
    """
    found = []
    for name, t in task.takes.items():
        if name not in task.signature.parameters or not t.dtype.startswith(("f", "bf")):
            continue
        condition = f"isinstance(p.get({name!r}), _torch.Tensor) and p[{name!r}].is_floating_point()"
        if name in task.writes:
            if task.writes[name] not in task.signature.parameters:
                continue  # always written: a changed copy would leave the tensor as it was
            condition += f" and not p[{task.writes[name]!r}]"
        for change, how in ((SMALL, 4), (LARGE, 5)):
            source = wrapped(task, f"if {condition}:\n    p[{name!r}] = _changed(p[{name!r}], {how})")
            if source is not None and (task.id, name, change) not in SAME_VALUES:
                found.append((f"{name}, {change}", source))
    return found


def _alike(a: Any, b: Any) -> bool:
    """Return whether two arguments are of one kind and have one text: NaN is like NaN."""
    return type(a) is type(b) and repr(a) == repr(b)


def unnoticed(task: Task) -> list[tuple[str, str]]:
    """Return the arguments and changes that no case tells from the right ones, as (argument, change)."""
    passed = {n for c in task.cases for n in c.args} & set(task.signature.parameters) - set(task.takes) - {"out", "inplace"}
    return [
        (name, change) for name in sorted(passed) for change in CHANGES
        if (task.id, name) not in NO_EFFECT and (task.id, name, change) not in SAME and noticed(task, name, change) is False
    ]  # fmt: skip


_graders: list[Grader] = []


def _work(job: tuple[str, str, str, int]) -> dict[str, Any]:
    """Grade one kernel until it is paid, at most a number of times."""
    task_id, text, source, times = job
    if not _graders:
        _graders.append(Grader())
    begun, verdicts = time.monotonic(), []
    for _ in range(times):
        outcome = retrying(_graders[0].grade)(task_id, source, backend="cpu", targets=(), wall=WALL)
        verdicts.append(str(outcome.verdict))
        if outcome.correct:
            break
    return {
        "task": task_id, "promise": text, "verdicts": verdicts, "paid": "correct" in verdicts,
        "message": outcome.message[:120], "seconds": round(time.monotonic() - begun, 2),
    }  # fmt: skip


def family_of(text: str) -> str:
    """Return the text of a promise without the name of a tensor, an axis or an argument."""
    name, colon, rest = text.partition(": ")
    return rest if colon and not name.startswith("int64") else text


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of the kernels by family, and the list of those that were paid.

    Args:
        rows: graded kernels.

    Returns:
        Markdown.
    """
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for r in rows:
        groups[family_of(r["promise"])].append(r)
    lines = ["| broken promise | tasks | kernels | paid at least once |", "|---|---|---|---|"]
    for name in sorted(groups):
        mine = groups[name]
        lines.append(f"| {name} | {len({r['task'] for r in mine})} | {len(mine)} | {sum(r['paid'] for r in mine)} |")
    lines.append(f"| **all** | {len({r['task'] for r in rows})} | {len(rows)} | {sum(r['paid'] for r in rows)} |")
    lines += ["", *(f"- paid in grading {len(r['verdicts'])}: {r['task']}, {r['promise']}" for r in rows if r["paid"])]
    return "\n".join(lines)


def jobs_of(tasks: Sequence[Task], families: str, times: int, make: Callable[[Task], list[tuple[str, str]]]) -> list[Any]:
    """Return the jobs of a run: (task id, promise, source, times)."""
    return [
        (task.id, text, source, times)
        for task in tasks for text, source in make(task)
        if fnmatch.fnmatch(family_of(text), families) and (task.id, text) not in {**NO_EFFECT, **NO_DIFFERENCE}
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments; by default those of the process.

    Returns:
        Exit status: 1 if a kernel was paid.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", default="*", help="globs over task ids, comma-separated")
    parser.add_argument("--families", default="*", metavar="GLOB", help="over the broken promises")
    parser.add_argument("--times", type=int, default=3, metavar="N", help="gradings of each kernel")
    parser.add_argument("--workers", type=int, default=1, metavar="N")
    parser.add_argument("--arguments", action="store_true", help="ignore one optional argument at a time")
    parser.add_argument("--values", action="store_true", help="change the values of one tensor at a time; kernels are not graded")
    parser.add_argument("--graded", action="store_true", help="with --values: grade kernels that make these changes")
    parser.add_argument("--json", type=Path, help="file for the results, one JSON object a line")
    options = parser.parse_args(argv)
    tasks = load_tasks(pattern=options.tasks)
    if options.values and not options.graded:
        pairs = {(t.id, *text.split(", ", 1)) for t in tasks if isinstance(t.truth, Close | Exact) for text, _ in changing(t)}
        for task, name, change in ((t, n, c) for t in tasks for n in t.takes for c in VALUES):
            found = [values_told(task, name, change, b"values %d" % k) for k in range(DRAWS)]
            if (task.id, name, change) in pairs and found.count(True) < DRAWS:
                untouched = f", not drawn in {found.count(None)}" * (None in found)
                print(f"{task.id} {name}, {change}: told in {found.count(True)} of {DRAWS} gradings{untouched}")
        return 0
    make = changing if options.values else ignoring if options.arguments else kernels
    jobs = jobs_of(tasks, options.families, options.times, make)
    if options.arguments:
        by_id = {task.id: task for task in tasks}
        known = len(jobs)
        jobs = [j for j in jobs if not noticed(by_id[j[0]], j[1])]
        for task in tasks:
            print("".join(f"no case of {task.id} tells {name} from {what}\n" for name, what in unnoticed(task)), end="")
        print(f"{known} arguments, {known - len(jobs)} needed by the judge; kernels that ignore the others are graded")
    rows: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        rows = [json.loads(line) for line in options.json.read_text().splitlines()]
        done = {(r["task"], r["promise"]) for r in rows}
        jobs = [j for j in jobs if j[:2] not in done]
    with ProcessPoolExecutor(options.workers) as pool:
        for row in track(pool.map(_work, jobs), "kernels", len(jobs)):
            rows.append(row)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(table(rows))
    return int(any(r["paid"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
