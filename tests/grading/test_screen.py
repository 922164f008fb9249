"""What the screen calls malformed, what it rejects, and what it lets through."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbx_env.catalog import load_task
from kbx_env.grading.screen import screen
from kbx_env.outcome import Verdict

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
        ("import ctypes", "forbidden_import"),
        ("import numpy as np", "forbidden_import"),
        ("from os import system", "forbidden_import"),
        ("from . import x", "forbidden_import"),
        ("from torch import _C", "forbidden_name"),
        ("torch.ops.aten.mm", "forbidden_name"),
        ("torch.utils.cpp_extension", "forbidden_name"),
        ("torch.compile", "forbidden_name"),
        ("y = eval('1')", "forbidden_name"),
        ("().__class__.__bases__[0].__subclasses__()", "forbidden_name"),
    ],
)
def test_rejected(line: str, rule: str) -> None:
    got = screen(TASK, GOOD + line + "\n")
    assert got.verdict is Verdict.REJECTED
    assert got.violations[0].rule == rule and "line 6" in got.violations[0].detail


@pytest.mark.parametrize(
    "source",
    [
        GOOD,
        GOOD + "# import ctypes, eval(\nNOTE = 'torch.ops numpy'\n",
        "def helper(*args, **kwargs):\n    return args[0]\ngelu_fp16 = helper\n",
        "def gelu_fp16(*args, **kwargs):\n    return args[0]\n",
        "from triton.language.extra import libdevice\n" + GOOD,
        "def gelu_fp16(input, approximate='none', BLOCK=128):\n    return input\n",
    ],
)
def test_let_through(source: str) -> None:
    assert screen(TASK, source).verdict is None


@given(st.binary(max_size=200) | st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_never_raises(source: bytes | str) -> None:
    assert screen(TASK, source).verdict is not None
