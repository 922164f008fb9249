"""The functions of cost expressions: sizes of tensors, and counts that depend on the values of a call.

``Values`` counts in the tensors of one call and in its results. ``Sizes`` replaces it where there are no values: it
returns sizes of tensors, which is sufficient for comparing cases with each other, but no lower bound.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from kbx_env.errors import DeclarationError
from kbx_env.grading import reference
from kbx_env.grading.reference import Expected
from kbx_env.protocol.wire import DTYPES
from kbx_env.spec.task import Case, Task, shape_of

Operand = str | float
"""An operand of a function: the name of a tensor or of an argument, or a number."""


class Counts(Protocol):
    """The functions of an expression."""

    def functions(self) -> Mapping[str, Callable[..., float]]:
        """Return the functions by name."""

    def is_tensor(self, name: str) -> bool:
        """Return whether functions get a name as it is, because it is a tensor or an argument, and not the number it
        stands for.
        """


def _windows(n: int, taps: int, step: int, padding: int, dilation: int, ceil: bool) -> list[set[int]]:
    """Return the positions of an axis that each window covers; arguments as for ``touched``."""
    room = n + 2 * padding - dilation * (taps - 1) - 1
    windows = (-(-room // step) if ceil else room // step) + 1
    if ceil and (windows - 1) * step >= n + padding:
        windows -= 1  # no window begins behind the axis
    inside = set(range(n))
    return [{i * step - padding + dilation * tap for tap in range(taps)} & inside for i in range(windows)]


@functools.cache
def touched(size: float, taps: float, step: float, padding: float = 0, dilation: float = 1, ceil: float = 0) -> float:
    """Count the positions along an axis that sliding windows cover.

    Args:
        size: elements of the axis.
        taps: elements of a window.
        step: elements from one window to the next.
        padding: positions before and behind the axis.
        dilation: elements from one tap of a window to the next.
        ceil: whether a last window may reach beyond the axis.

    Returns:
        Positions.
    """
    seen = _windows(int(size), int(taps), int(step), int(padding), int(dilation), bool(ceil))
    return len(set().union(*seen))


@functools.cache
def pooled(
    size: float, taps: float, step: float, padding: float, dilation: float,
    pool_taps: float, pool_step: float, pool_padding: float, pool_dilation: float, pool_ceil: float,
) -> float:  # fmt: skip
    """Count the positions along an axis that enter a pooled result: windows cover the axis, and pooling windows cover
    these.

    Args:
        size: elements of the axis.
        taps: elements of a window.
        step: elements from one window to the next.
        padding: positions before and behind the axis.
        dilation: elements from one tap of a window to the next.
        pool_taps: windows in a pooling window.
        pool_step: windows from one pooling window to the next.
        pool_padding: windows before the first and behind the last.
        pool_dilation: windows from one tap of a pooling window to the next.
        pool_ceil: whether a last pooling window may reach beyond the windows.

    Returns:
        Positions.
    """
    seen = _windows(int(size), int(taps), int(step), int(padding), int(dilation), False)
    over = _windows(len(seen), int(pool_taps), int(pool_step), int(pool_padding), int(pool_dilation), bool(pool_ceil))
    return len(set().union(*(seen[i] for i in set().union(*over))))


def landing(size: float, taps: float, step: float, padding: float, dilation: float, results: float) -> float:
    """Count the positions along an axis that reach a result of a transposed convolution.

    Args:
        size: elements of the axis.
        taps: elements of a window.
        step: results from one position's window to the next.
        padding: results that are cut off before the first.
        dilation: results from one tap of a window to the next.
        results: elements of the result along the axis.

    Returns:
        Positions.
    """
    shifts = [int(dilation) * tap - int(padding) for tap in range(int(taps))]
    return sum(any(0 <= i * int(step) + shift < results for shift in shifts) for i in range(int(size)))


MARGIN = 4.0
"""Allowance for chance in units of sqrt(n). The standard deviation of a count of n independent elements is at most
sqrt(n) / 2, so this is eight of them. Two calls differ by more than that, 5.6 standard deviations of their difference,
once in 10**7 times."""


MANY = 1000
"""If at least so many units are all counted, this is no chance: no timed distribution gives that by chance."""


class _Shared:
    """Functions that need no values.

    Args:
        task: the task.
        case: the case.

    Attributes:
        bound: values of the parameters in this case, defaults included.
    """

    def __init__(self, task: Task, case: Case) -> None:
        self.task, self.case = task, case
        self.bound = {n: p.default for n, p in task.signature.parameters.items()} | dict(case.args)

    def is_tensor(self, name: str) -> bool:
        """See ``Counts``."""
        return name == "result" or name in self.task.takes or name in self.bound

    def _known(self, name: str) -> str:
        """Return the name of a tensor; raises ``DeclarationError`` if it is none."""
        if name.partition("[")[0] != "result" and name not in self.task.takes:
            raise DeclarationError(
                f"{self.task.id}: {name!r} is no tensor; tensors: result, {', '.join(self.task.takes)}"
            )
        return name

    def functions(self) -> Mapping[str, Callable[..., float]]:
        """See ``Counts``."""
        found: dict[str, Callable[..., float]] = {
            "first": self.first, "second": self.second, "given": self.given, "touched": touched, "pooled": pooled,
            "landing": landing,
        }  # fmt: skip
        for name in _COUNTED:
            found[name] = getattr(self, name)
        return found

    def _pair(self, argument: Operand, default: Operand) -> tuple[float, float]:
        """Return a pair, or a number twice; arguments as for ``first``."""
        value = self.bound.get(argument) if isinstance(argument, str) else argument
        if value is None and isinstance(default, str):
            value = self.bound.get(default)
        if isinstance(value, tuple | list) and len(value) == 2:
            return value[0], value[1]
        if isinstance(value, tuple | list) and len(value) == 1:
            return value[0], value[0]
        if isinstance(value, int | float):
            return value, value
        raise DeclarationError(f"{self.task.id}: {argument!r} is neither a number nor a pair")

    def first(self, argument: Operand, default: Operand = "") -> float:
        """Return the first element of a pair, or a number itself.

        Args:
            argument: the name of an argument, or a number.
            default: the argument to use if the other is ``None``.

        Returns:
            The number.
        """
        return self._pair(argument, default)[0]

    def second(self, argument: Operand, default: Operand = "") -> float:
        """Return the second element of a pair, or a number itself; arguments as for ``first``."""
        return self._pair(argument, default)[1]

    def given(self, name: str) -> float:
        """Return 1 if a call passes the argument or its default is not ``None``, else 0."""
        if name in self.task.takes and name not in self.case.args:
            return float(not self.task.takes[name].optional or name in self.case.given)
        return float(self.bound.get(name) is not None)


_COUNTED = ("numel", "bytes", "itemsize", "size", "overlap", "nonzero", "distinct", "differing", "above", "numbers",
            "under", "outside", "picked", "to_nan", "changed", "used")  # fmt: skip
"""Functions that ``Values`` and ``Sizes`` implement differently."""


class Values(_Shared):
    """Counts in the tensors of one call and in its results.

    Args:
        task: the task.
        case: the case.
        args: the arguments of the call.
        expected: the reference's results; ``None`` where no function needs them.
        single_call: whether the counts are for this call only. Otherwise counts that depend on values are lowered by
            ``MARGIN``, so that they also hold for other values from the same distributions.
    """

    def __init__(
        self, task: Task, case: Case, args: Mapping[str, Any], expected: Expected | None, single_call: bool = True
    ) -> None:  # fmt: skip
        super().__init__(task, case)
        self.args, self.expected, self.single_call = args, expected, single_call

    def _counted(self, count: torch.Tensor | float, of: float, weight: float = 1.0) -> float:
        """Return a count that depends on values, lowered by the margin unless it is for this call only.

        Args:
            count: elements that were counted in this call.
            of: number of units that were drawn independently of each other.
            weight: elements that one unit decides.

        Returns:
            Elements.
        """
        found = float(count)
        if self.single_call or (found >= of * weight and of >= MANY):
            return found  # all of many units count: this does not depend on chance
        return max(0.0, found - MARGIN * weight * math.sqrt(of))

    def _value(self, name: Operand) -> Any:
        """Return the tensor or argument of a name (``result``, ``result[1]`` for results), or a number itself."""
        if not isinstance(name, str):
            return name
        base, _, place = name.partition("[")
        if base == "result":
            outputs = self._results().native
            index = int(place.rstrip("]") or 0)
            if index >= len(outputs):
                raise DeclarationError(
                    f"{self.task.id}: there is no {name}; the reference returns {len(outputs)} results"
                )
            return outputs[index]
        return self.args.get(name, None if name in self.task.takes else self.bound.get(name))

    def _results(self) -> Expected:
        """Return the reference's results; raises ``DeclarationError`` without them."""
        if self.expected is None:
            raise DeclarationError(f"{self.task.id}: the expression needs the results of a call")
        return self.expected

    def _tensor(self, name: Operand) -> torch.Tensor:
        """Return the tensor of a name; raises ``DeclarationError`` if the call passes none."""
        value = self._value(name)
        if not isinstance(value, torch.Tensor):
            raise DeclarationError(f"{self.task.id}: {name!r} is no tensor of this call")
        return value

    def numel(self, name: str) -> float:
        """Return the elements of a tensor; 0 if the call passes none."""
        value = self._value(self._known(name))
        return value.numel() if isinstance(value, torch.Tensor) else 0

    def itemsize(self, name: str) -> float:
        """Return the bytes of one element."""
        return self._tensor(name).element_size()

    def bytes(self, name: str) -> float:
        """Return the bytes of a tensor; 0 if the call passes none."""
        value = self._value(self._known(name))
        return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0

    def size(self, name: str, axis: float) -> float:
        """Return the size of a tensor along an axis."""
        return self._tensor(name).shape[int(axis)]

    def overlap(self, one: str, other: str) -> float:
        """Return the number of index tuples that are valid for both of two tensors of one rank."""
        pairs = zip(self._tensor(one).shape, self._tensor(other).shape, strict=True)
        return math.prod(min(pair) for pair in pairs)

    def nonzero(self, name: Operand) -> float:
        """Count the elements that are not zero or ``False``; of a number 1 or 0, of an omitted argument 0."""
        value = self._value(name)
        if not isinstance(value, torch.Tensor):
            return float(bool(value))
        return self._counted(value.count_nonzero(), value.numel())

    def distinct(self, name: str, but: float | None = None) -> float:
        """Count the different values of an integer tensor.

        Args:
            name: the tensor.
            but: a value that does not count.

        Returns:
            Values.
        """
        found = self._tensor(name).unique()
        count = len(found) if but is None else int((found != but).sum())
        return count if self.single_call else max(0.0, count - MARGIN * math.sqrt(count))

    def differing(self, name: str, value: float) -> float:
        """Count the elements that differ from a number."""
        found = self._tensor(name)
        return self._counted((found != value).sum(), found.numel())

    def above(self, name: str, bound: float) -> float:
        """Count the elements that are greater than a number."""
        found = self._tensor(name)
        return self._counted((found > bound).sum(), found.numel())

    def numbers(self, name: str) -> float:
        """Count the elements that are not NaN; 0 if the call passes no tensor."""
        found = self._value(name)
        if not isinstance(found, torch.Tensor):
            return 0
        return self._counted((~found.isnan()).sum(), found.numel())

    def to_nan(self, name: str, axis: str) -> float:
        """Count the elements up to and with the first NaN of every line along an axis.

        Args:
            name: the tensor.
            axis: the argument that holds the axis.

        Returns:
            Elements.
        """
        found = self._tensor(name)
        nan = found.isnan()
        if not nan.any():
            return found.numel()
        seen = nan.int().cumsum(int(self.bound[axis])) - nan.int()
        return self._counted((seen == 0).sum(), found.numel())

    def _mask(self, mask: Operand, other: Operand | None = None) -> Any:
        """Return where ``mask``, or ``mask & other``, is not zero; of a number the number."""
        value = self._value(mask)
        if other is not None:
            value = value & self._tensor(other)
        return value if not isinstance(value, torch.Tensor) else value != 0

    def _beneath(self, name: str, mask: Any) -> float:
        """Count the elements of a tensor that meet a true element of ``mask`` when both are broadcast."""
        value = self._value(name)
        if not isinstance(value, torch.Tensor):
            return 0
        if not isinstance(mask, torch.Tensor):
            return value.numel() * bool(mask)
        shape = np.broadcast_shapes(value.shape, mask.shape)  # torch's imports 500 modules
        found = mask.expand(shape)
        wide = (1,) * (len(shape) - value.dim()) + tuple(value.shape)
        for axis, (n, broadcast) in enumerate(zip(wide, shape, strict=True)):
            if n != broadcast:
                found = found.any(axis, keepdim=True)
        units = min(mask.numel(), value.numel())
        return self._counted(found.count_nonzero(), units, value.numel() / max(1, units))

    def under(self, name: str, mask: Operand, other: Operand | None = None) -> float:
        """Count the elements that meet a nonzero element of ``mask`` when both are broadcast against each other.

        Args:
            name: the tensor whose elements count; 0 if the call passes none.
            mask: a tensor, or a number.
            other: an integer tensor; the mask is then ``mask & other``.

        Returns:
            Elements.
        """
        return self._beneath(name, self._mask(mask, other))

    def outside(self, name: str, mask: Operand) -> float:
        """Count the elements that meet a zero of ``mask`` when both are broadcast against each other."""
        found = self._mask(mask)
        return self._beneath(name, ~found if isinstance(found, torch.Tensor) else not found)

    def picked(self, name: str, axis: str, index: str, mask: str) -> float:
        """Count the different elements of a tensor that ``torch.gather`` reads.

        Args:
            name: the tensor that is read.
            axis: the argument that holds the axis.
            index: the positions.
            mask: where it is true, nothing is read.

        Returns:
            Elements.
        """
        positions = self._tensor(index)
        kept = (~self._tensor(mask)).expand(positions.shape).int()
        times = torch.zeros(self._tensor(name).shape, dtype=torch.int32, device=positions.device)
        count = int(times.scatter_add_(int(self.bound[axis]), positions, kept).count_nonzero())
        return count if self.single_call else max(0.0, count - MARGIN * math.sqrt(count))

    def changed(self, name: str) -> float:
        """Count the elements of a tensor written in place whose value changes; 0 if the call passes no such tensor."""
        new = self._results().native_written.get(name)
        if new is None:
            return 0
        return self._counted(changes(self._tensor(name), new), new.numel())

    def used(self, name: str) -> float:
        """Count the elements on which the first result, which is linear in the tensor, depends: those with a gradient."""
        resolved = reference.resolve(self.args, str(self._tensor(name).device))
        leaf = resolved[name].detach().requires_grad_()
        result = reference.called(self.task, resolved | {name: leaf})
        result = result[0] if isinstance(result, tuple) else result
        if not result.numel():
            return 0
        # Random factors, so that weights of opposite signs do not cancel in the gradient.
        generator = torch.Generator(result.device).manual_seed(0)
        factors = torch.randn(result.shape, generator=generator, device=result.device).to(result.dtype)
        (gradient,) = torch.autograd.grad(result, leaf, factors)
        return self._counted(gradient.count_nonzero(), gradient.numel())


class Sizes(_Shared):
    """Replaces ``Values`` where there are no values: every count is a size. For comparing cases only, no lower
    bound.
    """

    def _numel(self, name: Operand) -> int:
        """Return the elements of a tensor; of a result, the elements of the largest tensor; of anything else 0."""
        if isinstance(name, str) and name in self.task.takes:
            t = self.task.takes[name]
            absent = name in self.case.args or (t.optional and name not in self.case.given)
            return 0 if absent else math.prod(shape_of(t, self.case.axes))
        if isinstance(name, str) and name.startswith("result"):
            # The reference has not run, so the size of the result is not known.
            known = [self._numel(n) for n in self.task.takes]
            sizes = [math.prod(v) if isinstance(v, tuple) else v for v in self.case.axes.values()]
            return max(known or [*sizes, self.bound.get("steps") or 0])
        return 0

    def numel(self, name: str) -> float:
        """Return the elements of a tensor."""
        return self._numel(self._known(name))

    def itemsize(self, name: str) -> float:
        """Return the bytes of one element; of a result, 4."""
        return (
            DTYPES[self.case.dtypes.get(name, self.task.takes[name].dtype)].itemsize if name in self.task.takes else 4
        )

    def bytes(self, name: str) -> float:
        """Return the bytes of a tensor."""
        return self._numel(self._known(name)) * self.itemsize(name)

    def size(self, name: str, axis: float) -> float:
        """Return the size along an axis; of a result, 1."""
        return shape_of(self.task.takes[name], self.case.axes)[int(axis)] if name in self.task.takes else 1

    def overlap(self, one: str, other: str) -> float:
        """Return the elements of the smaller tensor."""
        return min(self._numel(one), self._numel(other))

    def nonzero(self, name: Operand) -> float:
        """Return the elements of a tensor; of a number 1 or 0."""
        value = self.bound.get(name) if isinstance(name, str) else name
        return self._numel(name) or float(bool(value) if isinstance(value, int | float) else False)

    def distinct(self, name: str, but: float | None = None) -> float:
        """Return the elements of the tensor."""
        return self._numel(name)

    def differing(self, name: str, value: float) -> float:
        """Return the elements of the tensor."""
        return self._numel(name)

    def above(self, name: str, bound: float) -> float:
        """Return the elements of the tensor."""
        return self._numel(name)

    def numbers(self, name: str) -> float:
        """Return the elements of the tensor."""
        return self._numel(name)

    def under(self, name: str, mask: Operand, other: Operand | None = None) -> float:
        """Return the elements of the tensor."""
        return self._numel(name)

    def outside(self, name: str, mask: Operand) -> float:
        """Return the elements of the tensor."""
        return self._numel(name)

    def to_nan(self, name: str, axis: str) -> float:
        """Return the elements of the tensor."""
        return self._numel(name)

    def picked(self, name: str, axis: str, index: str, mask: str) -> float:
        """Return the elements of the positions."""
        return self._numel(index)

    def changed(self, name: str) -> float:
        """Return the elements of the tensor."""
        return self._numel(name)

    def used(self, name: str) -> float:
        """Return the elements of the tensor."""
        return self._numel(name)


def changes(old: torch.Tensor, new: torch.Tensor) -> int:
    """Count the elements in which two tensors differ; NaN equals NaN, and zeros of both signs are equal."""
    old = old.to(new.device)
    differs = old != new
    if new.dtype.is_floating_point or new.dtype.is_complex:
        differs &= ~(old.isnan() & new.isnan())
    return int(differs.count_nonzero())
