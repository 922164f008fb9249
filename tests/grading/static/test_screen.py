"""What the screen calls malformed, what it rejects, and what it lets through."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbx_env.grading.static.screen import screen
from kbx_env.outcome import Verdict
from kbx_env.spec.catalog import load_task

TASK = load_task("activation/gelu_fp16")
GOOD = "import torch\nimport triton\n\ndef gelu_fp16(input, approximate='none'):\n    return input\n"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (b"", "empty"),
        (b"\n\n  ", "empty"),
        (b"x = 1\n\xff\xfe\n", "line 2: not UTF-8"),
        (b"\x00\x01", "control character"),
        (b"x" * (10 << 20), "bytes; at most"),
        ("def gelu_fp16(input:\n", "line 1: syntax error"),
        ("x = 1\n", "no function named 'gelu_fp16'"),
        ("def gelu_fp16(x, approximate='none'):\n    return x\n", "lacks the parameter 'input'"),
        ("def gelu_fp16(input):\n    return input\n", "lacks the parameter 'approximate'"),
        ("def gelu_fp16(approximate, input):\n    return input\n", "another order"),
        ("def gelu_fp16(input, extra, approximate='none'):\n    return input\n", "unknown parameter 'extra'"),
        ("# -*- coding: latin-1 -*-\n" + GOOD, "coding cookie"),
        ("\ufeff" + GOOD, "byte-order mark"),
        ("# one line\u2028# for Python\n# coding: latin-1\n" + GOOD, "coding cookie"),
        ("import triton\n@triton.jit\ndef gelu_fp16(input, approximate):\n    pass\n", "is a Triton kernel"),
        ("(" * 5000 + ")" * 5000, ""),
    ],
)
def test_malformed(source: str | bytes, says: str) -> None:
    got = screen(TASK, source)
    assert got.verdict is Verdict.MALFORMED
    assert says in got.message


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("import ctypes; ctypes.CDLL(None)", "forbidden_import"),
        ("import numpy as np; np.zeros(1)", "forbidden_import"),
        ("from os import system; system('ls')", "forbidden_import"),
        ("from . import x; x", "forbidden_import"),
        ("from os import *", "forbidden_import"),
        ("import os.path as p\ndef f(x: 'p.join'): pass", "forbidden_import"),
        ("import os\ndef f():\n  global os", "forbidden_import"),
        ("import torch._inductor; torch", "forbidden_import"),
        ("import os, ctypes; ctypes", "forbidden_import"),
        ("from torch import _C", "forbidden_name"),
        ("torch.ops.aten.mm", "forbidden_name"),
        ("torch.utils.cpp_extension", "forbidden_name"),
        ("torch.compile", "forbidden_name"),
        ("y = eval('1')", "forbidden_name"),
        ("().__class__.__bases__[0].__subclasses__()", "forbidden_name"),
        ("torch.os.getpid()", "forbidden_name"),
        ("x = torch.nn.functional.torch.sys", "forbidden_name"),
        ("import torch as t; t.ops.aten.mm", "forbidden_name"),
        ("import logging as q; q.os", "forbidden_name"),
        ("from typing import sys", "forbidden_name"),
        ("from triton.testing import *; os.getpid()", "forbidden_name"),
        ("import enum; a, b = enum, 1; a.bltns", "forbidden_name"),
        ("for m in (torch, triton): m.ctypes", "forbidden_name"),
        ("getattr(torch, 'o' + 's')", "forbidden_name"),
        ("A = '__clo'; getattr(f, f'{A}sure__')", "forbidden_name"),
        ("getattr(f, ''.join(reversed('__slabolg__')))", "forbidden_name"),
        ("getattr(f, '__glo%s__' % 'bals')", "forbidden_name"),
        ("import operator; operator.attrgetter('utils._python_dispatch')(torch)", "forbidden_name"),
        ("import operator; g = operator.attrgetter('__globals__')", "forbidden_name"),
        ("'{0.__globals__}'.format(gelu_fp16)", "forbidden_name"),
        ("import string; string.Formatter()", "forbidden_name"),
        ("x = torch.__dict__['os']", "forbidden_name"),
        ("__builtins__['ex' + 'ec']", "forbidden_name"),
        ("def f(eval): return eval\nx = 1; eval('1')", "forbidden_name"),
        ("if 0: eval = 1\neval('1')", "forbidden_name"),
        ("class K:\n  if 0: eval = 1\n  eval('1')", "forbidden_name"),
        ("def f(a=eval): eval = a", "forbidden_name"),
        ("class K:\n  def f(self): return self._C", "forbidden_name"),
        ("class K:\n  def f(self):\n    self = torch\n    self._C = self._C", "forbidden_name"),
        ("def f(x: \"__import__('os')\"): pass", "forbidden_name"),
    ],
)
def test_rejected(line: str, rule: str) -> None:
    got = screen(TASK, GOOD + line + "\n")
    assert got.verdict is Verdict.REJECTED
    assert got.violations[0].rule == rule and int(got.violations[0].detail.split(":")[0][5:]) in range(6, 10)


@pytest.mark.parametrize(
    "line", ["import os", "import numpy as np", "from os import system", "from . import x", "import os.path, ctypes"]
)
def test_a_forbidden_import_that_nothing_uses_is_an_error_like_one_that_does_not_compile(line: str) -> None:
    got = screen(TASK, GOOD + line + "\n")
    assert got.verdict is Verdict.COMPILE_ERROR and not got.violations
    assert got.message.startswith("line 6: ") and "nothing uses it" in got.message and "allowed: torch" in got.message
    assert got.slips and any("line 6: " in s for s in got.slips), "it is a certain error, so that hints pay no more than for one"


@pytest.mark.parametrize(
    "source",
    [
        GOOD,
        GOOD + "# import ctypes, eval(\nNOTE = 'torch.ops numpy'\n",
        "def helper(*args, **kwargs):\n    return args[0]\ngelu_fp16 = helper\n",
        "def gelu_fp16(*args, **kwargs):\n    return args[0]\n",
        "from triton.language.extra import libdevice\n" + GOOD,
        "def gelu_fp16(input, approximate='none', BLOCK=128):\n    return input\n",
        "# -*- coding: utf-8 -*-\n" + GOOD,
        "import typing\ngelu_fp16: typing.Any = print\n",
        "gelu_fp16, other = print, 1\n",
        "if True:\n    def gelu_fp16(input, approximate='none'):\n        return input\n",
        GOOD + "def f(vars, open=1):\n    compile = vars\n    return [compile for _ in range(open)]\n",
        GOOD + "def f(eval):\n    return lambda: (eval, [eval for _ in '12'])\n",
        GOOD + "class K:\n    __slots__ = ('_C',)\n    def __init__(self, c):\n        self._C = c\n",
        GOOD + "getattr(torch, 'float' + '16'); torch.backends.cuda.matmul.allow_tf32 = False\n",
        GOOD + "import operator; operator.attrgetter('kwargs')(triton.Config({})); '{0.shape}'.format(1)\n",
        GOOD + "from triton.runtime.errors import OutOfResources\nfrom torch.amp import custom_fwd\n",
        GOOD + "with torch.inference_mode(), torch.profiler.record_function('x'), torch.cuda.nvtx.range('x'): pass\n",
    ],
)
def test_let_through(source: str) -> None:
    assert screen(TASK, source).verdict is None


@given(st.binary(max_size=200) | st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_never_raises(source: bytes | str) -> None:
    assert screen(TASK, source).verdict is not None


@pytest.mark.parametrize(
    "line", ["x = " + "+".join(["'a'"] * 400), "x = 'a' * 10**9", "y = '%999999999d' % 1", "a = a + a"]
)
def test_folding_is_bounded(line: str) -> None:
    assert screen(TASK, GOOD + line + "\n").verdict is None


@pytest.mark.parametrize(
    "deep",
    ["x = a" + ".b" * 960, "x = a" + " + a" * 960, "x = a" + "()" * 960, "if a: pass\n" + "elif a: pass\n" * 900],
)
def test_a_chain_that_exhausts_the_stack_is_a_verdict(deep: str) -> None:
    """Python parses what walking the tree cannot follow: the grader must not fail over it, wherever its own stack stands."""
    import sys

    task = load_task("activation/gelu_fp16")
    kept = sys.getrecursionlimit()
    for limit in (kept, 420):
        sys.setrecursionlimit(limit)
        try:
            verdict = screen(task, deep + "\n").verdict
        finally:
            sys.setrecursionlimit(kept)
        assert verdict is Verdict.MALFORMED


def test_a_screen_is_kept_for_its_task_and_its_text_only() -> None:
    assert screen(TASK, GOOD).verdict is None is screen(TASK, GOOD).verdict
    other = screen(load_task("activation/gelu_bf16"), GOOD)
    assert other.verdict is Verdict.MALFORMED and screen(TASK, GOOD + "import os\nos.getcwd()\n").verdict is Verdict.REJECTED
    assert screen(TASK, "x = 1\n").verdict is Verdict.MALFORMED and screen(TASK, "x = 1\n", as_published=True).verdict is None
