# task: math/rsqrt
# shows: the entry is an annotated module constant, a callable object made by a decorator factory
# family: aliased imports

import typing as ty

import torch
import triton as _tr
from triton import language as _l

Pointwise = ty.Callable[..., torch.Tensor]


class _Unary(ty.NamedTuple):
    kernel: ty.Any
    block: int = 1024

    def __call__(self, input: torch.Tensor, out: ty.Optional[torch.Tensor] = None) -> torch.Tensor:
        src = input.contiguous()
        dst = torch.empty_like(src)
        if size := src.numel():
            self.kernel[(_tr.cdiv(size, self.block),)](src, dst, size, BLOCK=self.block)
        if out is None:
            return dst
        out.copy_(dst)
        return out


def pointwise(block: int) -> ty.Callable[[ty.Any], _Unary]:
    return lambda fn: _Unary(_tr.jit(fn), block)


@pointwise(block=512)
def _rsqrt(src, dst, size, BLOCK: _l.constexpr):
    at = _l.program_id(0) * BLOCK + _l.arange(0, BLOCK)
    v = _l.load(src + at, mask=at < size, other=1.0)
    _l.store(dst + at, _l.rsqrt(v), mask=at < size)


rsqrt: Pointwise = _rsqrt
