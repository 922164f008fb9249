# task: matrixmultiply/addmm
# shows: matrices go to the kernel as NamedTuples of pointer, shape and strides; future annotations and a dataclass of tile sizes
# family: aliased imports

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch as pt
import triton as t
import triton.language as T


class Matrix(NamedTuple):
    ptr: Any
    shape: Any
    stride: Any


@dataclasses.dataclass(frozen=True)
class Tiles:
    BM: int = 32
    BN: int = 32
    BK: int = 32

    def grid(self, m: int, n: int) -> tuple[int, int]:
        return t.cdiv(m, self.BM), t.cdiv(n, self.BN)


@t.jit
def at(m, i, j):
    return m.ptr + i.to(T.int64) * m.stride[0] + j.to(T.int64) * m.stride[1]


@t.jit
def inside(m, i, j):
    return (i < m.shape[0]) & (j < m.shape[1])


@t.jit
def addmm_kernel(a, b, c, out, alpha, beta, READ_C: T.constexpr, BM: T.constexpr, BN: T.constexpr, BK: T.constexpr):
    i = T.program_id(0) * BM + T.arange(0, BM)[:, None]
    j = T.program_id(1) * BN + T.arange(0, BN)[None, :]
    acc = T.zeros((BM, BN), T.float32)
    for k0 in range(0, a.shape[1], BK):
        ka, kb = k0 + T.arange(0, BK)[None, :], k0 + T.arange(0, BK)[:, None]
        x = T.load(at(a, i, ka), mask=inside(a, i, ka), other=0.0)
        y = T.load(at(b, kb, j), mask=inside(b, kb, j), other=0.0)
        acc = T.dot(x, y, acc, input_precision="ieee")
    acc *= alpha
    if READ_C:
        acc += beta * T.load(at(c, i, j), mask=inside(c, i, j), other=0.0).to(T.float32)
    T.store(at(out, i, j), acc.to(out.ptr.dtype.element_ty), mask=inside(out, i, j))


def addmm(input: pt.Tensor, mat1: pt.Tensor, mat2: pt.Tensor, beta: float = 1, alpha: float = 1, out=None) -> pt.Tensor:
    M, N = mat1.shape[0], mat2.shape[1]
    y = pt.empty((M, N), dtype=mat1.dtype, device=mat1.device) if out is None else out
    if not y.numel():
        return y
    tiles = Tiles()
    args = (Matrix(m, tuple(m.shape), tuple(m.stride())) for m in (mat1, mat2, input.expand(M, N), y))
    addmm_kernel[tiles.grid(M, N)](*args, float(alpha), float(beta), READ_C=beta != 0, **dataclasses.asdict(tiles))
    return y
