"""A kernel compiled again from the source gives the same TTIR, and another source gives another one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from kbx_env.sandbox.fake_cuda.driver import TARGETS
from kbx_env.sandbox.launches import ttir_of
from kbx_env.sandbox.recipe import recipe
from kbx_env.sandbox.recompile import NotComparable, NotInSource, answer, compile_again, normalised

SOURCE = '''
import triton
import triton.language as tl
from triton.language.extra import libdevice

FACTOR = tl.constexpr(2.5)


@triton.jit
def _twice(v, by=1):
    return FACTOR * v + by


def made(power):
    POWER = tl.constexpr(power)

    @triton.jit
    def kernel(x, y, n, B: tl.constexpr):
        o = tl.program_id(0) * B + tl.arange(0, B)
        v = tl.load(x + o, mask=o < n)
        for _ in tl.static_range(POWER):
            v = _twice(libdevice.tanh(v))
        tl.store(y + o, v, mask=o < n)

    return kernel


kernel = made(2)
'''
TARGET = TARGETS["sm_90"]


def _described(folder: Path, source: str, entry: str = "kernel") -> tuple[dict[str, Any], str]:
    """Load a source and return the description of its kernel, and the TTIR."""
    path = folder / "submission.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("submission", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["submission"] = module
    try:
        spec.loader.exec_module(module)
        fn = getattr(module, entry)
        backend = make_backend(TARGET)
        options = backend.parse_options({"num_warps": 8})
        signature = {"x": "*fp32", "y": "*fp32", "n": "i32", "B": "constexpr"}
        constants, attrs = {(3,): 128}, {(0,): [["tt.divisibility", 16]]}
        text = ttir_of(ASTSource(fn, signature, constants, attrs), backend, options, TARGET)
        return recipe(fn, signature, constants, attrs, options), text
    finally:
        del sys.modules["submission"]


def test_closures_helpers_and_constants_are_rebuilt(tmp_path: Path) -> None:
    row, text = _described(tmp_path, SOURCE)
    again = compile_again(SOURCE.encode(), row, str(tmp_path / "submission.py"), TARGET)
    assert normalised(again) == normalised(text) and "tt.extern_elementwise" in again
    assert answer({"recipe": row, "target": "sm_90", "text": text}, SOURCE.encode(), str(tmp_path)) == {"ok": True, "same": True}


@pytest.mark.parametrize(("old", "new"), [
    ("FACTOR * v", "FACTOR - v"), ("tanh", "exp"), ("mask=o < n)\n\n    return", "mask=o <= n)\n\n    return"),
])  # fmt: skip
def test_another_source_gives_another_kernel(tmp_path: Path, old: str, new: str) -> None:
    row, text = _described(tmp_path, SOURCE)
    assert old in SOURCE
    other = SOURCE.replace(old, new).encode()
    assert answer({"recipe": row, "target": "sm_90", "text": text}, other, str(tmp_path)) == {"ok": True, "same": False}


def test_a_function_that_the_source_lacks_is_told(tmp_path: Path) -> None:
    row, text = _described(tmp_path, SOURCE)
    with pytest.raises(NotInSource):
        compile_again(b"\n" + SOURCE.encode(), row, str(tmp_path / "submission.py"), TARGET)
    assert "absent" in answer({"recipe": row, "target": "sm_90", "text": text}, b"x = 1\n", str(tmp_path))


def test_a_description_reaches_nothing_but_triton(tmp_path: Path) -> None:
    row, _ = _described(tmp_path, SOURCE)
    for ref in ({"m": "os"}, {"a": ["subprocess", "run"]}, {"a": ["triton.runtime.build", "os.system"]},
                {"a": ["triton.language.core", "builtins.eval"]}, {"z": 1}):
        bad = {**row, "constexprs": [[[3], ref]]}
        with pytest.raises((NotComparable, AttributeError)):
            compile_again(SOURCE.encode(), bad, str(tmp_path / "submission.py"), TARGET)


def test_what_the_source_imports_is_not_asked_of_the_description(tmp_path: Path) -> None:
    row, text = _described(tmp_path, SOURCE)
    for f in row["functions"]:
        f["names"] = {n: {"c": 1} if n in ("tl", "libdevice") else d for n, d in f["names"].items()}
    assert normalised(compile_again(SOURCE.encode(), row, str(tmp_path / "submission.py"), TARGET)) == normalised(text)
