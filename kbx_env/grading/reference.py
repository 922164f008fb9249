"""Runs a task's reference twice: in the declared dtypes (torch's own, native answer) and in fp64 (the exact answer)."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kbx_env.grading import gpu_turns, inputs
from kbx_env.protocol.wire import DTYPES, assembled
from kbx_env.spec.task import Case, DeviceArg, DtypeArg, GeneratorArg, Task

HALVES = (torch.float16, torch.bfloat16)
"""The 16-bit floating-point dtypes."""
GAPS = 2
"""A tensor that takes more than so many times the memory of its elements is copied without the gaps between them."""


@dataclass(frozen=True)
class Expected:
    """The reference's answers for one call."""

    outputs: tuple[torch.Tensor, ...]
    """Exact answer: fp64 for floating point, unchanged for integers and booleans."""
    native: tuple[torch.Tensor, ...]
    """Torch's own answer in the declared dtypes, TF32 off. It gives dtypes and shapes, and its error is an honest
    one."""
    written: Mapping[str, torch.Tensor]
    """Exact values of the tensors that the call changes in place."""
    native_written: Mapping[str, torch.Tensor]
    """Torch's own values of these tensors."""
    aliases: tuple[str | None, ...]
    """Per output: the parameter whose tensor object is returned."""
    is_tuple: bool
    """Whether the reference returns a tuple or list."""
    shares: tuple[str | None, ...] = ()
    """Per output: a parameter whose storage it uses (a view, or the tensor itself)."""
    decisions: int = 0
    """How many times the reference chose a rounding formula (calls of ``_schemes.int8_symmetric``)."""


@contextlib.contextmanager
def exact_matmul() -> Iterator[None]:
    """Turn TF32 off in torch within the block: IEEE fp32 products. Blocks of several threads may overlap."""
    with _EXACT_LOCK:
        _EXACT.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
        # "highest" is also matmul.allow_tf32 = False; restoring the boolean alone would lose "medium".
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        with _EXACT_LOCK:
            # The first block of those that overlap has seen what was set before them; the last restores it.
            before = _EXACT[0]
            _EXACT.pop()
            if not _EXACT:
                torch.set_float32_matmul_precision(before[0])
                torch.backends.cudnn.allow_tf32 = before[1]


_EXACT: list[tuple[str, bool]] = []
"""What was set when each block of ``exact_matmul`` began that has not ended."""
_EXACT_LOCK = threading.Lock()


def resolve(
    args: Mapping[str, Any],
    device: str,
    *,
    exact: bool = False,
    generator_seed: int = 0,
    upcast: torch.dtype | None = None,
) -> dict[str, Any]:
    """Copy arguments to a device and replace markers by values.

    Args:
        args: from ``inputs.draw``.
        device: of torch.
        exact: convert floating point to fp64 and complex numbers to complex128.
        generator_seed: seeds the ``torch.Generator`` arguments.
        upcast: dtype to which 16-bit floating point is converted; ``None`` to leave it.

    Returns:
        Arguments by name; tensors keep their strides, but exact ones that are mostly gaps become dense.
    """
    out: dict[str, Any] = {}
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            dtype = value.dtype
            if exact and dtype.is_floating_point:
                dtype = torch.float64
            elif exact and dtype.is_complex:
                dtype = torch.complex128
            elif upcast is not None and dtype in HALVES:
                dtype = upcast
            # One copy of large tensors, not a copy and a conversion; between devices torch would convert on the slower one.
            same = value.device.type == torch.device(device).type
            span = _span(value)
            if exact and same and span.numel() > GAPS * value.numel():
                out[name] = value.to(dtype, copy=True, memory_format=torch.contiguous_format)
                continue
            flat = span.to(device, dtype if same else value.dtype, copy=True).to(dtype)
            out[name] = flat.as_strided(value.shape, value.stride())
        elif isinstance(value, DtypeArg):
            dtype = DTYPES[value.name]
            if upcast is not None and dtype in HALVES:
                dtype = upcast
            out[name] = torch.float64 if exact and dtype.is_floating_point else dtype
        elif isinstance(value, DeviceArg):
            out[name] = torch.device(device)
        elif isinstance(value, GeneratorArg):
            out[name] = torch.Generator(device=device).manual_seed(generator_seed)
        else:
            out[name] = value
    return out


def as_tensor(number: bool | int | float) -> torch.Tensor:
    """Return a Python number as a tensor without axes, in the dtype that holds it exactly; some published results are numbers."""
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)


def _span(value: torch.Tensor) -> torch.Tensor:
    """Return a 1-D view of the storage from a tensor's first element to its last."""
    # as_strided over a copy of the span keeps the strides; .clone() does not always.
    if not value.numel():
        return value.new_empty(0)
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((span,), (1,), value.storage_offset())


@dataclass
class _Run:
    """One run of the reference; fields as in ``Expected``."""

    outputs: tuple[torch.Tensor, ...]
    written: dict[str, torch.Tensor]
    aliases: tuple[str | None, ...]
    shares: tuple[str | None, ...]
    is_tuple: bool
    decisions: int


def called(task: Task, args: Mapping[str, Any]) -> Any:
    """Call the reference as it is, without what torch warns of: nobody can change the call.

    Args:
        task: the task.
        args: from ``resolve``; tensors that the task writes in place are changed.

    Returns:
        What the reference returns.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return task.reference(**assembled(dict(args)))


def _run(
    task: Task, case: Case, args: dict[str, Any], keep: bool | torch.Tensor | None, rounding: tuple[str, ...],
    *, truth: bool = False,
) -> _Run:  # fmt: skip
    """Call the reference once.

    Args:
        task: the task.
        case: the case.
        args: from ``resolve``; tensors that the task writes in place are changed.
        keep: see ``expect``.
        rounding: see ``expect``.
        truth: whether this is the exact run, for the seams of the reference.

    Returns:
        The results.
    """
    from kbx_env.tasks import _schemes, _seams

    storages = {v.untyped_storage().data_ptr(): n for n, v in args.items() if isinstance(v, torch.Tensor) and v.numel()}
    keep_token, truth_token = _seams.KEEP.set(keep), _seams.TRUTH.set(truth)
    _schemes.set_rounding(rounding)
    _schemes.SLACK.set(None)
    try:
        result = called(task, args)
        decisions = _schemes._USED.get()
    finally:
        _seams.KEEP.reset(keep_token)
        _seams.TRUTH.reset(truth_token)
        _schemes.set_rounding(())
    outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
    outputs = tuple(o if isinstance(o, torch.Tensor) else as_tensor(o) for o in outputs)
    return _Run(
        outputs=tuple(o.detach() for o in outputs),
        written={n: args[n].detach() for n in task.written(case.args) if isinstance(args.get(n), torch.Tensor)},
        aliases=tuple(next((n for n, v in args.items() if v is o), None) for o in outputs),
        shares=tuple(storages.get(o.untyped_storage().data_ptr()) if o.numel() else None for o in outputs),
        is_tuple=isinstance(result, tuple | list),
        decisions=decisions,
    )


def _native(
    task: Task, case: Case, args: Mapping[str, Any], device: str, keep: bool | torch.Tensor | None,
    rounding: tuple[str, ...], seed: int,
) -> _Run:  # fmt: skip
    """Run the reference in the declared dtypes; where the CPU has no 16-bit kernel, in fp32 with results rounded once.

    Args:
        task: the task.
        case: the case.
        args: from ``inputs.draw``.
        device: of torch.
        keep: see ``expect``.
        rounding: see ``expect``.
        seed: of the ``torch.Generator`` arguments.

    Returns:
        The results.
    """
    try:
        return _run(task, case, resolve(args, device, generator_seed=seed), keep, rounding)
    except (RuntimeError, NotImplementedError) as e:
        half = next((v.dtype for v in args.values() if isinstance(v, torch.Tensor) and v.dtype in HALVES), None)
        if half is None or device != "cpu" or "not implemented" not in str(e):
            raise
    wide = resolve(args, device, generator_seed=seed, upcast=torch.float32)
    run = _run(task, case, wide, keep, rounding)
    narrow = half if all(v.dtype in (torch.float32, half) for v in _floats(args)) else torch.float32
    mixed = any(v.dtype is torch.float32 for v in _floats(args))
    if narrow is half and not mixed:
        run.outputs = tuple(o.to(half) if o.dtype is torch.float32 else o for o in run.outputs)
    elif mixed:
        # With fp32 and 16-bit inputs together, only a run on the meta device tells to which dtype torch promotes.
        meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in resolve(args, device).items()}
        dtypes = [o.dtype for o in _run(task, case, meta, keep, rounding).outputs]
        run.outputs = tuple(o.to(d) for o, d in zip(run.outputs, dtypes, strict=True))
    run.written = {n: v.to(args[n].dtype) for n, v in run.written.items()}
    return run


def _floats(args: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the floating-point tensors among arguments."""
    return [v for v in args.values() if isinstance(v, torch.Tensor) and v.dtype.is_floating_point]


def expect(
    task: Task,
    case: Case,
    args: Mapping[str, Any],
    device: str = "cpu",
    *,
    keep: bool | torch.Tensor | None = None,
    rounding: tuple[str, ...] = (),
    exact: bool = True,
    generator_seed: int = 0,
    native: Expected | None = None,
    known: Expected | None = None,
    resolved: Mapping[str, Any] | None = None,
) -> Expected:
    """Evaluate the reference.

    Args:
        task: the task.
        case: the case for which the arguments were drawn.
        args: from ``inputs.draw``; not changed.
        device: where to compute.
        keep: effect of ``_seams.dropout``: True keeps all, False drops all, a mask keeps where it is True, ``None``
            draws.
        rounding: formulas of ``_schemes.int8_symmetric``, in order.
        exact: also compute the exact answer in fp64 (otherwise the native answer is used in its place).
        generator_seed: seeds the ``torch.Generator`` arguments.
        native: torch's own answer, if it was computed before, perhaps on another device; it is moved to ``device``.
        known: the exact answer, from ``exact_answer`` for the same call.
        resolved: ``args`` in fp64, from ``resolve``, where several evaluations share them and the task writes none of them.

    Returns:
        The answers, on ``device``.
    """
    with exact_matmul():
        own = _as_run(native, device) if native else _native(task, case, args, device, keep, rounding, generator_seed)
        outputs, written = own.outputs, own.written
        gpu_turns.yield_gpu()
        if known is not None:
            outputs, written = known.outputs, dict(known.written)
        elif exact:
            if resolved is None:
                resolved = resolve(args, device, exact=True, generator_seed=generator_seed)
            truth = _run(task, case, dict(resolved), keep, rounding, truth=True)
            outputs, written = truth.outputs, truth.written
    return Expected(
        outputs=outputs, native=own.outputs, written=written, native_written=own.written,
        aliases=own.aliases, is_tuple=own.is_tuple, shares=own.shares, decisions=own.decisions,
    )  # fmt: skip


def exact_answer(task: Task, case: Case, args: Mapping[str, Any], device: str) -> Expected | None:
    """Evaluate the reference in fp64 alone, which is half of the work.

    Args:
        task: the task.
        case: the case for which the arguments were drawn.
        args: from ``inputs.draw``; not changed.
        device: where to compute.

    Returns:
        The exact answer. ``native`` and ``native_written`` have dtypes and shapes but no values (they are on the meta device), and
        no result counts as sharing memory with an argument. ``None`` where dtypes or shapes depend on values, or an operation has
        no implementation for meta tensors.
    """
    with exact_matmul():
        try:
            own = _run(task, case, resolve(args, "meta"), None, ())
        except Exception:  # torch raises several types where a value of a meta tensor is asked for
            return None
        truth = _run(task, case, resolve(args, device, exact=True), None, (), truth=True)
    return Expected(
        outputs=truth.outputs, native=own.outputs, written=truth.written, native_written=own.written, aliases=own.aliases,
        is_tuple=own.is_tuple, shares=(None,) * len(own.outputs), decisions=own.decisions,
    )  # fmt: skip


def by_rival(task: Task, case: Case, args: Mapping[str, Any], algorithm: Callable[..., Any]) -> list[torch.Tensor]:
    """Call another right algorithm in the declared dtypes, on the CPU.

    Args:
        task: the task.
        case: the case for which the arguments were drawn.
        args: from ``inputs.draw``; not changed.
        algorithm: has the reference's parameters.

    Returns:
        The results, complex ones as pairs of reals.
    """
    with exact_matmul():
        run = _native(replace(task, reference=algorithm), case, args, "cpu", None, (), 0)
    return [real_view(o) for o in run.outputs]


def published(task: Task, case: Case, args: Mapping[str, Any], device: str, generator_seed: int) -> Expected:
    """Evaluate the published reference as the published script does: torch's own seed and switches, no exact answer.

    Args:
        task: from ``spec.published``.
        case: one of its cases.
        args: from ``inputs.draw``; not changed.
        device: of the call.
        generator_seed: of the call, ``CallResult.generator_seed``.

    Returns:
        The answers; ``outputs`` and ``native`` are the same. The host's random stream is left as it was.
    """
    with torch.random.fork_rng(enabled=True):
        torch.manual_seed(torch_seed(generator_seed))
        own = _native(task, case, args, device, None, (), generator_seed)
    return Expected(
        outputs=own.outputs, native=own.outputs, written=own.written, native_written=own.written, aliases=own.aliases,
        is_tuple=own.is_tuple, shares=own.shares, decisions=own.decisions,
    )  # fmt: skip


def torch_seed(generator_seed: int) -> int:
    """Return the seed of torch's own random stream before a call of the paper's grading, from ``CallResult.generator_seed``."""
    return generator_seed % (1 << 31)


def _as_run(native: Expected, device: str) -> _Run:
    """Return the native answer of an earlier evaluation, moved to a device."""
    return _Run(
        tuple(o.to(device) for o in native.native), {n: v.to(device) for n, v in native.native_written.items()},
        native.aliases, native.shares, native.is_tuple, native.decisions,
    )  # fmt: skip


STEP = 2.0**-36
"""Relative perturbation of the inputs: small compared with fp32's epsilon, large compared with fp64's."""
DRAWS = 8
"""Perturbations that are averaged: with a single one, some element of thousands does not move by chance."""


class Perturbations:
    """Calls with noise on their inputs, which measure the conditioning: by how much each result changes per unit of noise.

    It limits the accuracy of every kernel: a sum that cancels is uncertain by far more than its own size times epsilon,
    in any order of summation.

    Args:
        task: the task.
        case: the case.
        args: from ``inputs.draw``.
        expected: the exact answer for them.
        device: where to compute.
        keep: see ``expect``.
    """

    def __init__(
        self, task: Task, case: Case, args: Mapping[str, Any], expected: Expected, device: str = "cpu",
        *, keep: bool | torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._task, self._case, self._args, self._expected, self._device, self._keep = task, case, args, expected, device, keep
        self._noise = torch.Generator(device).manual_seed(0x5EED)
        self._squares = [_square(o) for o in expected.outputs]
        self._written = {n: _square(v) for n, v in expected.written.items()}
        self._draws = 0

    def root_mean_square(self, draws: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Return the root-mean-square of the change over the first so many perturbations; those made before are not made again.

        Args:
            draws: number of perturbations, at least as many as before.

        Returns:
            In fp64 with the shapes of the results (complex ones as pairs of reals): of the outputs, and by name of the tensors
            written in place.
        """
        assert draws >= self._draws, "the changes of fewer perturbations are no longer known"
        while self._draws < draws:
            self._perturb()
            self._draws += 1
        return [(t / draws).sqrt() for t in self._squares], {n: (t / draws).sqrt() for n, t in self._written.items()}

    def _perturb(self) -> None:
        """Add the squared changes of one more perturbation."""
        gpu_turns.yield_gpu()
        perturbed = resolve(self._args, self._device, exact=True)
        for value in perturbed.values():
            if isinstance(value, torch.Tensor) and value.dtype in (torch.float64, torch.complex128):
                parts = inputs.once(torch.view_as_real(value) if value.is_complex() else value)
                factor = torch.rand(parts.shape, generator=self._noise, dtype=torch.float64, device=self._device) * 2 - 1
                parts.mul_(1 + STEP * factor)
        with exact_matmul():
            run = _run(self._task, self._case, perturbed, self._keep, (), truth=True)
        for total, a, b in zip(self._squares, run.outputs, self._expected.outputs, strict=True):
            _add_square(total, a, b)
        for name, total in self._written.items():
            _add_square(total, run.written[name], self._expected.written[name])


def real_view(x: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as a real one with a last axis of 2; others unchanged."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _square(like: torch.Tensor) -> torch.Tensor:
    """Return fp64 zeros for the sum of squares of a result."""
    return torch.zeros_like(real_view(like), dtype=torch.float64)


def _add_square(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add the square of (a - b) / ``STEP`` to ``total``."""
    # If the noise changed the shape (a mask selects other elements), the difference has no meaning.
    if a.shape == b.shape and (b.dtype.is_floating_point or b.is_complex()):
        total += torch.nan_to_num(real_view(a - b).abs() / STEP, nan=0.0, posinf=0.0).square()
