"""math/fftn."""

import math
from functools import partial

import torch
from kbx_env.tasks._varied import plain

from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Cost, Literal, Normal, Outlier, Paper, T, task

COMPLEX = {"input": "c64"}


def _case(*shape, **more):
    args = {k: more.pop(k) for k in ("s", "dim", "norm") if k in more}
    return Case({"*": shape}, args, **more)


def _eager(input, s=None, dim=None, norm=None, *, out=None):
    return torch.fft.fftn(input, s, dim, norm, out=out)


def _roots(rows, columns, n):
    turns = (torch.arange(rows)[:, None] * torch.arange(columns) % n).double() / n
    return torch.polar(torch.ones_like(turns), -2 * math.pi * turns).to(torch.complex64)


def _along(x):
    # Cooley and Tukey along the last axis: factors of 64 at most, and primes, by their definition.
    n = x.shape[-1]
    a = max((f for f in range(2, 65) if n % f == 0), default=n) if n > 64 else n
    if a == n:
        return x @ _roots(n, n, n)
    parts = x.unflatten(-1, (a, n // a)).mT @ _roots(a, a, a) * _roots(n // a, a, n)
    return _along(parts.mT).mT.flatten(-2)


def _by_factors(input, s=None, dim=None, norm=None, *, out=None):
    # A fair transform in fp32. Its error is larger than torch's where few elements outweigh the others, as a mean does.
    rank = input.dim()
    dim = tuple(range(rank) if s is None else range(rank - len(s), rank)) if dim is None else dim
    y, scale = input.to(torch.complex64), 1.0
    for axis, n in zip(dim, s or [input.shape[d] for d in dim], strict=True):
        y = y.movedim(axis, -1)
        y = torch.nn.functional.pad(y, (0, n - y.shape[-1])) if n > y.shape[-1] else y[..., :n]
        y, scale = _along(y.contiguous()).movedim(-1, axis), scale / n
    return y * {None: 1.0, "backward": 1.0, "ortho": math.sqrt(scale), "forward": scale}[norm]


def _any_axes(p, scale, least=1, **more):
    shape = tuple(min(n, 20) for n in p.shape(3, 4, 400))
    dim = p.axes(len(shape), least)
    s = p.among(None, tuple(p.whole(1, 12) for _ in dim))
    return p.like({"*": shape}, {"dim": dim, "s": s, "norm": p.among(None, "backward", "ortho", "forward")}, out=True,
                  draw=Normal(scale=scale), **more)  # fmt: skip


def _long(p):
    # Two large primes, or a power of two and an odd factor: neither fits one pass.
    n = p.among(37 * 41, 31 * 53, 43 * 47, 2048 * 3, 512 * 7, p.whole(1030, 1500))
    shape, dim = p.among(((2, n), (1,)), ((n, 2), (0,)), ((n,), None))
    return p.like({"*": shape}, {"dim": dim, "s": None, "norm": p.among(None, "ortho")}, out=True)


@task(
    difficulty=5,
    takes={"input": T("*")},
    eager=_eager,
    truth=Close(ulps=16, rival=_by_factors),
    cost=Cost(flops="50 * numel(input)", reads={"input": "overlap(input, result)"}, least="2 * numel(input)"),
    paper=Paper(rtol=1e-5, atol=1e-5),
    differs="Complex results have a real tolerance; as published they had to equal the vendor library's bit for bit. "
    "out=, cropping and padding, odd and prime sizes are exercised; timed are batches beside the 1-D transforms.",
    cases=(
        _case(4, draw=Literal(1, -2, 3, 5)),
        _case(4, 4, s=(2, 2)),
        _case(16, 16, dim=(0, 1), norm="ortho"),
        _case(16, 16, s=(8, 20), draw=Outlier(0.01)),
        _case(13, 31, norm="forward"),
        _case(5, 127, dim=(-1,), dtypes=COMPLEX),
        _case(3, 60, 7, dim=(0, 2), norm="backward", dtypes=COMPLEX),
        _case(4096, draw=Outlier(), dtypes=COMPLEX),
        _case(5, 1024, dim=(1,), norm="ortho"),
        _case(3, 256, 10, dim=(1,), norm="ortho", dtypes=COMPLEX),
        _case(2, 64, 32, dim=(1, 2), dtypes=COMPLEX),
        _case(9, 300, s=(128,), dim=(-1,), norm="forward"),
        _case(40, 14, s=(96, 10), dim=(0, 1), draw=Normal(mean=3), dtypes=COMPLEX),
        _case(30, 21, layouts={"input": "transposed"}, dtypes=COMPLEX),
        _case(6, 35, s=(50,), layouts={"input": "strided"}),
        _case(11, 24, dim=(0,), norm="ortho", out=True),
        _case(1, 6),
        # So many numbers that a kernel may take another way than for a few: short and long rows, large odd factors.
        _case(128, 1000, s=(1024,), dim=(1,)),
        _case(32, 4096, dim=(1,), dtypes=COMPLEX),
        _case(30, 61 * 73, dim=(1,)),
        # Two columns for each line of the transform.
        _case(1050, 64, 2, dim=(1,)),
        _case(3, 160, 3, s=(4, 160), dim=(0, 1), norm="ortho", dtypes=COMPLEX, held=True),
        _case(2, 19, 37, norm="forward", out=True, held=True),
        _case(1056, dtypes=COMPLEX, held=True),
    ),
    varied=(partial(_any_axes, scale=1e-3), partial(_any_axes, scale=50, least=2, where=plain), _long),
    timed=(_case(4096, 1024, dim=(1,), dtypes=COMPLEX), _case(64, 512, 512, dim=(1, 2), dtypes=COMPLEX),
           _case(1 << 20, dtypes=COMPLEX), _case(1 << 22, dtypes=COMPLEX)),
    # Lengths that people transform: a large prime factor would cost several times as much.
    held_timed=(_case(3000, 768, dim=(1,), dtypes=COMPLEX), _case(64, 360, 400, dim=(1, 2), dtypes=COMPLEX),
                _case(800_000, dtypes=COMPLEX), _case(3_000_000, dtypes=COMPLEX)),
)  # fmt: skip
def fftn(input, s=None, dim=None, norm=None, *, out=None):
    """Discrete Fourier transform of input, an fp32 or complex64 tensor, over the axes dim. The result is complex64.

    Example: fftn([1, 2, 3, 5]) = [11, -2 + 3j, -3, -2 - 3j]
    Example: fftn([[1, 2], [3, 4]], dim=(1,), norm="forward") = [[1.5, -0.5], [3.5, -0.5]]
    Example: fftn([1, 2, 3, 5], s=(2,)) = [3, -1]

    Along each axis of dim, of length n: y[k] = sum over j from 0 to n - 1 of x[j] exp(-2 pi i j k / n).

    dim is a tuple of different axes, negative ones count from the end; dim=None (the default) means all axes, or the
    last len(s) if s is given. s is a tuple with the length n for each of these axes: before the transform the axis is
    cut to its first n elements or filled up with zeros at its end; s=None (the default) keeps all lengths. norm: None
    or "backward" leaves the sums as they are, "forward" divides by the product N of all lengths n, "ortho" by sqrt(N).

    Lengths may be odd or prime; none has a prime factor above 2,000. Triton has no complex type: torch.view_as_real
    gives the parts as a last axis of 2. out: None (the default: a new tensor), or a tensor of the result's shape and
    dtype with any strides and any contents, which is filled and returned.

    Accuracy: that of a fast transform in IEEE fp32 with exact roots of unity (no TF32); real and imaginary parts are
    judged relative to the typical size of the result, not each relative to itself. input may have any strides; it
    is not changed. Empty and 0-d tensors, infinities and NaN are not tested.
    """
    # One axis at a time: on a CPU, torch.fft.fftn over several axes of strided data sometimes writes outside its memory
    # (torch 2.11 and 2.13 with MKL, complex64 (3, 160, 3) with s=(4, 160) and dim=(0, 1)), and glibc ends the process.
    axes = range(-len(s or input.shape), 0) if dim is None else dim
    result = input
    for k, axis in enumerate(axes):
        result = torch.fft.fft(result, None if s is None else s[k], axis, norm)
    return result if out is None else out.copy_(result)
