"""The engine: what a trace may say, what it may not, and what is known of the bytes afterwards."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kbx_env.backends import ttir
from kbx_env.backends.engine import ComputedByHost, Engine, LaunchRefused, TraceError, may_copy, storage
from kbx_env.backends.engine.serve import EngineServer

A, B = 0x10000, 0x20000
KERNEL = """
#loc = loc("k.py":1:0)
module {
  tt.func public @double(%x: !tt.ptr<f32> {tt.divisibility = 16 : i32}, %y: !tt.ptr<f32>, %n: i32) attributes {noinline = false} {
    %c = arith.constant 64 : i32
    %p = tt.get_program_id x : i32
    %s = arith.muli %p, %c : i32
    %r = tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32>
    %b = tt.splat %s : i32 -> tensor<64xi32>
    %o = arith.addi %b, %r : tensor<64xi32>
    %m0 = tt.splat %n : i32 -> tensor<64xi32>
    %m = arith.cmpi slt, %o, %m0 : tensor<64xi32>
    %xp = tt.splat %x : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
    %xo = tt.addptr %xp, %o : tensor<64x!tt.ptr<f32>>, tensor<64xi32>
    %v = tt.load %xo, %m : tensor<64x!tt.ptr<f32>>
    %w = arith.addf %v, %v : tensor<64xf32>
    %yp = tt.splat %y : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
    %yo = tt.addptr %yp, %o : tensor<64x!tt.ptr<f32>>, tensor<64xi32>
    tt.store %yo, %w, %m : tensor<64x!tt.ptr<f32>>
    tt.return
  }
}
"""

INLINE = """
module {
  tt.func public @f(%x: !tt.ptr<f32>) {
    %v = tt.load %x : !tt.ptr<f32>
    %w = tt.elementwise_inline_asm "neg.f32 $0, $1;" {constraints = "=f,f", packed_element = 1 : i32, pure = true} %v : f32 -> f32
    tt.store %x, %w : !tt.ptr<f32>
    tt.return
  }
}
"""


def view(base: int, dtype: str, shape: list[int], stride: list[int] | None = None, offset: int = 0) -> list:
    if stride is None:
        stride = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    return [base, dtype, offset, shape, stride]


def engine(values: np.ndarray | None = None) -> Engine:
    e = Engine()
    data = np.arange(100, dtype=np.float32) if values is None else values
    e.input("x", A, data.nbytes, 0, data.tobytes(), view(A, "float32", [data.size]))
    e.kernel("double", KERNEL, True)
    return e


def floats(e: Engine, spec: list) -> np.ndarray:
    return np.frombuffer(e.read(spec)[1], np.float32)


def test_a_launch_computes_and_its_results_are_known_to_be_its_own() -> None:
    e = engine()
    e.run([["alloc", B, 400], ["launch", "double", [2, 1, 1], [A, B, 90], ["x", "y", "n"]]])
    whole = view(B, "float32", [100])
    assert (floats(e, whole)[:90] == 2 * np.arange(90)).all() and np.isnan(floats(e, whole)[90:]).all()
    origin = e.origin(e.heap.view(whole))
    assert origin["stored"] == 90 and origin["unwritten"] == 10 and origin["inputs"] == ["x"]
    facts = e.facts()
    assert facts["launches"] == 1 and facts["loaded"] == facts["stored"] == 360 and facts["findings"] == []


def test_only_its_own_cpu_time_makes_a_call_late() -> None:
    # On a loaded machine the engine waits for a core, and a call must not be late for that.
    e = engine()
    e.begin(0.05)
    time.sleep(0.1)
    e.run([["alloc", B, 400]])
    e.deadline = time.process_time() - 0.01
    with pytest.raises(TimeoutError):
        e.run([["alloc", B + 0x10000, 400]])


def test_copies_carry_what_is_known_and_fills_forget_it() -> None:
    e = engine()
    c = 0x30000
    e.run([["alloc", B, 400], ["launch", "double", [2, 1, 1], [A, B, 100], []], ["alloc", c, 200]])
    half = view(c, "float16", [100])
    e.run([["copy", half, view(B, "float32", [100])]])
    origin = e.origin(e.heap.view(half))
    assert origin["stored"] == 100 and origin["inputs"] == ["x"]
    e.run([["fill", view(c, "float16", [50], offset=100), 1.0]])
    assert e.origin(e.heap.view(half))["stored"] == 50
    values = np.frombuffer(e.read(half)[1], np.float16)
    assert (values[:50] == 2 * np.arange(50)).all() and (values[50:] == 1).all()


def test_a_copy_of_an_input_is_no_store() -> None:
    e = engine()
    e.run([["alloc", B, 400], ["copy", view(B, "float32", [100]), view(A, "float32", [100])]])
    origin = e.origin(e.heap.view(view(B, "float32", [100])))
    assert origin["stored"] == 0 and origin["unwritten"] == 0 and origin["inputs"] == ["x"]


def test_a_result_that_is_handed_out_again_is_seen_and_one_that_is_only_read_is_not() -> None:
    e = engine()
    e.run([["alloc", B, 400], ["launch", "double", [2, 1, 1], [A, B, 100], []]])
    first, second = view(B, "float32", [50]), view(B, "float32", [50], offset=200)
    assert not any(e.origin(e.heap.view(v))["again"] for v in (first, first, second))  # read by the host, then returned
    e.mark_returned(first)
    e.mark_returned(second)
    assert e.origin(e.heap.view(second))["again"]
    e.mark_returned(view(A, "float32", [100]))
    assert not e.origin(e.heap.view(view(A, "float32", [100])))["again"], (
        "an argument may be returned as often as asked"
    )


@pytest.mark.parametrize(
    "source, target, ok",
    [
        ("float32", "float16", True), ("bfloat16", "float64", True), ("int8", "int64", True), ("bool", "int32", True),
        ("float32", "int32", False), ("int8", "float32", False), ("float32", "bool", False), ("int32", "bool", False),
        ("bool", "float32", False), ("complex64", "float32", False),
    ],
)  # fmt: skip
def test_a_conversion_between_kinds_of_number_is_a_computation(source: str, target: str, ok: bool) -> None:
    assert may_copy(getattr(torch, source), getattr(torch, target)) is ok
    e = engine()
    e.run([["free", A], ["alloc", A, 800], ["alloc", B, 800], ["fill", view(A, source, [10]), 1]])
    step = ["copy", view(B, target, [10]), view(A, source, [10])]
    if ok:
        e.run([step])
        # Reinterpreted bytes are another matter: a widened byte is a mask, a rounded pattern a sum.
        e.run([["fill", view(A, "float64" if source != "float64" else "int64", [10]), 1]])
        with pytest.raises(ComputedByHost, match="were not written as"):
            e.run([step])
    else:
        with pytest.raises(ComputedByHost):
            e.run([step])


def test_fresh_memory_holds_what_no_result_holds() -> None:
    e = engine()
    e.run([["alloc", B, 64]])
    assert np.isnan(floats(e, view(B, "float32", [16]))).all()
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        data = e.read(view(B, str(dtype)[6:], [64 // dtype.itemsize]))[1]
        assert torch.frombuffer(bytearray(data), dtype=dtype).isnan().all()


@pytest.mark.parametrize(
    "step",
    [
        ["alloc", A + 8, 8], ["alloc", A - 8, 16], ["alloc", -1, 8], ["alloc", B, 1 << 40], ["alloc", B, True],
        ["fill", view(B, "float32", [1]), 0], ["fill", view(A, "float32", [101]), 0], ["fill", view(A, "q", [1]), 0],
        ["fill", view(A, "float32", [2], [-1]), 0], ["fill", view(A, "float32", [1], offset=2), 0],
        ["fill", view(A, "float32", [1 << 30], [0]), 0], ["fill", view(A, "float32", [1]), "0"], ["fill", "A", 0],
        ["copy", view(A, "float32", [2]), view(A, "float32", [3])], ["host", view(A, "float32", [1]), "zz"],
        ["host", view(A, "float32", [1]), "00"], ["launch", "none", [1, 1, 1], [], []], ["input", "x", 0, 0],
        ["launch", "double", [1, 1], [A, A, 1], []], ["launch", "double", [1, 1, 1], [A, A, "1"], []], [], "x", ["run"],
        ["launch", "double", [1, 1, -1], [A, A, 1], []], ["alloc"], None, ["alloc", 1, 2, 3],
    ],
)  # fmt: skip
def test_a_forged_step_is_refused(step: object) -> None:
    with pytest.raises(TraceError):
        engine().run([step])


def test_a_grid_that_no_device_launches_is_refused() -> None:
    with pytest.raises(LaunchRefused, match="65535"):
        engine().run([["launch", "double", [1, 65536, 1], [A, A, 1], []]])


def test_what_reached_a_buffer_reaches_what_is_made_of_it() -> None:
    e = engine()
    c, d = 0x30000, 0x40000
    e.input("unused", d, 4, 0, b"\0\0\0\0", view(d, "float32", [1]))
    e.run([["alloc", B, 400], ["alloc", c, 400], ["launch", "double", [2, 1, 1], [A, B, 100], []],
           ["launch", "double", [2, 1, 1], [B, c, 100], []]])  # fmt: skip
    assert e.origin(e.heap.view(view(c, "float32", [100])))["inputs"] == ["x"]


@pytest.mark.parametrize(
    "header, kind",
    [
        ({"steps": [["launch", "k", [2, 1, 1], [A, B, 101], []]]}, "memory"),
        ({"steps": [["nonsense"]]}, "forged"),
        ({"steps": {}}, "forged"),
        ({"kernels": {"z": {"text": INLINE}}}, "unsupported"),
        ({"kernels": {"z": {"text": "module { tt.func public @f() { tt.mystery } }"}}}, "forged"),
        ({"kernels": {"z": {"text": "no kernel at all"}}}, "forged"),
        ({"kernels": {"z": {"text": KERNEL.replace("%v, %v", "%v, %nothing")}}}, "forged"),
        ({"kernels": {"z": ["no", "row"]}}, "forged"),
        ({"steps": [["launch", "k", [2, 1, 1], [A, B], []]]}, "forged"),
        ({"steps": [["launch", "k", [2, 1, 1], [A, B, 1.5], []]]}, "forged"),
        ({"steps": [["launch", "k", [2, 1, 1], [A, B, float("nan")], []]]}, "forged"),
        (
            {"steps": [["launch", "k", [2, 1, 1], [A, {"base": A, "shape": 1, "strides": [], "padding": ""}, 1], []]]},
            "forged",
        ),
        ({"steps": [["launch", "k", [2, 1, 1]]]}, "forged"),
        ({"steps": [["launch", ["k"], [2, 1, 1], [], []]]}, "forged"),
        ({"steps": [["free"]]}, "forged"),
        ({"steps": [["host", view(B, "float32", [2], [0]), "0000000000000000"]]}, "forged"),
        ({"steps": [], "read": [view(B, "float32", [0, 1 << 28, 1 << 28, 1 << 28])]}, "forged"),
        ({"kernels": {"z": {"text": 5}}}, "forged"),
        ({"kernels": []}, "forged"),
        ({"steps": [], "read": [view(B, "float32", [1 << 29])]}, "forged"),
    ],
)
def test_errors_have_a_kind(header: dict, kind: str) -> None:
    server = EngineServer()
    server.answer({"inputs": [["x", A, 400, 0, 0, view(A, "float32", [100])]], "kernels": {"k": {"text": KERNEL, "fused": True}},
                   "steps": [["alloc", B, 404]]}, [bytearray(400)])  # fmt: skip
    reply, _ = server.answer({"steps": [], **header}, [])
    if kind == "unsupported" and reply["ok"]:  # an unknown operation may also show when it runs
        reply, _ = server.answer({"steps": [["launch", "z", [1, 1, 1], [A], []]]}, [])
    assert (reply["ok"], reply.get("kind")) == (False, kind), reply


def test_memory_of_a_storage_that_is_gone_can_be_had_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MAX_BYTES", storage.MAX_BYTES >> 10)  # gigabytes take seconds to fill
    e = engine()
    for _ in range(3):
        e.run([["alloc", B, 3 << 20], ["free", B]])
    with pytest.raises(TraceError, match="of memory"):
        e.run([["alloc", B, 3 << 20], ["alloc", B + (1 << 40), 3 << 20]])
    e.run([["free", B], ["free", "x"]])
    assert e.heap.bytes == 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["alloc", "free", "fill", "copy", "host", "launch"]), st.lists(json_values, max_size=5))
def test_no_step_breaks_the_engine(name: str, rest: list) -> None:
    server = EngineServer()
    reply, _ = server.answer(json.loads(json.dumps({"steps": [[name, *rest]], "facts": True})), [])
    assert reply["ok"] or reply["kind"] in ("forged", "policy", "runtime"), reply


@pytest.mark.parametrize("detail", [True, False])
def test_sectors_are_counted_in_calls_that_ask_for_them(detail: bool) -> None:
    launch = ["launch", "double", [2, 1, 1], [A, B, 50], ["x", "y", "n"]]
    reply, _ = EngineServer().answer(
        {"begin": 9, "detail": detail, "inputs": [["x", A, 400, 0, 0, view(A, "float32", [100])]], "facts": True,
         "kernels": {"double": {"text": KERNEL, "fused": True}}, "steps": [["alloc", B, 400], launch]},
        [bytearray(400)],
    )  # fmt: skip
    assert reply["ok"] and reply["facts"]["loaded"] == 200 and (reply["facts"]["sectors"] > 0) == detail


def test_a_call_is_executed_again_from_the_memory_before_it() -> None:
    server = EngineServer()
    data = np.arange(100, dtype=np.float32)
    steps = [["copy", view(B, "float32", [50], offset=200), view(B, "float32", [50])],
             ["launch", "double", [2, 1, 1], [A, B, 50], ["x", "y", "n"]]]  # fmt: skip
    first, _ = server.answer({"begin": 9, "steps": [["alloc", B, 400], ["fill", view(B, "float32", [100]), 7.0]]}, [])
    reply, (out,) = server.answer(
        {"begin": 9, "keep": True, "inputs": [["x", A, 400, 0, 0, view(A, "float32", [100])]],
         "kernels": {"double": {"text": KERNEL, "fused": True}},
         "steps": steps, "read": [view(B, "float32", [100])]},
        [bytearray(data.tobytes())],
    )  # fmt: skip
    assert first["ok"] and reply["ok"], reply
    change = {"place": "products", "table": list(range(256)), "seconds": 9.0}
    again, (same,) = server.answer({"again": change, "read": [view(B, "float32", [100])]}, [])
    assert again["ok"] and again["touched"] == 0 and same == out
    assert floats(server.engine, view(B, "float32", [100]))[50] == 7.0


def test_an_error_in_a_repeated_call_keeps_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    server = EngineServer()
    steps = [["launch", "double", [2, 1, 1], [A, A, 50], ["x", "y", "n"]]]
    reply, _ = server.answer(
        {"begin": 9, "keep": True, "inputs": [["x", A, 400, 0, 0, view(A, "float32", [100])]],
         "kernels": {"double": {"text": KERNEL, "fused": True}}, "steps": steps},
        [bytearray(400)],
    )  # fmt: skip
    assert reply["ok"], reply

    def launch(*_: object, **__: object) -> None:
        raise ttir.Unsupported("tt.unknown")

    monkeypatch.setattr(ttir, "launch", launch)
    again, _ = server.answer({"again": {"place": "products", "table": list(range(256)), "seconds": 9.0}, "read": []}, [])
    assert (again["ok"], again["kind"]) == (False, "unsupported"), again
