"""Secret inputs: drawn from a seed that no submission can know, in fp64, then rounded to the tensor's dtype."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch

from kbx_env.errors import DeclarationError
from kbx_env.protocol.wire import DTYPES
from kbx_env.spec import input_distributions as dists
from kbx_env.spec.task import Case, Task, shape_of

LARGE = 1 << 20
"""Above this size fp32 normals stand in for fp64 ones: dense enough, and four times faster for timing cases."""


def _hash63(domain: str, *parts: bytes) -> int:
    # Every part carries its length: no two lists of parts give the same text.
    text = domain.encode() + b"".join(len(p).to_bytes(8, "little") + p for p in parts)
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def case_seed(secret: bytes, task_id: str, split: str, case_index: int, repeat: int) -> int:
    """63 bits from the secret; splits, cases and repeats never share a seed."""
    return _hash63("kbx-inputs", secret, task_id.encode(), split.encode(), b"%d" % case_index, b"%d" % repeat)


def generator_seed(seed: int, name: str) -> int:
    """The seed of one named stream of a call (a tensor, a ``torch.Generator`` argument)."""
    return _hash63("kbx-stream", b"%d" % seed, name.encode())


def draw(task: Task, case: Case, seed: int, device: str = "cpu") -> dict[str, Any]:
    """All arguments of one call but ``out``, by parameter name; tensors on ``device`` in the case's layouts.

    A seed gives other values on another device: where they are large they are drawn where they are needed.
    Markers (``DtypeArg``, ``GeneratorArg``, ``DeviceArg``) stay markers.
    """
    args: dict[str, Any] = {}
    parts = {n: [t for t in task.takes if t.partition(".")[0] == n] or [n] for n in task.signature.parameters}
    for name in (part for every in parts.values() for part in every):
        if name in task.takes and name not in case.args:
            t = task.takes[name]
            if t.optional and name not in case.given:
                continue
            dtype = DTYPES[case.dtypes.get(name, t.dtype)]
            law = case.draws.get(name) or t.draw or case.draw
            generator = torch.Generator(device).manual_seed(generator_seed(seed, name))
            values = _values(law, shape_of(t, case.axes), case, generator, dtype)
            args[name] = _laid_out(_rounded(values, dtype), case.layouts.get(name))
        elif name in case.args and name != "out":
            args[name] = case.args[name]
    return args


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return values > 0
    if not (dtype.is_floating_point or dtype.is_complex):
        return values.round().to(dtype)
    return values.to(dtype)


def _bound(high: int | str, case: Case) -> int:
    if not isinstance(high, str):
        return high
    if high not in case.axes:
        raise DeclarationError(f"Ints: no size for axis {high!r}; the case gives {dict(case.axes)}")
    size = case.axes[high]
    return math.prod(size) if isinstance(size, tuple) else int(size)


def _distinct(n: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    # eps = 2**-p for p explicit mantissa bits: integers up to 2**(p + 1) are exact, beyond them ties appear.
    if dtype.is_floating_point:
        room = int(2 / torch.finfo(dtype).eps)
    else:
        room = 1 if dtype is torch.bool else torch.iinfo(dtype).max
    if n - 1 > room:
        raise DeclarationError(f"Distinct: {dtype} cannot hold {n} distinct integers")
    return torch.randperm(n, generator=g, device=g.device).to(torch.float64)


def _places(shape: tuple[int, ...], size: int, dim: int, g: torch.Generator) -> torch.Tensor:
    dim %= len(shape)
    if shape[dim] > size:
        raise DeclarationError(f"Places: an axis of {shape[dim]} has no different positions below {size}")
    whole = (*shape[:dim], size, *shape[dim + 1 :])
    return torch.rand(whole, generator=g, device=g.device).argsort(dim).narrow(dim, 0, shape[dim]).to(torch.float64)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns, uniformly distributed: QR with the signs of the diagonal taken out."""
    q, r = torch.linalg.qr(x if x.shape[-2] >= x.shape[-1] else x.mT)
    d = r.diagonal(dim1=-2, dim2=-1)
    q = q * (d / d.abs()).unsqueeze(-2)
    return q if x.shape[-2] >= x.shape[-1] else q.mT


def _matrix(law: dists.Distribution, shape: tuple[int, ...], g: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Laws of whole matrices, which act on the last two axes."""
    kind = torch.complex128 if dtype.is_complex else torch.float64
    m, n = shape[-2:]

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size or shape, generator=g, dtype=kind, device=g.device)

    eye = torch.eye(m, n, dtype=kind, device=g.device)
    match law:
        case dists.SPD(shift):
            x = normal()
            return x @ x.mH / n + shift * eye
        case dists.Symmetric(shift, hermitian):
            x = normal()
            return (x + (x.mH if hermitian else x.mT)) / math.sqrt(2 * n) + shift * eye
        case dists.Dominant(shift):
            return normal() / math.sqrt(n) + shift * eye
        case dists.Triangular(upper):
            x = normal() / n
            x = x.triu(1) if upper else x.tril(-1)
            return x + eye * (1 + normal().abs())
        case dists.Orthogonal():
            return _unit(normal())
        case dists.Spectrum(values, symmetric):
            k = min(m, n)
            s = torch.tensor((values * (k // len(values) + 1))[:k] if len(values) == 1 else (values + (0.0,) * k)[:k])
            u = _unit(normal(*shape[:-2], m, k))
            v = u if symmetric else _unit(normal(*shape[:-2], n, k))
            x = u * s.to(g.device, kind) @ v.mH
            return (x + x.mH) / 2 if symmetric else x
    raise DeclarationError(f"no way to draw {law}")


MATRICES = (dists.SPD, dists.Symmetric, dists.Dominant, dists.Triangular, dists.Orthogonal, dists.Spectrum)


def _values(law: dists.Distribution, shape: tuple[int, ...], case: Case, g: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    n = math.prod(shape)
    if n == 0:
        return torch.zeros(shape, dtype=torch.float64, device=g.device)
    if isinstance(law, MATRICES):
        return _matrix(law, shape, g, dtype)
    if dtype.is_complex:
        part = torch.float32 if dtype is torch.complex64 else torch.float64
        return torch.complex(*(_values(law, shape, case, g, part).to(torch.float64) for _ in range(2)))
    kind = torch.float64 if n <= LARGE or dtype is torch.float64 else torch.float32

    def normal() -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=kind, device=g.device)

    def uniform() -> torch.Tensor:
        return torch.rand(shape, generator=g, dtype=kind, device=g.device)

    match law:
        case dists.Normal(mean, scale, clamp):
            x = mean + scale * normal()
            return x.clamp(-clamp, clamp) if clamp is not None else x
        case dists.Outlier(p, scale, clamp):
            x = normal()
            x = torch.where(uniform() < p, x * scale, x)
            return x.clamp(-clamp, clamp) if clamp is not None else x
        case dists.Uniform(low, high):
            return low + (high - low) * uniform()
        case dists.HalfNormal(offset, scale):
            return offset + scale * normal().abs()
        case dists.Literal(values):
            return (
                torch.tensor(values, dtype=torch.float64, device=g.device)
                .repeat(n // len(values) + 1)[:n]
                .reshape(shape)
            )
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
        case dists.Ints(low, high, special, p):
            # Large integers differ in bits that no floating-point number holds.
            x = torch.randint(low, _bound(high, case), shape, generator=g, device=g.device)
            return torch.where(uniform() < p, special, x) if special is not None else x
        case dists.Distinct():
            return _distinct(n, dtype, g).reshape(shape)
        case dists.Bernoulli(p):
            return (uniform() < p).to(kind)
        case dists.Constant(value):
            return torch.full(shape, float(value), dtype=torch.float64, device=g.device)
        case dists.Eye():
            return torch.eye(shape[-2], shape[-1], dtype=torch.float64, device=g.device).expand(shape).clone()
        case dists.Choice(values):
            picks = torch.randint(0, len(values), shape, generator=g, device=g.device)
            return torch.tensor(values, dtype=torch.float64, device=g.device)[picks]
    raise DeclarationError(f"no way to draw {law}")


def _gap(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    # What lies between the elements is poison: a kernel that ignores strides must not find zeros there.
    if like.is_floating_point() or like.is_complex():
        return like.new_full(shape, math.nan)
    return like.new_full(shape, True if like.dtype is torch.bool else 113)


def _laid_out(x: torch.Tensor, layout: str | None) -> torch.Tensor:
    if layout is None:
        return x.contiguous()
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


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor like the result, full of what no right answer holds."""
    out = torch.empty(like.shape, dtype=like.dtype)
    if out.is_floating_point() or out.is_complex():
        return out.fill_(float("nan"))
    return out.fill_(True if out.dtype is torch.bool else 113)
