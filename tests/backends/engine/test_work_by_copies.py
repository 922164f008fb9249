"""Results that torch's copies have put together, values that the host reads, and symbols that no device links."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kbx_env.backends.engine import Engine, TraceError
from kbx_env.backends.engine.engine import ASSEMBLED_ELEMENTS
from kbx_env.backends.engine.storage import unit_bytes
from kbx_env.backends.engine.symbols import UnknownSymbol, signatures

X, MADE, Y = 0x10000, 0x20000, 0x30000
SAME = """
module {
  tt.func public @same(%x: !tt.ptr<f32>, %y: !tt.ptr<f32>) {
    %r = tt.make_range {end = 32 : i32, start = 0 : i32} : tensor<32xi32>
    %xp = tt.splat %x : !tt.ptr<f32> -> tensor<32x!tt.ptr<f32>>
    %xo = tt.addptr %xp, %r : tensor<32x!tt.ptr<f32>>, tensor<32xi32>
    %v = tt.load %xo : tensor<32x!tt.ptr<f32>>
    %z = arith.constant dense<FACTOR> : tensor<32xf32>
    %w = arith.mulf %v, %z : tensor<32xf32>
    %yp = tt.splat %y : !tt.ptr<f32> -> tensor<32x!tt.ptr<f32>>
    %yo = tt.addptr %yp, %r : tensor<32x!tt.ptr<f32>>, tensor<32xi32>
    tt.store %yo, %w : tensor<32x!tt.ptr<f32>>
    tt.return
  }
}
"""
EXTERN = """
module {
  tt.func public @f(%x: !tt.ptr<f32>) {
    %v = tt.load %x : !tt.ptr<f32>
    %w = tt.extern_elementwise %v {libname = "", libpath = "", pure = true, symbol = "SYMBOL"} : (f32) -> f32
    tt.store %x, %w : !tt.ptr<f32>
    tt.return
  }
}
"""


def _view(base: int, shape: list[int], stride: list[int] | None = None, offset: int = 0) -> list:
    return [base, "float32", offset, shape, stride or [math.prod(shape[k + 1 :]) for k in range(len(shape))]]


def _engine(factor: str) -> Engine:
    engine = Engine()
    data = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    engine.input("x", X, 128, 0, data.tobytes(), _view(X, [32]))
    engine.kernel("k", SAME.replace("FACTOR", factor), True)
    engine.run([["alloc", MADE, 128], ["alloc", Y, 128]])
    return engine


def _assembled(engine: Engine, elements: int = 32) -> bool:
    engine.run([["launch", "k", [1, 1, 1], [MADE, Y], ["x", "y"]]])
    return engine.origin(engine.heap.view(_view(Y, [elements])))["assembled"]


SWAP = [["copy", _view(MADE, [16]), _view(X, [16], offset=64)], ["copy", _view(MADE, [16], offset=64), _view(X, [16])]]


def test_a_copied_finished_result_is_recognised_whatever_the_kernel_adds() -> None:
    engine = _engine("1.000000e+00")
    engine.run(SWAP)
    assert _assembled(engine)


def test_a_kernel_that_computes_is_not_suspected() -> None:
    engine = _engine("2.000000e+00")
    engine.run(SWAP)
    assert not _assembled(engine)


def test_a_whole_copy_is_not_suspected() -> None:
    engine = _engine("1.000000e+00")
    engine.run([["copy", _view(MADE, [32]), _view(X, [32])]])
    assert not _assembled(engine)


def test_a_part_of_one_reordered_copy_is_what_kernels_pick() -> None:
    engine = _engine("1.000000e+00")
    engine.run([["copy", _view(MADE, [4, 8]), _view(X, [4, 8], [1, 4])]])
    engine.run([["launch", "k", [1, 1, 1], [MADE, Y], ["x", "y"]]])
    assert engine.origin(engine.heap.view(_view(Y, [32])))["assembled"], "all of it"
    # The rule needs at least half: a kernel may pick a row of a transposed copy.
    assert not engine.origin(engine.heap.view(_view(Y, [8])))["assembled"]


def test_few_elements_agree_by_chance() -> None:
    engine = _engine("1.000000e+00")
    engine.run(SWAP)
    assert not _assembled(engine, ASSEMBLED_ELEMENTS - 1)


def test_a_new_call_forgets() -> None:
    engine = _engine("1.000000e+00")
    engine.run(SWAP)
    engine.begin(10.0)
    assert not _assembled(engine)


def test_memory_that_outlives_a_call_depends_on_nothing_of_the_next() -> None:
    engine = _engine("2.000000e+00")
    engine.run([["copy", _view(MADE, [32]), _view(X, [32])], ["launch", "k", [1, 1, 1], [MADE, Y], ["x", "y"]]])
    assert engine.origin(engine.heap.view(_view(Y, [32])))["inputs"] == ["x"]
    engine.begin(10.0)
    assert engine.origin(engine.heap.view(_view(Y, [32])))["inputs"] == []


def test_values_read_back_count_by_the_numbers_that_were_written() -> None:
    assert [unit_bytes(k) for k in ({"i1"}, {"i8"}, {"f16", "f32"}, {"bf16"}, {"i64"}, {"f64"}, {"f8E4M3FN"}, {"?"}, set())] == [
        1, 1, 2, 2, 8, 8, 1, 1, 8,
    ]  # fmt: skip
    engine = Engine()
    engine.input("mask", X, 64, 0, bytes(64), [X, "bool", 0, [64], [1]])
    as_words = engine.heap.view([X, "int64", 0, [8], [1]])
    assert engine.origin(as_words)["unit"] == 1, "64 bytes are 64 values"


def test_symbols_of_libdevice_are_known_by_name_and_type() -> None:
    rows = signatures()
    assert len({symbol for symbol, _, _ in rows}) > 300
    assert ("__nv_powf", ("f32", "f32"), "f32") in rows and ("__nv_popc", ("i32",), "i32") in rows
    Engine().kernel("k", EXTERN.replace("SYMBOL", "__nv_expf"), True)
    for symbol in ("__nv_exp", "__nv_nowheref", "expf", ""):
        with pytest.raises(UnknownSymbol):
            Engine().kernel("k", EXTERN.replace("SYMBOL", symbol), True)


def test_a_kernel_is_sent_once() -> None:
    engine = _engine("1.000000e+00")
    with pytest.raises(TraceError, match="twice"):
        engine.kernel("k", SAME.replace("FACTOR", "2.000000e+00"), True)
