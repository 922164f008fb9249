"""Judges floating point: the error against the exact fp64 answer may be a fixed tolerance or k times torch's own error.

Where that fails, the conditioning of the problem is measured (see ``loosen``): torch's error may be small by chance,
and no fair order of summation may fail.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from kbx_env.grading import compulsory_work, gpu_turns, reference
from kbx_env.grading.judge.exact import same_values
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.judge.structure import pairs
from kbx_env.grading.reference import Expected
from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Task

CLIP = 16.0
"""Elements count for the root-mean-square with at most this many medians, so that one huge element does not raise the
tolerance of all others."""
GROSS = 16.0
"""An element whose error is more than this many tolerances is not wrong by chance."""
REUSED = 8.0
"""Tasks with more operations than this for every number that is read are matrix products."""
COARSE = 2.0
"""Largest tolerance in units of a 16-bit result, whatever the task declares."""
LUCK = 12.0
"""Factor by which the root-mean-square of ``reference.DRAWS`` draws may lie below its expectation: it is below 1/12 in
one of 10**8 elements (chi-square of eight degrees of freedom). A product of 8192 x 8192 has 7 x 10**7 elements, and
thirty of them are judged."""
MANY = 64
"""Draws of the noise where ``reference.DRAWS`` of them leave an answer nearly right."""
UNLUCKY = 3.0
"""Largest error, in units of the tolerance, for which more draws are tried: the root-mean-square of eight normal numbers is below
a third of its expectation once in 1000 times, and below a half once in 50."""
NEIGHBOURS = 0.5
"""Least noise of an element, as a share of the median noise of its row and column, limited by ``LUCK``."""
BLOCK = 256
"""Numbers that one program of a fair kernel adds up, at least, before it adds their sum to a total."""
PARTIAL_SUMS = 0.115
"""A total of L equal numbers, added one after the other, has a standard deviation of this times sqrt(L), in units of eps: the k-th
partial sum is rounded by a standard deviation of 0.2 eps times its own size, and the sum over (k / L)^2 is L / 3."""
SIGMAS = 6.0
"""Standard deviations that such a total may be off."""
SAMPLED_BITS = 16
"""A typical size is measured of about two to the power of so many elements, if a tensor has more."""
SAMPLED = 4096
"""Elements at most at which ``plainly_wrong`` looks; it asks for a gross error in one of ``MOSTLY`` of them."""
MOSTLY = 4
PIECE = 1 << 21
"""Elements of a tensor that are compared at a time: 16 MiB in fp64, so that all temporaries fit into the cache of a GPU."""
JUMP = 2.0**20
"""A result that changes by more than this per unit of input noise is discontinuous there (floor, sign, a mask)."""


@dataclass(frozen=True)
class _Scale:
    """The local scale of the elements of one tensor.

    Attributes:
        least: what the scale is at least: 0, or the root-mean-square of all elements.
        own: whether an element's own size is ``Row.size``, where there is one.
        finite: whether all elements are finite: then no kernels are needed to tell NaN and infinity from the others.
    """

    least: float
    own: bool
    finite: bool

    @classmethod
    def of(
        cls, scale: str, exact: torch.Tensor, size: torch.Tensor | None = None, native: torch.Tensor | None = None
    ) -> _Scale:  # fmt: skip
        """Measure it.

        Args:
            scale: ``element`` for an element's own size, ``tensor`` for at least the root-mean-square of all elements.
            exact: the exact answer, fp64.
            size: as in ``Row``.
            native: torch's own answer. Where not even the size of an element is right in it, the exact answer may have rounding
                noise in place of a zero, which must not count as a typical element: torch's error is without bound in such units.

        Returns:
            The scale.
        """
        flat = exact.reshape(-1)
        if not flat.numel():
            return cls(0.0, size is not None and scale == "element", True)
        peak = torch.linalg.vector_norm(flat, math.inf)
        # One part of a complex product cancels however exactly its terms are rounded.
        if scale == "element":
            return cls(0.0, size is not None, math.isfinite(float(peak)))
        every = _sampled(flat)
        sample = _finite_size(flat[every])
        if native is not None:
            right = sample[(native.reshape(-1)[every].to(torch.float64) - flat[every]).abs() < sample]
            sample = right if right.numel() else sample
        # Read at once: other gradings that share a GPU have their turn before each number arrives.
        largest, median, norm = torch.stack([peak, _median_above_zero(sample), torch.linalg.vector_norm(flat)]).tolist()
        cap = min(CLIP * median, sys.float_info.max)
        if largest <= cap and math.isfinite(norm):
            return cls(norm / math.sqrt(flat.numel()), False, True)
        if not cap:
            return cls(0.0, False, math.isfinite(largest))
        # In units of the cap: squares of numbers above 1e154 would be infinite, and so would the tolerance.
        squares = torch.stack([_finite_size(part).clamp_max(cap).div_(cap).square().sum() for part in flat.split(PIECE)])
        return cls(cap * float((squares.sum() / flat.numel()).sqrt()), False, math.isfinite(largest))

    def magnitude(self, exact: torch.Tensor, size: torch.Tensor | None) -> torch.Tensor:
        """Return the scale of each element, a new tensor in fp64; at least ``least``, also if an element is not finite."""
        if self.own and size is not None:
            return torch.where(torch.isfinite(exact), size.to(torch.float64), 0.0)
        found = exact.abs() if self.finite else _finite_size(exact)
        return found.clamp_min_(self.least) if self.least else found

    def units(self, exact: torch.Tensor, dtype: torch.dtype, size: torch.Tensor | None) -> torch.Tensor:
        """Return the unit of the tolerance of each element: eps(dtype) times its local scale, in fp64."""
        return self.magnitude(exact, size).mul_(torch.finfo(dtype).eps).add_(_least_unit(dtype))


Tolerance: TypeAlias = tuple[_Scale, float]
"""Scale of the elements of a tensor, and the tolerance in units."""


def _least_unit(dtype: torch.dtype) -> float:
    """Return the unit of the tolerance of an element of no size."""
    # Kernels do not flush the subnormals of fp16; those of the other dtypes may be flushed to zero.
    return 2.0**-24 if dtype is torch.float16 else torch.finfo(dtype).smallest_normal


def _sampled(flat: torch.Tensor) -> slice:
    """Return the elements of which a typical size is measured: all of a small tensor, evenly spread ones of a large tensor.

    An odd step meets all columns of a matrix with an even number of them. The median of so many is right to about half a percent.
    """
    return slice(None, None, flat.numel() >> SAMPLED_BITS | 1)


def _median_above_zero(sizes: torch.Tensor) -> torch.Tensor:
    """Return the median of the numbers above zero, the lower of two; 0 where there is none. Waits for no GPU.

    Args:
        sizes: finite, at least 0.
    """
    if sizes.device.type == "cpu":  # selecting takes a tenth of sorting there
        above = sizes[sizes > 0]
        return above.median() if above.numel() else sizes.new_zeros(())
    ordered = sizes.sort().values
    count = (ordered > 0).sum()
    middle = len(ordered) - count + (count - 1).clamp_min(0) // 2
    return ordered[middle.clamp_max(len(ordered) - 1).reshape(1)].reshape(())


def _finite_size(exact: torch.Tensor) -> torch.Tensor:
    """Return absolute values; 0 for elements that are not finite."""
    return torch.where(torch.isfinite(exact), exact.abs(), 0.0)


def _strict(truth: Close, dtype: torch.dtype, native: torch.Tensor, exact: torch.Tensor, scale: _Scale,
            size: torch.Tensor | None) -> float:  # fmt: skip
    """Return the tolerance in units: the declared one, or k times torch's own error.

    Args:
        truth: the tolerances.
        dtype: of the answer.
        native: torch's own answer.
        exact: the exact answer, fp64.
        scale: of its elements.
        size: as in ``Row``.
    """
    given, right = native.reshape(-1), exact.reshape(-1)
    sizes = None if size is None else size.expand(exact.shape).reshape(-1)

    def errors(part: slice) -> torch.Tensor:
        """Return torch's own errors in units of the tolerance."""
        units = scale.units(right[part], dtype, None if sizes is None else sizes[part])
        return torch.sub(given[part], right[part]).abs_().div_(units)

    def highest(found: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """Return the largest of what is found in torch's own errors."""
        worst = [found(errors(part)).max() for part in _pieces(right)]
        return float(torch.stack(worst).max()) if worst else 0.0

    if truth.scale == "element":
        # Relative to its own size torch's error is huge too where a sum cancels; it must not raise the tolerance of all
        # others.
        own = errors(_sampled(right))
        own = own[torch.isfinite(own)]
        worst = float(own.kthvalue(math.ceil(0.99 * own.numel())).values) if own.numel() else 0.0
    else:
        worst = highest(lambda own: own)
        if not math.isfinite(worst):
            worst = highest(lambda own: torch.where(torch.isfinite(own), own, 0.0))
    return max(_declared(truth, dtype), truth.k * worst)


def _declared(truth: Close, dtype: torch.dtype) -> float:
    """Return the declared tolerance of results of a dtype, in units."""
    # A 16-bit result is rounded once. More of its coarse units would hide operands that were rounded to fewer bits.
    return truth.ulps if torch.finfo(dtype).bits >= 32 else min(truth.ulps, COARSE)


def declared_tolerance(truth: Close, dtype: torch.dtype, exact: torch.Tensor, size: torch.Tensor | None = None) -> Tolerance:
    """Return the declared tolerance, whatever torch's own error is.

    Args:
        truth: the tolerances.
        dtype: of the answer.
        exact: the exact answer, fp64.
        size: as in ``Row``.

    Returns:
        The scale of the elements, and the tolerance in units of eps(dtype) times that scale.
    """
    return _Scale.of(truth.scale, exact, size), _declared(truth, dtype)


def _ratio(got: torch.Tensor, exact: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Return the error of each element in units of what is allowed; infinite where only one of the two is finite.

    Args:
        got: the answer.
        exact: the exact answer, fp64.
        limit: allowed error, fp64.
    """
    info = torch.finfo(got.dtype)
    got64 = got.to(torch.float64)
    # Near overflow the rounded exact answer may be the largest number or infinity; both are right.
    beyond = torch.isfinite(exact) & (exact.abs() > info.max * (1 - info.eps))
    over = beyond & (torch.sign(got64) == torch.sign(exact)) & (got64.abs() >= info.max * 0.99)
    ratio = (got64 - exact).abs() / limit
    return torch.where(same_values(got64, exact) | over, 0.0, torch.where(torch.isfinite(ratio), ratio, math.inf))


def _tolerance(
    truth: Close, dtype: torch.dtype, native: torch.Tensor, exact: torch.Tensor, size: torch.Tensor | None
) -> Tolerance:
    """Return the tolerance for answers of a dtype; arguments as for ``_strict``, and ``exact`` in fp64."""
    native = native.to(exact.device)
    scale = _Scale.of(truth.scale, exact, size, native)
    return scale, _strict(truth, dtype, native, exact, scale, size)


def misses(
    truth: Close, got: torch.Tensor, exact: torch.Tensor, native: torch.Tensor, slack: torch.Tensor | float = 0.0,
    size: torch.Tensor | None = None, tolerance: Tolerance | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compare one tensor with the exact answer.

    Args:
        truth: the tolerances.
        got: the answer.
        exact: the exact answer, in fp64.
        native: torch's own answer.
        slack: absolute error that is allowed in any case, a number or per element.
        size: as in ``Row``.
        tolerance: from ``_tolerance``, if it was measured before.

    Returns:
        The error in units of the tolerance (fp64), and the mask of wrong elements.
    """
    exact = exact.to(torch.float64)
    scale, factor = tolerance or _tolerance(truth, got.dtype, native, exact, size)
    unit = scale.units(exact, got.dtype, size)
    limit = torch.maximum(unit * factor, torch.as_tensor(slack, device=unit.device))
    ratio = _ratio(got.to(exact.device), exact, limit)
    return ratio, ratio > 1.0


def all_close(
    truth: Close, got: torch.Tensor, exact: torch.Tensor, native: torch.Tensor, size: torch.Tensor | None = None,
    tolerance: Tolerance | None = None,
) -> bool:  # fmt: skip
    """Return whether ``misses`` finds no wrong element without slack; arguments as there, ``exact`` in fp64."""
    tolerance = tolerance or _tolerance(truth, got.dtype, native, exact.to(torch.float64), size)
    return _all_within(got, exact, tolerance, size) or _all_correct(got, exact, tolerance, size)


def _all_correct(got: torch.Tensor, exact: torch.Tensor, tolerance: Tolerance, size: torch.Tensor | None) -> bool:
    """Return whether ``misses`` counts no element as wrong.

    Like ``_all_within`` it goes through the tensors in pieces: the dozen temporaries of a large result would fill a GPU, and
    pieces stay in its cache.

    Args:
        got: the answer.
        exact: the exact answer.
        tolerance: from ``_tolerance``.
        size: as in ``Row``.
    """
    given, right, sizes = _flat(got, exact, size)
    scale, factor = tolerance
    found = []
    for part in _pieces(right):
        limit = scale.units(right[part], got.dtype, None if sizes is None else sizes[part]).mul_(factor)
        found.append((_ratio(given[part], right[part], limit) <= 1.0).all())
    return not found or bool(torch.stack(found).all())


def _all_within(got: torch.Tensor, exact: torch.Tensor, tolerance: Tolerance, size: torch.Tensor | None) -> bool:
    """Return whether the error of every element is within its limit; arguments as for ``_all_correct``.

    A piece takes two kernels where no error is larger than the smallest limit, else six to eight; ``_all_correct`` takes three
    dozen. The two functions differ only where an element is NaN, infinite or wrong: here NaN and infinity are never within a limit.
    """
    given, right, sizes = _flat(got, exact, size)
    scale, factor = tolerance
    by_size, constant = factor * torch.finfo(got.dtype).eps, factor * _least_unit(got.dtype)
    left = _pieces(right)
    # A 16-bit result has a tolerance of two roundings at most, so that its largest elements are off by more than this.
    if left and scale.least and torch.finfo(got.dtype).bits >= 32:
        worst = [torch.linalg.vector_norm(torch.sub(given[part], right[part]), math.inf) for part in left]
        small = (torch.stack(worst) <= by_size * scale.least + constant).tolist()
        left = [part for part, is_small in zip(left, small, strict=True) if not is_small]
    over = []
    for part in left:
        allowed = scale.magnitude(right[part], None if sizes is None else sizes[part])
        over.append(torch.sub(given[part], right[part]).abs_().sub_(allowed, alpha=by_size).amax())
    return not over or bool((torch.stack(over) <= constant).all())


def _flat(
    got: torch.Tensor, exact: torch.Tensor, size: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return an answer, the exact answer in fp64 and the sizes of its elements on one device, without their shape."""
    exact = exact.to(torch.float64)
    sizes = None if size is None else size.expand(exact.shape).reshape(-1)
    return got.to(exact.device).reshape(-1), exact.reshape(-1), sizes


def _pieces(flat: torch.Tensor) -> list[slice]:
    """Return the parts of a tensor that are compared at a time."""
    return [slice(k, k + PIECE) for k in range(0, flat.numel(), PIECE)]


def _operations(truth: Close, task: Task, case: Case, expected: Expected) -> float:
    """Return the operations on the way to one result."""
    if not truth.path:
        return compulsory_work.operations(task, case) / max(1, sum(o.numel() for o in expected.native))
    path = compulsory_work.expression(task, case, truth.path)
    # Each part of a complex product is the sum of two products.
    return 2 * path if any(o.is_complex() for o in expected.native) else path


def _products(truth: Close, task: Task, case: Case, expected: Expected) -> float:
    """Return the operations per result of a matrix product, which may use tensor cores; 0 for other tasks."""
    read = sum(compulsory_work.numels(task, case).values())
    return _operations(truth, task, case, expected) if compulsory_work.operations(task, case) > REUSED * read else 0.0


def growth(truth: Close, task: Task, case: Case, expected: Expected) -> float:
    """Return by how much rounding errors accumulate on the longest fair path: the square root of the work per result.

    A plain loop over K products of rms s has an error of 0.20 K s eps (each of the K partial sums, of size s sqrt(k),
    is rounded once); ``sensitivity`` of the same sum is 0.82 s sqrt(K). Their ratio, 0.25 sqrt(K), is one standard
    deviation; the work is 2 K, so its square root is nearly six of them. A tensor core truncates instead of rounding
    (Fasi et al., 2021), once in 16 products: its errors have one sign and grow in proportion to K.

    Where results share operations, ``truth.path`` counts them in full for each: the error of a solution does not shrink when
    the same factorisation serves more right-hand sides.

    Args:
        truth: the tolerances.
        task: the task.
        case: the case.
        expected: the reference's answers.

    Returns:
        A factor of eps, from 4 to 1024.
    """
    results = max(1, sum(o.numel() for o in expected.native))
    read = sum(compulsory_work.numels(task, case).values()) / results
    # Only matrix products go through a tensor core: the larger factor does not apply to a plain sum.
    products = _products(truth, task, case, expected)
    # With 256 TF32 still fails: the noise of its operands is 2**12 fp32 epsilons, five times what a typical element may
    # have. 16-bit operands never use TF32, so they may have more: on an H200, products of depth 4096 and 8192 needed
    # 1.1 and 2.3 times the factor for fp32, at 16 and 2000 of 10**8 elements.
    half = all(o.dtype in reference.HALVES for o in expected.native)
    cut = min(1024.0, products / 8) if half else min(256.0, products / 32)
    return max(min(64.0, max(4.0, math.sqrt(max(_operations(truth, task, case, expected), read)))), cut)


def loosen(
    truth: Close, moved: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, grown: float, size: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the absolute error that rounding in the precision of the arithmetic may cause, from the measured
    conditioning.

    Args:
        truth: the tolerances.
        moved: change of each element per unit of input noise, from ``reference.Perturbations``.
        exact: the exact answer, fp64.
        dtype: of the result; the arithmetic is fp32, or fp64 for fp64 results.
        grown: from ``growth``.
        size: as in ``Row``.

    Returns:
        Allowed error per element, fp64.
    """
    eps = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
    scale = _Scale.of(truth.scale, exact, size).units(exact, dtype, size) / torch.finfo(dtype).eps
    # Relative to its own size a sum that cancels changes without bound; a jump is large relative to the other elements.
    usual = _Scale.of("tensor", exact).magnitude(exact, None)
    jumped = moved > JUMP * (usual + torch.finfo(dtype).smallest_normal)
    amplified = torch.where(jumped, 0.0, moved / scale)
    if not amplified.numel():
        return amplified
    flat = amplified.flatten()
    flat = flat[_sampled(flat)]
    # A few steep elements must not raise the tolerance of the rest: they keep their own, the others get the typical
    # one.
    low = flat[flat <= flat.kthvalue(max(1, math.ceil(0.95 * flat.numel()))).values]
    typical = float(low.square().mean().sqrt())
    return eps * grown * scale * amplified.clamp_min(3.0 * typical)


def _allowed(
    truth: Close, task: Task, case: Case, expected: Expected, moved: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype,
    size: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Return the absolute error that a result of a call may have; arguments as for ``loosen`` and ``growth``."""
    found = loosen(truth, moved, exact, dtype, growth(truth, task, case, expected), size)
    if blocks := _blocks_of_sum(truth, task, case, expected):
        # Noise of the inputs averages out in a sum of numbers of one sign; the rounding of its partial sums does not.
        eps = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
        units = _Scale.of(truth.scale, exact, size).units(exact, dtype, size) / torch.finfo(dtype).eps
        found = torch.maximum(found, eps * SIGMAS * PARTIAL_SUMS * math.sqrt(blocks) * units)
    return found


def _blocks_of_sum(truth: Close, task: Task, case: Case, expected: Expected) -> float:
    """Return how many blocks of numbers go into one result, for tasks that are no matrix products; 0 where it is one block."""
    if _products(truth, task, case, expected):
        return 0.0
    read = sum(compulsory_work.numels(task, case).values()) / max(1, sum(o.numel() for o in expected.native))
    # A look-up reads a few of many numbers: no more are added up than there are operations.
    added = min(read, _operations(truth, task, case, expected))
    return added / BLOCK if added > BLOCK else 0.0


def without_luck(moved: torch.Tensor) -> torch.Tensor:
    """Correct a product's measured noise where it is small by chance.

    An element of a matrix product has about the noise of its row and its column. With a few draws of noise, some of
    millions of elements seem to have almost none, and a correct kernel would fail there.

    Args:
        moved: root-mean-square of ``reference.DRAWS`` draws; with fewer than two axes it is not changed.

    Returns:
        The corrected root-mean-square, of the same shape.
    """
    if moved.ndim < 2 or not moved.numel():
        return moved
    usual = torch.minimum(moved.median(-1, keepdim=True).values, moved.median(-2, keepdim=True).values)
    return torch.maximum(moved, torch.minimum(NEIGHBOURS * usual, LUCK * moved))


def _farther(exact: torch.Tensor, native: torch.Tensor, rival: torch.Tensor) -> torch.Tensor:
    """Return the elements of torch's own answer, and those of a rival where their error is larger and finite."""
    native, rival = native.to(exact.device), rival.to(exact.device)
    error = (rival.to(torch.float64) - exact).abs()
    return torch.where(torch.isfinite(error) & (error > (native.to(torch.float64) - exact).abs()), rival, native)


def describe(name: str, ratio: torch.Tensor, wrong: torch.Tensor, got: torch.Tensor) -> Ruling:
    """Return a ruling that tells how large the error is and how many elements have one, but no values.

    Args:
        name: of the tensor.
        ratio: error of each element in units of the tolerance.
        wrong: mask of the wrong elements.
        got: the answer.

    Returns:
        The ruling, not passed.
    """
    worst = float(ratio.max())
    share = 100.0 * float(wrong.to(torch.float64).mean())
    odd = got[wrong.to(got.device)]
    if odd.numel() and (math.isinf(worst) or not bool(torch.isfinite(odd).all())):
        text = f"wrong values: {name} holds NaN or infinity where the result is finite (or the reverse)"
        return Ruling(False, text, worst, 1.0)
    text = f"wrong values: {name} is off by {worst:.3g} times the tolerance, {share:.3g} % of the elements"
    return Ruling(False, text, worst, 1.0)


class Measured:
    """What the judge measures of a call, whatever the answer is: kept where several answers to one call are judged.

    Args:
        keeps: whether allowed errors are kept, too. The answers to a call at a timed size are judged one by one, each with a
            ``Measured`` of its own: kept tensors would fill a GPU.
    """

    def __init__(self, keeps: bool = True) -> None:
        self._keeps = keeps
        self._tolerances: dict[tuple[int, torch.dtype], Tolerance] = {}
        self._moved: dict[int, list[torch.Tensor]] = {}
        self._perturbations: reference.Perturbations | None = None
        self._slack: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}

    def tolerance(self, index: int, dtype: torch.dtype, make: Callable[[], Tolerance]) -> Tolerance:
        """Return the tolerance of a result for answers of a dtype."""
        if (index, dtype) not in self._tolerances:
            self._tolerances[index, dtype] = make()
        return self._tolerances[index, dtype]

    def moved(self, draws: int, make: Callable[[], reference.Perturbations], product: bool) -> list[torch.Tensor]:
        """Return the change of each result per unit of input noise, over a number of draws.

        Args:
            draws: a number that was asked for before, or a larger one.
            make: begins to perturb the call.
            product: whether to correct luck as in a matrix product.
        """
        if draws not in self._moved:
            if self._perturbations is None:
                self._perturbations = make()
            try:
                outputs, written = self._perturbations.root_mean_square(draws)
            except BaseException:
                self._perturbations = None  # a call that failed half way may be in some of its sums
                raise
            self._moved[draws] = [without_luck(m) if product else m for m in (*outputs, *written.values())]
        return self._moved[draws]

    def slack(self, index: int, dtype: torch.dtype, draws: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the error that follows from it for a result (``loosen``)."""
        if not self._keeps:
            return make()
        if (index, dtype, draws) not in self._slack:
            self._slack[index, dtype, draws] = make()
        return self._slack[index, dtype, draws]


def _of_result(truth: Close, index: int) -> Close:
    """Return the tolerances of the result with this index."""
    return replace(truth, ulps=truth.of[index % len(truth.of)]) if truth.of else truth


def _as_judged(truth: Close, got: torch.Tensor) -> torch.Tensor:
    """Return an answer in the dtype whose tolerance it has."""
    # The nearest fp32 number has the fp32 tolerance; rounding changes the error by half a unit of it at most.
    return got.to(torch.float32) if truth.arithmetic == "f32" and got.dtype is torch.float64 else got


def meets_declared(truth: Close, expected: Expected, answer: Answer) -> bool:
    """Return whether ``rule`` passes an answer whatever torch's own error is: all of it is within the declared tolerance.

    That holds for 97 of 100 results of our experts, and spares running the reference in the declared dtypes.

    Args:
        truth: the tolerances.
        expected: from ``reference.exact_answer``.
        answer: an answer that ``structure.rule`` has passed.

    Returns:
        False also for an answer with integers, which are compared with torch's own.
    """
    for i, (_, got, exact, native, size) in enumerate(pairs(expected, answer)):
        if not got.dtype.is_floating_point:
            return False
        gpu_turns.yield_gpu()
        this = _of_result(truth, i)
        got, exact = _as_judged(this, got), exact.to(torch.float64)
        if not all_close(this, got, exact, native, size, declared_tolerance(this, got.dtype, exact, size)):
            return False
    return True


def _noise(
    truth: Close, task: Task, case: Case, args: Mapping[str, Any], expected: Expected, device: str,
    keep: bool | torch.Tensor | None, draws: int, measured: Measured,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the change of each result per unit of input noise; arguments as for ``rule`` and ``reference.Perturbations``."""
    product = draws > 1 and _products(truth, task, case, expected) > 0
    begin = partial(reference.Perturbations, task, case, args, expected, device, keep=keep)
    return measured.moved(draws, begin, product)


def plainly_wrong(
    truth: Close, task: Task, case: Case, args: Mapping[str, Any], expected: Expected, answer: Answer, measured: Measured,
    device: str = "cpu", *, keep: bool | torch.Tensor | None = None,
) -> bool:  # fmt: skip
    """Return whether a sample of an answer's elements is so wrong that ``rule`` refuses the answer after one draw of noise.

    Answers that need no computation nearly always are. A look at some elements is a tenth of the work.

    Args as for ``rule``; ``measured`` is of this call.

    Returns:
        False also where only ``rule`` can tell.
    """
    if truth.rival is not None:
        return False
    for i, (_, got, exact, native, size) in enumerate(pairs(expected, answer)):
        if not got.dtype.is_floating_point or not got.numel():
            continue
        this, exact = _of_result(truth, i), exact.to(torch.float64)
        dtype = _as_judged(this, got.new_empty(0)).dtype
        scale, factor = measured.tolerance(i, dtype, partial(_tolerance, this, dtype, native, exact, size))
        moved = _noise(truth, task, case, args, expected, device, keep, 1, measured)[i]
        slack = measured.slack(i, dtype, 1, partial(_allowed, this, task, case, expected, moved, exact, dtype, size))
        # An odd step meets all columns of a matrix with an even number of them.
        every = slice(None, None, exact.numel() // SAMPLED | 1)
        right, sizes = exact.reshape(-1)[every], None if size is None else size.expand(exact.shape).reshape(-1)[every]
        limit = torch.maximum(scale.units(right, dtype, sizes).mul_(factor), slack.reshape(-1)[every])
        ratio = _ratio(_as_judged(this, got.reshape(-1)[every]).to(exact.device), right, limit)
        if int((ratio > GROSS).sum()) * MOSTLY > ratio.numel():
            return True
    return False


def rule(
    truth: Close, task: Task, case: Case, args: Mapping[str, Any], expected: Expected, answer: Answer,
    device: str = "cpu", *, keep: bool | torch.Tensor | None = None, measured: Measured | None = None,
) -> Ruling:  # fmt: skip
    """Judge every output and every tensor written in place.

    Args:
        truth: the tolerances.
        task: the task.
        case: the case.
        args: the arguments of the call.
        expected: the reference's answers.
        answer: the answer to judge.
        device: where the reference is evaluated.
        keep: see ``reference.expect``.
        measured: of the same call, where several answers to it are judged.

    Returns:
        The ruling; the error is in units of the tolerance.
    """
    measured = Measured(keeps=False) if measured is None else measured
    declared = truth
    for i, (name, got, exact, native, size) in enumerate(pairs(expected, answer)):
        truth = _of_result(declared, i)
        if not got.dtype.is_floating_point:
            wrong = ~same_values(got, native.to(got.device))
            if bool(wrong.any()):
                share = float(wrong.to(torch.float64).mean())
                return Ruling(False, f"wrong values: {name}, {100 * share:.3g} % of the elements", share, 0.0)
            continue
        gpu_turns.yield_gpu()
        got, exact = _as_judged(truth, got), exact.to(torch.float64)
        limits = partial(_tolerance, truth, got.dtype, native, exact, size)
        tolerance = measured.tolerance(i, got.dtype, limits)
        if _all_within(got, exact, tolerance, size):
            continue
        # A result of one piece is compared in full at once: where it is wrong, the same comparison would follow.
        if exact.numel() > PIECE and _all_correct(got, exact, tolerance, size):
            continue
        ratio, wrong = misses(truth, got, exact, native, size=size, tolerance=tolerance)
        if truth.rival is not None and bool(wrong.any()):
            native = _farther(exact, native, reference.by_rival(task, case, args, truth.rival)[i])
            tolerance = _tolerance(truth, got.dtype, native, exact, size)
            ratio, wrong = misses(truth, got, exact, native, size=size, tolerance=tolerance)
        for draws in (1, reference.DRAWS, MANY):
            # The noise of a few draws is small by luck for all elements at once where one direction of a matrix dominates.
            if not bool(wrong.any()) or (draws == MANY and float(ratio.max()) > UNLUCKY):
                break
            moved = _noise(declared, task, case, args, expected, device, keep, draws, measured)[i]
            allowed = partial(_allowed, truth, task, case, expected, moved, exact, got.dtype, size)
            extra = measured.slack(i, got.dtype, draws, allowed)
            ratio, wrong = misses(truth, got, exact, native, extra, size, tolerance)
            # A single draw is misleading for single elements only: if 1 % are grossly wrong, no more draws are needed.
            if float((ratio > GROSS).to(torch.float64).mean()) > 0.01:
                break
        if bool(wrong.any()):
            return describe(name, ratio, wrong, got)
    return PASSED
