"""Recognises tasks that compute the same function, by their values on random inputs, not by their text."""

from __future__ import annotations

import itertools
import warnings
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kbx_env.protocol.wire import DTYPES
from kbx_env.spec import packs
from kbx_env.spec.catalog import load_tasks
from kbx_env.spec.task import DeviceArg, DtypeArg, GeneratorArg, Task, shape_of

STARS = {"*": (3, 4), "*a": (3, 4), "*b": (4,), "*n": (5,), "*batch": (2,)}
"""Sizes of groups of axes, by name, for the comparison."""
SETS = 8
"""Most sets of arguments with which a task of the benchmark is called."""
ORDERS = 24
"""Most orders of the tensors in which a new task is compared."""
RTOL, ATOL = 1e-9, 1e-12
"""Two results in fp64 that are nearer are equal: they are sums of a few dozen elements."""
Signature = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and kind of every required tensor."""
Values = tuple[torch.Tensor, ...]
Probes = tuple[tuple[torch.Size, tuple[float, ...]], ...]
"""Shape and some elements of every result: enough to tell most results apart, in a thirtieth of the time."""


def _size(axis: str) -> Any:
    return STARS.get(axis, (2, 3)) if axis.startswith("*") else 3 + zlib.crc32(axis.encode()) % 4


def _required(task: Task) -> list[str]:
    return [n for n, t in task.takes.items() if not t.optional]


def signature(task: Task) -> Signature:
    """Return shape and kind of the required tensors, for axes of fixed sizes."""
    axes = {a: _size(a) for t in task.takes.values() for a in t.axes.split() if not a.isdigit()}
    return tuple((shape_of(task.takes[n], axes), _kind(task.takes[n].dtype)) for n in _required(task))


def _kind(dtype: str) -> str:
    """Return ``float``, or the dtype of anything else: all floating-point dtypes are compared in fp64."""
    return "float" if DTYPES[dtype].is_floating_point else dtype


def _tensor(number: int, shape: Sequence[int], kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + number)
    if kind == "float":
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.randint(0, 3, tuple(shape), generator=generator).to(DTYPES[kind])


def _called(task: Task, tensors: Sequence[torch.Tensor], args: dict[str, Any]) -> Values | None:
    """Return the results of a call and what it writes in place, in fp64; ``None`` where the call is not possible."""
    bound = {n: t.clone() for n, t in zip(_required(task), tensors, strict=True)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = task.reference(**bound, **args)
    except Exception:
        return None
    outputs = list(found) if isinstance(found, tuple | list) else [found]
    outputs += [bound[n] for n in task.writes if n in bound and not any(o is bound[n] for o in outputs)]
    if not all(isinstance(o, torch.Tensor) for o in outputs):
        return None
    return tuple(o.detach().to(torch.float64) for o in outputs if not o.is_complex())


def _sets(task: Task) -> Iterator[dict[str, Any]]:
    """Yield sets of arguments that are no tensors: the defaults first, then those of the cases."""
    seen: list[dict[str, Any]] = []
    marked = (DtypeArg, GeneratorArg, DeviceArg)
    for args in ({}, *(dict(c.args) for c in task.cases)):
        plain = {k: v for k, v in args.items() if k not in task.takes and not isinstance(v, marked)}
        if plain not in seen and len(seen) < SETS:
            seen.append(plain)
            yield plain


def probes(values: Values) -> Probes:
    """Return the shape of every result with its first, middle and last element."""
    found = []
    for v in values:
        flat = v.reshape(-1)
        some = sorted({0, len(flat) // 2, len(flat) - 1}) if len(flat) else []
        found.append((v.shape, tuple(flat[some].tolist())))
    return tuple(found)


def near(a: Probes, b: Probes) -> bool:
    """Return whether results may be ``equal``; false only for results that are not."""
    return len(a) == len(b) and all(
        one == other and all(x == y or abs(x - y) <= 2 * (ATOL + RTOL * abs(y)) for x, y in zip(these, those, strict=True))
        for (one, these), (other, those) in zip(a, b, strict=True)
    )


def equal(a: Values, b: Values) -> bool:
    """Return whether results agree in number, shapes and values."""
    return len(a) == len(b) and all(
        x.shape == y.shape and bool(torch.allclose(x, y, rtol=RTOL, atol=ATOL)) for x, y in zip(a, b, strict=True)
    )


class Known:
    """The functions of the tasks seen so far: those of the benchmark, and those that were added."""

    def __init__(self) -> None:
        self._benchmark = load_tasks(tasks_from=packs.BUILTIN)
        self._theirs: dict[Signature, list[tuple[str, Values, Probes]]] = {}
        self._ours: dict[Signature, list[tuple[str, Values, Probes]]] = {}

    def twin(self, task: Task) -> str | None:
        """Return the id of a known task that computes the same function, or add the task.

        Args:
            task: compared with its default arguments, with the tensors in every order.

        Returns:
            The id; ``None`` if there is none, and the task is known from now on.
        """
        own = signature(task)
        tensors = [_tensor(k, *part) for k, part in enumerate(own)]
        args: dict[str, Any] = next((a for a in _sets(task) if _called(task, tensors, a) is not None), {})
        for order in itertools.islice(itertools.permutations(range(len(own))), ORDERS):
            shown = tuple(own[k] for k in order)
            # The same tensors stand in the other task's order; this task gets each at its own place.
            values = [_tensor(order.index(k), *own[k]) for k in range(len(own))]
            mine = _called(task, values, args)
            if mine is None:
                continue
            seen = probes(mine)
            for name, theirs, some in itertools.chain(self._of_benchmark(shown), self._ours.get(shown, ())):
                if near(seen, some) and equal(mine, theirs):
                    return name
        mine = _called(task, tensors, args)
        if mine is not None:
            self._ours.setdefault(own, []).append((task.id, mine, probes(mine)))
        return None

    def _of_benchmark(self, shown: Signature) -> list[tuple[str, Values, Probes]]:
        """Return the results of all tasks of the benchmark that take these tensors."""
        if shown not in self._theirs:
            tensors = [_tensor(k, *part) for k, part in enumerate(shown)]
            found = []
            for task in self._benchmark:
                if len(_required(task)) == len(shown) and all(
                    _kind(task.takes[n].dtype) == kind for n, (_, kind) in zip(_required(task), shown, strict=True)
                ):
                    results = (_called(task, tensors, args) for args in _sets(task))
                    found += [(task.id, r, probes(r)) for r in results if r is not None]
            self._theirs[shown] = found
        return self._theirs[shown]
