# task: index/index_fill_
# shows: NVTX and profiler ranges around the launch, torch.compiler.disable on the entry, logging and warnings
# family: host code

import contextlib
import logging
import warnings

import torch
import triton
import triton.language as tl

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def profiled(name):
    with torch.profiler.record_function(name), torch.cuda.nvtx.range(name):
        yield


@triton.jit
def _fill(x, index, value, total, n1, n2, n3, s0, s1, s2, s3, B: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    mask = i < total
    c = i % n3
    b = (i // n3) % n2
    a = (i // (n3 * n2)) % n1
    row = tl.load(index + i // (n3 * n2 * n1), mask=mask, other=0)
    tl.store(x + row * s0 + a * s1 + b * s2 + c * s3, tl.full((B,), value, tl.float32), mask=mask)


@torch.compiler.disable
def index_fill_(dim, x, index, value):
    if x.dim() > 4:
        warnings.warn(f"rank {x.dim()} is not supported", RuntimeWarning, stacklevel=2)
    moved = x.movedim(dim, 0)
    while moved.dim() < 4:
        moved = moved.unsqueeze(-1)
    _, n1, n2, n3 = moved.shape
    total = index.numel() * n1 * n2 * n3
    logger.debug("index_fill_: %d elements of %s", total, tuple(x.shape))
    if total:
        with profiled("index_fill_"), torch.cuda.device(x.device):
            _fill[(triton.cdiv(total, 512),)](
                moved, index.contiguous(), float(value), total, n1, n2, n3, *moved.stride(), B=512
            )
    return x
