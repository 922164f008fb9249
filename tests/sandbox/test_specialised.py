"""Kernels that are compiled in one context are those that are compiled in a context each."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.compiler import ASTSource, compiler
from triton.runtime.jit import JITFunction

from kbx_env.sandbox import specialised
from kbx_env.sandbox.fake_cuda.driver import TARGETS

TEXTS = ("ttir", "ttgir", "llir", "ptx", "cubin")


@triton.jit
def _rows(x, y, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    v = tl.load(x + tl.program_id(0) * n + o, mask=o < n, other=0.0).to(tl.float32)
    tl.store(y + tl.program_id(0) * n + o, (tl.erf(v) / tl.sum(v, 0)).to(tl.float16), mask=o < n)


@triton.jit
def _products(a, b, c, k, SIZE: tl.constexpr):
    r, s = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for i in range(0, k, SIZE):
        total = tl.dot(tl.load(a + r * k + s + i), tl.load(b + (r + i) * SIZE + s), total)
    tl.store(c + r * SIZE + s, total)


def _compiled() -> list[dict[str, object]]:
    """Compile several kernels, between them two that cannot be compiled, and return their texts."""
    found = []
    for size in (32, 3, 64):
        rows = {"x": "*fp16", "y": "*fp16", "n": "i32", "BLOCK": "constexpr"}
        products = {"a": "*fp16", "b": "*fp16", "c": "*fp32", "k": "i32", "SIZE": "constexpr"}
        for source in (ASTSource(_rows, rows, {(3,): size}), ASTSource(_products, products, {(4,): size})):
            if size == 3:  # no power of two
                with pytest.raises(Exception, match="power of 2"):
                    triton.compile(source, target=TARGETS["sm_90"])
            else:
                kernel = triton.compile(source, target=TARGETS["sm_90"], options={"num_warps": 4})
                found.append({text: kernel.asm[text] for text in TEXTS})
    return found


def test_one_context_gives_the_same_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "ir", compiler.ir)  # put back afterwards
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "plain"))
    plain = _compiled()
    specialised.keep_contexts()
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "kept"))
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    assert _compiled() == plain
    # Python 3.11 counts the depth of ast.parse for all threads together, and fails if they take turns within it. In a runner the
    # launch that needs such a kernel compiles it again.
    parse, one_at_a_time = JITFunction.parse, threading.Lock()

    def parse_alone(function: JITFunction[Any]) -> Any:
        with one_at_a_time:
            return parse(function)

    monkeypatch.setattr(JITFunction, "parse", parse_alone)
    with ThreadPoolExecutor(4) as threads:
        assert all(found == plain for found in threads.map(lambda _: _compiled(), range(4)))
    assert compiler.ir.context() is compiler.ir.context()


def test_each_thread_has_a_context_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "ir", compiler.ir)
    specialised.keep_contexts()
    of_thread = []
    thread = threading.Thread(target=lambda: of_thread.append(compiler.ir.context()))
    thread.start()
    thread.join()
    assert of_thread[0] is not compiler.ir.context()
