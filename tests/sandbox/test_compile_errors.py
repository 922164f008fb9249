"""Errors of the compiler by the lines of the file: in a kernel, in a helper, with decorators, and when they are made up."""

from __future__ import annotations

import ast

import pytest
from triton.compiler.errors import CompilationError

from kbx_env.sandbox.compile_errors import described, locate

SOURCE = '''\
import triton
import triton.language as tl


@triton.jit
def _helper(v, n):
    w = n.to(tl.int64)
    return v * w


class Holder:
    @triton.jit(do_not_specialize=["m"])
    def _kernel(x, n,
                m):
        v = tl.load(x)
        tl.store(x, _helper(v, n))
'''
HELPER = "def _helper(v, n):\n    w = n.to(tl.int64)\n    return v * w\n"
KERNEL = "def _kernel(x, n,\n            m):\n    v = tl.load(x)\n    tl.store(x, _helper(v, n))\n"


def _node(line: int, column: int) -> ast.AST:
    return ast.Pass(lineno=line, col_offset=column)


def test_an_error_in_a_helper_names_both_functions_by_their_lines_in_the_file() -> None:
    error = CompilationError(KERNEL, _node(4, 16), None)
    error.__cause__ = CompilationError(HELPER, _node(2, 8), "AttributeError(\"'int' object has no attribute 'to'\")")
    got = locate(error, SOURCE, 40)
    assert got.line == 7
    first, text, mark = got.text.split("\n")
    assert first == (
        "AttributeError: 'int' object has no attribute 'to' "
        "(in _helper, called by kernel _kernel in line 16, launched in line 40)"
    )
    assert text == "    w = n.to(tl.int64)" and mark.index("^") == 8


def test_an_error_in_the_kernel_itself_and_the_cause_that_triton_chains() -> None:
    error = CompilationError(KERNEL, _node(3, 8), None)
    error.__cause__ = ValueError("no such load")
    got = locate(error, SOURCE, None)
    assert got.line == 15 and got.text.startswith("ValueError: no such load (in kernel _kernel)\n    v = tl.load(x)\n")


@pytest.mark.parametrize("error", [
    CompilationError(None, ast.Module([], []), "made up"), CompilationError("", _node(3, 0), "made up"),
    CompilationError("def other():\n  pass", _node(900, 0), "made up"), CompilationError("\n\n", _node(1, 0), "made up"),
])  # fmt: skip
def test_an_error_that_is_not_of_this_source_has_no_line(error: CompilationError) -> None:
    got = locate(error, SOURCE, 3)
    assert got.line is None or got.line > 17  # the caller then names the launch
    assert got.text.startswith("made up")


def test_a_specialisation_names_types_and_constants() -> None:
    signature = {"x": "*fp16", "n": "constexpr", "bias": "constexpr", "k": "i32", "B": "constexpr"}
    got = described(signature, {(1,): 1, (2,): None, (4,): 256}, frozenset({"B"}))
    assert got == "x *fp16, n=1 (made a constant), bias=None, k i32, B=256"
