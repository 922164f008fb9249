"""Draws secret inputs from a seed that submissions cannot know: in fp64, then rounded to the tensor's dtype."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kbx_env.errors import DeclarationError
from kbx_env.grading import expressions
from kbx_env.protocol.wire import DTYPES
from kbx_env.spec import input_distributions as dists
from kbx_env.spec.task import Case, T, Task, shape_in
from kbx_env.spec.varied import parsed

LARGE = 1 << 12
"""Tensors with more elements are drawn in fp32, unless they are fp64: dense enough, and five times faster."""


def _hash63(domain: str, *parts: bytes) -> int:
    """Return 63 bits of a hash."""
    # The length of each part is hashed as well, so that different lists of parts never give the same text.
    text = domain.encode() + b"".join(len(p).to_bytes(8, "little") + p for p in parts)
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def case_seed(secret: bytes, task_id: str, split: str, case_index: int, repeat: int) -> int:
    """Derive a seed from the secret; every split, case and repeat has its own.

    Args:
        secret: of the grading.
        task_id: the task.
        split: ``train`` or ``eval``, with a suffix for other purposes.
        case_index: index of the case.
        repeat: index of the draw.

    Returns:
        63 bits.
    """
    return _hash63("kbx-inputs", secret, task_id.encode(), split.encode(), b"%d" % case_index, b"%d" % repeat)


def generator_seed(seed: int, name: str) -> int:
    """Return the seed of one tensor or ``torch.Generator`` argument of a call: 63 bits from the call's seed and the
    name.
    """
    return _hash63("kbx-stream", b"%d" % seed, name.encode())


def draw(task: Task, case: Case, seed: int, device: str = "cpu") -> dict[str, Any]:
    """Draw all arguments of one call except ``out``.

    Args:
        task: the task.
        case: the case.
        seed: from ``case_seed``. It gives different values on different devices, because large tensors are drawn where
            they are needed.
        device: of the tensors.

    Returns:
        Arguments by name; tensors in the declared dtypes and the case's layouts. Markers (``DtypeArg``,
        ``GeneratorArg``, ``DeviceArg``) stay markers.
    """

    def values(name: str, t: T, dtype: torch.dtype, before: Mapping[str, Any]) -> torch.Tensor:
        distribution = case.draws.get(name) or t.draw or case.draw
        generator = torch.Generator(device).manual_seed(generator_seed(seed, name))
        shape = shape_in(t, name, case)
        if isinstance(distribution, dists.Expression):
            drawn = expressions.values(distribution.text, shape, dtype, generator, before)
        else:
            drawn = _values(distribution, shape, case, generator, dtype)
        return _rounded(drawn, dtype)

    return _arguments(task, case, values)


def described(task: Task, case: Case) -> dict[str, Any]:
    """Return the arguments of ``draw`` with tensors on the meta device: dtypes, shapes and strides without values.

    Args:
        task: the task.
        case: the case.

    Returns:
        Arguments by name.
    """

    def values(name: str, t: T, dtype: torch.dtype, before: Mapping[str, Any]) -> torch.Tensor:
        return torch.empty(shape_in(t, name, case), dtype=dtype, device="meta")

    return _arguments(task, case, values)


def _arguments(
    task: Task, case: Case, values: Callable[[str, T, torch.dtype, Mapping[str, Any]], torch.Tensor]
) -> dict[str, Any]:  # fmt: skip
    """Return all arguments of one call except ``out``.

    Args:
        task: the task.
        case: the case.
        values: returns the values of a tensor by its name, declaration, dtype and the arguments before it.

    Returns:
        Arguments by name; tensors in the case's layouts.
    """
    args: dict[str, Any] = {}
    parts = {n: [t for t in task.takes if t.partition(".")[0] == n] or [n] for n in task.signature.parameters}
    for name in (part for every in parts.values() for part in every):
        if name in task.takes and name not in case.args:
            t = task.takes[name]
            if t.optional and name not in case.given:
                continue
            dtype = DTYPES[case.dtypes.get(name, t.dtype)]
            args[name] = _laid_out(values(name, t, dtype, args), case.layouts.get(name))
        elif name in case.args and name != "out":
            args[name] = case.args[name]
    return args


INDEPENDENT = (
    dists.Normal, dists.Outlier, dists.Uniform, dists.HalfNormal, dists.Ints, dists.Bernoulli, dists.Choice,
)  # fmt: skip
"""Distributions whose elements are independent: a tensor with some elements of one draw and the rest of another is a draw."""


def once(x: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor in which every element of its memory occurs once: axes of stride 0 have length 1."""
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]


def redraw(task: Task, case: Case, args: Mapping[str, Any], seed: int, few: int = 0) -> dict[str, Any]:
    """Draw the arguments of a call again and keep most of the old values, so that samples of them look unchanged.

    Args:
        task: the task.
        case: the case.
        args: an earlier draw of the case, on the CPU.
        seed: of the new draw, from ``case_seed``.
        few: change at most so many elements, of one tensor; 0 to change some of every tensor.

    Returns:
        New arguments. Without ``few``, tensors with independent elements differ from the old ones in a random number of elements,
        of every order of magnitude from one to a thirty-second; other tensors are new draws. With ``few``, one tensor with
        independent elements differs; tasks that compute a tensor from others, or have no such tensor, ignore it.
    """
    fresh = draw(task, case, seed)
    g = torch.Generator().manual_seed(generator_seed(seed, "changed elements"))
    laws = {n: case.draws.get(n) or task.takes[n].draw or case.draw for n, v in fresh.items() if isinstance(v, torch.Tensor)}
    free = [n for n, law in laws.items() if isinstance(law, INDEPENDENT) and fresh[n].numel() > 1]
    if few and free and not any(isinstance(law, dists.Expression) for law in laws.values()):
        sizes = torch.tensor([math.sqrt(once(fresh[n]).numel()) for n in free])
        chosen = free[int(torch.multinomial(sizes, 1, generator=g))]
        for name in laws:
            value = once(fresh[name])
            changed = torch.randint(0, max(1, value.numel()), (few if name == chosen else 0,), generator=g)
            kept = torch.ones(value.numel(), dtype=torch.bool).index_fill_(0, changed, False)
            value.copy_(torch.where(kept.view(value.shape), once(args[name]), value))
        return fresh
    for name, drawn in fresh.items():
        if not isinstance(drawn, torch.Tensor) or drawn.numel() < 2:
            continue
        distribution = case.draws.get(name) or task.takes[name].draw or case.draw
        if not isinstance(distribution, INDEPENDENT):
            continue
        value = once(drawn)
        most = math.log(max(1.0, value.numel() / 32))
        count = round(math.exp(most * float(torch.rand(1, generator=g))))
        kept = torch.ones(value.numel(), dtype=torch.bool)
        kept[torch.randint(0, value.numel(), (count,), generator=g)] = False
        value.copy_(torch.where(kept.view(value.shape), once(args[name]), value))
    return fresh


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values in a dtype: booleans are True above 0, integers are rounded to the nearest."""
    if dtype is torch.bool:
        return values > 0
    if not (dtype.is_floating_point or dtype.is_complex):
        return values.round().to(dtype)
    return values.to(dtype)


def _bound(high: int | str, case: Case) -> int:
    """Return a bound of ``Ints``, which may be the name of an axis."""
    if not isinstance(high, str):
        return high
    if high not in case.axes:
        raise DeclarationError(f"Ints: no size for axis {high!r}; the case gives {dict(case.axes)}")
    size = case.axes[high]
    return math.prod(size) if isinstance(size, tuple) else int(size)


def _distinct(n: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Return a random permutation of 0 .. n - 1 in fp64; ``dtype`` must hold all of them exactly."""
    # eps = 2**-p for p explicit mantissa bits: integers up to 2**(p + 1) are exact, larger ones may coincide.
    if dtype.is_floating_point:
        room = int(2 / torch.finfo(dtype).eps)
    else:
        room = 1 if dtype is torch.bool else torch.iinfo(dtype).max
    if n - 1 > room:
        raise DeclarationError(f"Distinct: {dtype} cannot hold {n} distinct integers")
    return torch.randperm(n, generator=g, device=g.device).to(torch.float64)


def _places(shape: tuple[int, ...], size: int, dim: int, g: torch.Generator) -> torch.Tensor:
    """Return random positions below ``size``, all different along axis ``dim``, in fp64."""
    dim %= len(shape)
    if shape[dim] > size:
        raise DeclarationError(f"Places: an axis of {shape[dim]} has no different positions below {size}")
    extended = (*shape[:dim], size, *shape[dim + 1 :])
    return torch.rand(extended, generator=g, device=g.device).argsort(dim).narrow(dim, 0, shape[dim]).to(torch.float64)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns (of a wide matrix, rows) with the uniform (Haar) distribution.

    They are Q of QR with R's diagonal made positive; x must have independent normal elements (Mezzadri, 2007).
    """
    tall = x if x.shape[-2] >= x.shape[-1] else x.mT
    if tall.is_cuda and tall.dim() > 2:
        q = orthonormalised(tall)
    else:
        q, r = torch.linalg.qr(tall)
        d = r.diagonal(dim1=-2, dim2=-1)
        q = q * (d / d.abs()).unsqueeze(-2)
    return q if x.shape[-2] >= x.shape[-1] else q.mT


def orthonormalised(x: torch.Tensor) -> torch.Tensor:
    """Return Q of QR of many matrices at once, where R's diagonal is positive.

    A GPU factorises one small matrix after the other (``torch.linalg.qr``). The method of Gram and Schmidt takes a column of all
    matrices at a time. Done twice, it is as exact as Householder's (Giraud, Langou, Rozloznik and van den Eshof, 2005).

    Args:
        x: (..., m, n) with m >= n, real or complex; the columns of a matrix must be independent by far more than its rounding.

    Returns:
        (..., m, n), orthonormal columns.
    """
    columns = x.mT.contiguous()
    q = torch.empty_like(columns)
    for k in range(columns.shape[-2]):
        column, before = columns[..., k : k + 1, :], q[..., :k, :]
        for _ in range(2):
            column = column - column @ before.mH @ before
        q[..., k : k + 1, :] = column / torch.linalg.vector_norm(column, dim=-1, keepdim=True)
    return q.mT


def _matrix(
    distribution: dists.Distribution, shape: tuple[int, ...], g: torch.Generator, dtype: torch.dtype
) -> torch.Tensor:
    """Draw matrices from a distribution of whole matrices.

    Args:
        distribution: one of ``MATRICES``.
        shape: of the tensor; the last two axes are the matrices.
        g: generator on the device of the tensor.
        dtype: of the tensor: real or complex.

    Returns:
        fp64 or complex128 values of ``shape``.

    Raises:
        DeclarationError: no such distribution.
    """
    kind = torch.complex128 if dtype.is_complex else torch.float64
    m, n = shape[-2:]

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size or shape, generator=g, dtype=kind, device=g.device)

    def shifted(x: torch.Tensor, shift: float) -> torch.Tensor:
        x.diagonal(dim1=-2, dim2=-1).add_(shift)  # a matrix of the shift would be as large as the largest case
        return x

    match distribution:
        case dists.SPD(shift):
            x = normal()
            return shifted((x @ x.mH).div_(n), shift)
        case dists.Symmetric(shift, hermitian):
            x = normal()
            return shifted((x + (x.mH if hermitian else x.mT)).div_(math.sqrt(2 * n)), shift)
        case dists.Dominant(shift):
            return shifted(normal().div_(math.sqrt(n)), shift)
        case dists.Triangular(upper):
            x = normal().div_(n)
            x = x.triu_(1) if upper else x.tril_(-1)
            return x + torch.eye(m, n, dtype=kind, device=g.device) * (1 + normal().abs())
        case dists.Orthogonal():
            return _unit(normal())
        case dists.Spectrum(values, symmetric):
            k = min(m, n)
            s = torch.tensor((values * (k // len(values) + 1))[:k] if len(values) == 1 else (values + (0.0,) * k)[:k])
            u = _unit(normal(*shape[:-2], m, k))
            v = u if symmetric else _unit(normal(*shape[:-2], n, k))
            x = u * s.to(g.device, kind) @ v.mH
            return (x + x.mH) / 2 if symmetric else x
    raise DeclarationError(f"no way to draw {distribution}")


MATRICES = (dists.SPD, dists.Symmetric, dists.Dominant, dists.Triangular, dists.Orthogonal, dists.Spectrum)
"""Distributions of whole matrices."""
FACTORISED = (dists.Orthogonal, dists.Spectrum)
"""Those of them that are drawn by factorising other matrices."""


def _values(
    distribution: dists.Distribution, shape: tuple[int, ...], case: Case, g: torch.Generator, dtype: torch.dtype
) -> torch.Tensor:
    """Draw the values of one tensor.

    Args:
        distribution: of the tensor.
        shape: of the tensor.
        case: has the sizes that bounds refer to.
        g: generator on the device of the tensor.
        dtype: of the tensor; the values are not rounded to it yet.

    Returns:
        Values of ``shape``, usually fp64; of large tensors some distributions draw fp32, and integers stay int64.
    """
    n = math.prod(shape)
    if n == 0:
        return torch.zeros(shape, dtype=torch.float64, device=g.device)
    if isinstance(distribution, dists.Scaled):
        return distribution.factor * _values(distribution.matrices, shape, case, g, dtype)
    if isinstance(distribution, MATRICES):
        return _matrix(distribution, shape, g, dtype)
    if dtype.is_complex:
        part = torch.float32 if dtype is torch.complex64 else torch.float64
        return torch.complex(*(_values(distribution, shape, case, g, part).to(torch.float64) for _ in range(2)))
    kind = torch.float64 if n <= LARGE or dtype is torch.float64 else torch.float32
    drawn = _independent(distribution, shape, case, g, kind)
    return _arranged(distribution, shape, g, dtype) if drawn is None else drawn


def _independent(
    distribution: dists.Distribution, shape: tuple[int, ...], case: Case, g: torch.Generator, kind: torch.dtype
) -> torch.Tensor | None:
    """Draw values whose elements are independent.

    Args:
        distribution: of the tensor.
        shape: of the tensor.
        case: has the sizes that bounds refer to.
        g: generator on the device of the tensor.
        kind: dtype in which to draw.

    Returns:
        The values; ``None`` for other distributions.
    """

    def normal() -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=kind, device=g.device)

    def uniform() -> torch.Tensor:
        return torch.rand(shape, generator=g, dtype=kind, device=g.device)

    match distribution:
        case dists.Normal(mean, scale, clamp):
            x = mean + scale * normal()
            return x.clamp(-clamp, clamp) if clamp is not None else x
        case dists.Outlier(p, scale, clamp, base):
            x = base * normal()
            x = torch.where(uniform() < p, x * scale, x)
            return x.clamp(-clamp, clamp) if clamp is not None else x
        case dists.Uniform(low, high):
            return low + (high - low) * uniform()
        case dists.HalfNormal(offset, scale):
            return offset + scale * normal().abs()
        case dists.Ints(low, high, special, p):
            # Stays int64: large integers differ in bits that no floating-point number holds.
            x = torch.randint(low, _bound(high, case), shape, generator=g, device=g.device)
            return torch.where(uniform() < p, special, x) if special is not None else x
        case dists.Bernoulli(p):
            return (uniform() < p).to(kind)
        case dists.Choice(values):
            picks = torch.randint(0, len(values), shape, generator=g, device=g.device)
            return torch.tensor(values, dtype=torch.float64, device=g.device)[picks]
    return None


def _arranged(
    distribution: dists.Distribution, shape: tuple[int, ...], g: torch.Generator, dtype: torch.dtype
) -> torch.Tensor:
    """Draw values that are fixed up to their order or signs.

    Args:
        distribution: of the tensor.
        shape: of the tensor, with at least one element.
        g: generator on the device of the tensor.
        dtype: of the tensor, in which distinct values must stay distinct.

    Returns:
        fp64 values of ``shape``.

    Raises:
        DeclarationError: no such distribution.
    """
    n = math.prod(shape)
    match distribution:
        case dists.Literal(values):
            listed = torch.tensor(values, dtype=torch.float64, device=g.device)
            return listed.repeat(n // len(values) + 1)[:n].reshape(shape)
        case dists.Shuffled(values):
            order = torch.randperm(n, generator=g, device=g.device)
            return torch.tensor(values, dtype=torch.float64, device=g.device)[order % len(values)].reshape(shape)
        case dists.Signed(values):
            sign = 1.0 - 2.0 * torch.randint(0, 2, (n,), generator=g, device=g.device).to(torch.float64)
            cycle = torch.arange(n, device=g.device) % len(values)
            return (torch.tensor(values, dtype=torch.float64, device=g.device)[cycle] * sign).reshape(shape)
        case dists.Places(size, dim):
            return _places(shape, size, dim, g)
        case dists.Linspace(low, high):
            return torch.linspace(low, high, n, dtype=torch.float64, device=g.device).reshape(shape)
        case dists.Distinct():
            return _distinct(n, dtype, g).reshape(shape)
        case dists.Constant(value):
            return torch.full(shape, float(value), dtype=torch.float64, device=g.device)
        case dists.Eye():
            return torch.eye(shape[-2], shape[-1], dtype=torch.float64, device=g.device).expand(shape).clone()
    raise DeclarationError(f"no way to draw {distribution}")


def _gap(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return a tensor for a strided layout, filled with poison: a kernel that ignores strides must not find zeros."""
    if like.is_floating_point() or like.is_complex():
        return like.new_full(shape, math.nan)
    return like.new_full(shape, True if like.dtype is torch.bool else 113)


def _laid_out(x: torch.Tensor, layout: str | None) -> torch.Tensor:
    """Return the same values in a memory layout of ``Case.layouts``; ``None`` for contiguous."""
    if layout is None:
        return x.contiguous()
    if (general := parsed(layout)) is not None:
        return _placed(x, *general)
    if layout in ("transposed", "strided") and x.dim() < (2 if layout == "transposed" else 1):
        raise DeclarationError(f"layout {layout!r} needs more axes than {x.dim()}")
    if layout == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided":
        wide = _gap((*x.shape[:-1], 2 * x.shape[-1]), x)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "offset":
        wide = _gap((x.numel() + 1,), x)
        wide[1:] = x.reshape(-1)
        return wide[1:].view(x.shape)
    if layout == "channels_last":
        form = torch.channels_last_3d if x.dim() == 5 else torch.channels_last
        return x.contiguous(memory_format=form)
    raise DeclarationError(f"unknown layout {layout!r}; accepted: transposed, strided, offset, channels_last")


def _placed(x: torch.Tensor, order: tuple[int, ...], steps: tuple[int, ...], offset: int, pad: int) -> torch.Tensor:
    """Return values with the axes in another order in memory, and with gaps.

    Args:
        x: the values. Of an axis that takes no steps, the first.
        order: the axes, the one with the largest stride first.
        steps: by axis, distance of neighbours in elements of a tensor without gaps; 0 makes the axis one of stride 0.
        offset: elements of the buffer before the tensor.
        pad: elements of the buffer behind each line of the innermost axis.

    Returns:
        A view of a larger buffer, whose other elements are poison.

    Raises:
        DeclarationError: the layout is for another number of axes.
    """
    if sorted(order) != list(range(x.dim())) or len(steps) != x.dim():
        raise DeclarationError(f"a layout of {len(order)} axes for a tensor of {x.dim()}")
    if 0 in steps:
        once = x[tuple(slice(0, 1) if s == 0 else slice(None) for s in steps)]
        return _placed(once, order, tuple(s or 1 for s in steps), offset, pad).expand(x.shape)
    wide = [x.shape[a] * steps[a] for a in order]
    wide[-1] += pad
    buffer = _gap((offset + math.prod(wide),), x)
    view = buffer[offset:].view(wide)[..., : wide[-1] - pad].permute(tuple(order.index(a) for a in range(x.dim())))
    placed = view[tuple(slice(None, None, s) for s in steps)]
    return placed.copy_(x)


def poisoned(like: torch.Tensor, layout: str | None = None) -> torch.Tensor:
    """Return a tensor with the shape and dtype of a result and a layout of ``Case.layouts``, filled with NaN, True or
    113.
    """
    out = torch.empty(like.shape, dtype=like.dtype)
    if out.is_floating_point() or out.is_complex():
        out.fill_(float("nan"))
    else:
        out.fill_(True if out.dtype is torch.bool else 113)
    return _laid_out(out, layout)
