"""A kernel compiled from the source gives the TTIR of the submission's process, and another source gives another one."""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.compiler import ASTSource
from triton.compiler.code_generator import CodeGenerator
from triton.compiler.compiler import make_backend
from triton.compiler.errors import CompilationError
from triton.language.semantic import TritonSemantic
from triton.runtime.jit import JITCallable

from kbx_env.sandbox import recompile
from kbx_env.sandbox.fake_cuda.driver import TARGETS
from kbx_env.sandbox.recipe import evaluated, recipe
from kbx_env.sandbox.recompile import Changed, NotComparable, NotInSource, Source, answer
from kbx_env.sandbox.specialised import ForeignCall, guard_compiler, quicken_compiler, ttir_of, with_divisors

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
CLASSES = '''
import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate


@triton.constexpr_function
def _width(n):
    return 2 * n


@aggregate
class Pair:
    a: tl.tensor
    b: tl.tensor
    n: tl.constexpr

    @triton.constexpr_function
    def __init__(self, a, b, n):
        self.a = a
        self.b = b
        self.n = tl.constexpr(n)

    @triton.jit
    def swapped(self):
        return Pair(self.b, self.a, self.n)


@triton.jit
def kernel(x, y, n, B: tl.constexpr):
    o = tl.arange(0, _width(B))
    p = Pair(tl.load(x + o, mask=o < n), tl.load(y + o, mask=o < n), 3).swapped()
    tl.store(y + o, p.a - p.b * p.n, mask=o < n)
'''


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CodeGenerator, "call_Function", CodeGenerator.call_Function)  # puts it back after the test
    guard_compiler()


def _source(text: str | bytes, folder: Path) -> Source:
    text = text.encode() if isinstance(text, str) else text
    (folder / "submission.py").write_bytes(text)
    return Source(text, str(folder / "submission.py"))


def _again(text: str | bytes, row: dict[str, Any], folder: Path) -> str:
    return normalised(_source(text, folder).compile(row, TARGET)["text"])


_LOCATIONS = re.compile(r'^#loc.*$|\s*loc\((?:[^()"]|"[^"]*"|\((?:[^()"]|"[^"]*"|\([^()]*\))*\))*\)', re.MULTILINE)


def normalised(text: str) -> str:
    """Return TTIR without source locations, which depend on the folder of the process."""
    return "\n".join(line.rstrip() for line in _LOCATIONS.sub("", text).splitlines() if line.strip())


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
        with evaluated() as results:
            text = ttir_of(ASTSource(fn, signature, constants, attrs), backend, options, TARGET)
        return recipe(fn, signature, constants, attrs, options) | {"results": results}, text
    finally:
        del sys.modules["submission"]


def test_closures_helpers_and_constants_are_rebuilt(tmp_path: Path) -> None:
    row, text = _described(tmp_path, SOURCE)
    assert _again(SOURCE, row, tmp_path) == normalised(text) and "tt.extern_elementwise" in text
    found = answer({"recipe": row, "target": "sm_90"}, _source(SOURCE, tmp_path))
    assert found["ok"] and normalised(found["kernel"]["text"]) == normalised(text) and found["kernel"]["fused"] is True


def test_classes_and_functions_on_constants_are_rebuilt(tmp_path: Path) -> None:
    row, text = _described(tmp_path, CLASSES)
    assert row["evaluates"] and [r["r"] for r in row["results"]] == [{"c": 256}]
    source = _source(CLASSES, tmp_path)
    for _ in range(2):  # the functions are made once
        assert normalised(source.compile(row, TARGET)["text"]) == normalised(text)
    first = row["results"][0]
    for results, said in (([], "lacks"), ([{**first, "name": "other"}], "other"), ([{**first, "r": {"x": "set"}}], "set")):
        found = answer({"recipe": {**row, "results": results}, "target": "sm_90"}, source)
        assert said in found["error"]


def test_a_constructor_that_computes_is_refused(tmp_path: Path) -> None:
    row, _ = _described(tmp_path, CLASSES)
    found = answer({"recipe": row, "target": "sm_90"}, _source(CLASSES.replace("self.a = a", "self.a = print(a) or a"), tmp_path))
    assert "may only set fields" in found["error"]


@pytest.mark.parametrize(("old", "new"), [
    ("FACTOR * v", "FACTOR - v"), ("tanh", "exp"), ("mask=o < n)\n\n    return", "mask=o <= n)\n\n    return"),
])  # fmt: skip
def test_another_text_of_a_function_is_told(tmp_path: Path, old: str, new: str) -> None:
    row, _ = _described(tmp_path, SOURCE)
    assert old in SOURCE
    other = _source(SOURCE.replace(old, new), tmp_path)
    with pytest.raises(Changed):
        other.compile(row, TARGET)
    assert "was replaced" in answer({"recipe": row, "target": "sm_90"}, other)["changed"]


def test_a_function_that_the_source_lacks_is_told(tmp_path: Path) -> None:
    row, _ = _described(tmp_path, SOURCE)
    with pytest.raises(NotInSource):
        _again(b"\n" + SOURCE.encode(), row, tmp_path)
    assert "no function" in answer({"recipe": row, "target": "sm_90"}, _source("x = 1\n", tmp_path))["error"]
    assert "parsed" in answer({"recipe": row, "target": "sm_90"}, None)["error"]


def test_a_description_reaches_nothing_but_triton(tmp_path: Path) -> None:
    row, _ = _described(tmp_path, SOURCE)
    for ref in ({"m": "os"}, {"a": ["subprocess", "run"]}, {"a": ["triton.runtime.build", "os.system"]},
                {"a": ["triton.language.core", "builtins.eval"]}, {"z": 1}):
        bad = {**row, "constexprs": [[[3], ref]]}
        with pytest.raises((NotComparable, AttributeError)):
            _again(SOURCE, bad, tmp_path)


@pytest.mark.parametrize("call", [
    "triton.runtime.build.subprocess.getoutput('true')", "tl.core.builtins.open('x', 'w')", "tl.core.inspect.getmodule(1)",
])  # fmt: skip
def test_the_compiler_calls_no_function_but_tritons(tmp_path: Path, call: str) -> None:
    """Triton calls whatever a kernel names, while it compiles."""
    source = SOURCE.replace("        tl.store(", f"        {call}\n        tl.store(")
    with pytest.raises(CompilationError) as e:
        _described(tmp_path, source)
    assert isinstance(e.value.__cause__, ForeignCall) or "ForeignCall" in str(e.value)


def test_what_the_source_imports_is_not_asked_of_the_description(tmp_path: Path) -> None:
    row, text = _described(tmp_path, SOURCE)
    for f in row["functions"]:
        f["names"] = {n: {"c": 1} if n in ("tl", "libdevice") else d for n, d in f["names"].items()}
    assert _again(SOURCE, row, tmp_path) == normalised(text)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(JITCallable, "parse", JITCallable.parse)  # puts both back after the test
    monkeypatch.setattr(tl.block_type, "__init__", tl.block_type.__init__)
    checked = TritonSemantic.binary_op_sanitize_overflow_impl
    monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", checked)
    return quicken_compiler


@pytest.mark.parametrize("source", [SOURCE, CLASSES])
def test_the_quick_compiler_gives_the_same_ttir(source: str, tmp_path: Path, quick) -> None:
    row, _ = _described(tmp_path, source)
    plain = _again(source, row, tmp_path)
    quick()
    assert [_again(source, row, tmp_path) for _ in range(2)] == [plain, plain]


def test_overflow_is_asserted_where_the_kernel_is_compiled_for_debugging(tmp_path: Path, quick) -> None:
    row, _ = _described(tmp_path, SOURCE)
    debugged = {**row, "options": {**row["options"], "debug": True}}
    plain = _again(SOURCE, debugged, tmp_path)
    quick()
    assert "tt.assert" in plain and _again(SOURCE, debugged, tmp_path) == plain
    assert "tt.assert" not in _again(SOURCE, row, tmp_path)


@given(divided=st.lists(st.sets(st.sampled_from([0, 1, 2])), min_size=2, max_size=4))
@settings(max_examples=12, deadline=None)
def test_a_kernel_is_compiled_once_for_parameters_of_any_divisibility(divided: list[set[int]]) -> None:
    """What is returned for each is what the compiler makes of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        row, _ = _described(folder, SOURCE)
        rows = [{**row, "attrs": [[[k], [["tt.divisibility", 16]]] for k in sorted(some)]} for some in divided]
        kept = _source(SOURCE, folder)
        with mock.patch.object(recompile, "ttir_of", side_effect=ttir_of) as compiled:
            texts = [kept.compile(r, TARGET)["text"] for r in rows]
        assert compiled.call_count == 1
        assert texts == [_source(SOURCE, folder).compile(r, TARGET)["text"] for r in rows]


def test_what_is_more_than_divisibility_is_compiled_anew(tmp_path: Path) -> None:
    row, text = _described(tmp_path, SOURCE)
    signature = {"x": "*fp32", "y": "*fp32", "n": "i32", "B": "constexpr"}
    assert with_divisors(text, signature, {}) is not None
    assert with_divisors(text, signature, {(0,): [["tt.pointer_range", 32]]}) is None
    assert with_divisors(text, signature | {"n": ("i32", "i32")}, {}) is None
    assert with_divisors(text, signature | {"x": "tensordesc<fp32[16]>"}, {}) is None
    assert with_divisors(text, {k: signature[k] for k in "xyB"}, {}) is None, "another number of parameters"
    assert with_divisors("module {}", signature, {}) is None


def test_a_kernel_that_changes_a_shape_changes_no_other(quick) -> None:
    quick()
    for _ in range(2):
        block = tl.block_type(tl.float32, [4, 8])
        assert (list(block.shape.values), block.numel, block.name) == ([4, 8], 32, str(block))
        block.shape.values[0] = 16
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.float32, [3])
    with pytest.raises(TypeError, match="constexpr"):
        tl.block_type(tl.float32, [4, 8.0])
