# task: math/rad2deg_sqrt
# -*- coding: utf-8 -*-
# shows: the usual utf-8 cookie among the first two lines, strings and comments that name forbidden things, names such as open_ and exec_
# family: words
"""Degrees and roots in one pass (α → α·180/π, √α).

Replaces ``torch.rad2deg(x), torch.sqrt(x)``; never calls ``eval("x")``, ``os.system("rm")`` or ``__import__('os')``.
"""

import torch
import triton
import triton.language as tl

# import os, subprocess; os.environ["TRITON_INTERPRET"] = "1"
# reference = lambda x: (torch.rad2deg(x), torch.sqrt(x))
# with open("/tmp/x") as f: exec(f.read())
HELP = "torch.compile(torch.matmul); globals()['x']; import numpy as np; sys.settrace(None)"


@triton.jit
def _kernel(open_, compile_, exec_, n, B: tl.constexpr):
    """x * torch.pi / 180 is the way back; `torch.ops.aten.sqrt` the other one."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(open_ + i, mask=i < n, other=1.0)  # torch.load
    tl.store(compile_ + i, v * 57.29577951308232, mask=i < n)
    tl.store(exec_ + i, tl.sqrt_rn(v), mask=i < n)


def rad2deg_sqrt(input):
    input_ = input.contiguous()
    degrees, root_ = torch.empty_like(input_), torch.empty_like(input_)
    # return torch.rad2deg(input), torch.sqrt(input)
    if input_.numel() > 0:
        _kernel[(triton.cdiv(input_.numel(), 512),)](input_, degrees, root_, input_.numel(), B=512)
    return degrees, root_
