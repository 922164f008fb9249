"""Which integers torch may convert to floats before a launch: those of an argument, as the caller passed them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kbx_env.backends.engine import ComputedByHost, Engine, TraceError
from kbx_env.backends.engine.storage import DTYPES
from kbx_env.grading import inputs, reference
from kbx_env.grading import judge as judges
from kbx_env.spec.catalog import load_task, task_ids

A, B, C = 0x10000, 0x20000, 0x30000
STORE = """
module {
  tt.func public @store(%x: !tt.ptr<i32>) {
    %v = arith.constant 7 : i32
    tt.store %x, %v : !tt.ptr<i32>
    tt.return
  }
}
"""


def view(base: int, dtype: str, shape: list[int], offset: int = 0) -> list:
    return [base, dtype, offset, shape, [math.prod(shape[k + 1 :]) for k in range(len(shape))]]


def engine(dtype: str = "int32", **flags: bool) -> Engine:
    e = Engine()
    e.begin(60.0, **flags)
    values = torch.arange(-5, 5).to(DTYPES[dtype])
    data = values.view(torch.uint8).numpy().tobytes()
    e.input("x", A, len(data), 0, data, view(A, dtype, [10]))
    e.kernel("store", STORE, True)
    e.run([["alloc", B, 80], ["alloc", C, 80]])
    return e


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "bool"])
@pytest.mark.parametrize("target", ["float32", "float64", "float16", "bfloat16"])
def test_an_argument_as_it_was_passed_may_be_converted(dtype: str, target: str) -> None:
    e = engine(dtype)
    e.run([["copy", view(B, target, [10]), view(A, dtype, [10])]])
    found = e.heap.view(view(B, target, [10])).values()
    assert torch.equal(found, torch.arange(-5, 5).to(DTYPES[dtype]).to(DTYPES[target]))


def test_a_copy_of_the_argument_in_any_order_may_be_converted() -> None:
    e = engine()
    e.run([["copy", view(B, "int32", [2, 5]), [A, "int32", 0, [2, 5], [1, 2]]]])
    e.run([["copy", view(C, "float32", [10]), view(B, "int32", [10])]])
    assert e.heap.view(view(C, "float32", [10])).values().tolist() == [-5, -3, -1, 1, 3, -4, -2, 0, 2, 4]


def test_a_converted_argument_is_no_result_of_a_kernel() -> None:
    e = engine()
    e.run([["copy", view(B, "float32", [10]), view(A, "int32", [10])]])
    origin = e.origin(e.heap.view(view(B, "float32", [10])))
    assert origin["moved"] == 10 and origin["stored"] == 0 and origin["inputs"] == ["x"]


REFUSED = {
    "another dtype": [["copy", view(B, "float32", [10]), view(A, "uint32", [10])]],
    "bytes": [["copy", view(B, "float32", [10]), view(A, "int8", [10])]],
    "a copy seen as another dtype": [
        ["copy", view(B, "int32", [10]), view(A, "int32", [10])],
        ["copy", view(C, "float32", [10]), view(B, "int16", [10])],
    ],
    "a constant": [["fill", view(B, "int32", [10]), 3], ["copy", view(C, "float32", [10]), view(B, "int32", [10])]],
    "a constant from the host": [
        ["host", view(B, "int32", [1]), "01000000"], ["copy", view(C, "float32", [1]), view(B, "int32", [1])],
    ],
    "a kernel's store": [
        ["launch", "store", [1, 1, 1], [B], ["x"]], ["copy", view(C, "float32", [1]), view(B, "int32", [1])],
    ],
    "a kernel's store in a copy": [
        ["copy", view(B, "int32", [10]), view(A, "int32", [10])], ["launch", "store", [1, 1, 1], [B], ["x"]],
        ["copy", view(C, "float32", [10]), view(B, "int32", [10])],
    ],
    "a kernel's store in the argument": [
        ["launch", "store", [1, 1, 1], [A], ["x"]], ["copy", view(C, "float32", [10]), view(A, "int32", [10])],
    ],
    "a copy beside a constant": [
        ["fill", view(B, "int32", [10]), 3], ["copy", view(B, "int32", [5]), view(A, "int32", [5])],
        ["copy", view(C, "float32", [10]), view(B, "int32", [10])],
    ],
    "a widened copy": [
        ["copy", view(B, "int64", [10]), view(A, "int32", [10])], ["copy", view(C, "float32", [10]), view(B, "int64", [10])],
    ],
    "a float format of few digits": [["copy", view(B, "float8_e5m2", [10]), view(A, "int32", [10])]],
}  # fmt: skip


@pytest.mark.parametrize("steps", REFUSED.values(), ids=REFUSED)
def test_nothing_else_may_be_converted(steps: list) -> None:
    with pytest.raises((ComputedByHost, TraceError), match="computes|malformed view|were not written"):
        engine().run(steps)


def test_what_an_earlier_call_was_passed_or_stored_may_not_be_converted() -> None:
    e = engine()
    e.run([["copy", view(B, "int32", [10]), view(A, "int32", [10])], ["launch", "store", [1, 1, 1], [B], ["x"]]])
    e.begin(60.0)
    for base in (A, B):
        with pytest.raises(ComputedByHost):
            e.run([["copy", view(C, "float32", [10]), view(base, "int32", [10])]])


@pytest.mark.parametrize("flag", ["moves", "picks"])
def test_tasks_that_move_values_convert_nothing(flag: str) -> None:
    with pytest.raises(ComputedByHost):
        engine(**{flag: True}).run([["copy", view(B, "float32", [10]), view(A, "int32", [10])]])


def test_out_is_no_argument_whose_values_may_be_converted() -> None:
    e = Engine()
    e.begin(60.0)
    e.input("", A, 40, 0, np.zeros(10, np.int32).tobytes(), view(A, "int32", [10]))
    e.run([["alloc", B, 80]])
    with pytest.raises(ComputedByHost):
        e.run([["copy", view(B, "float32", [10]), view(A, "int32", [10])]])


@pytest.mark.parametrize("name", task_ids())
def test_the_task_is_never_the_conversion_itself(name: str) -> None:
    task = load_task(name)
    for index, case in enumerate(task.cases):
        args = inputs.draw(task, case, 7 + index)
        tensors = {k: v for k, v in args.items() if isinstance(v, torch.Tensor)}
        whole = {k: v for k, v in tensors.items() if not (v.is_floating_point() or v.is_complex())}
        if not whole or judges.is_trivial(task, case, args):
            continue
        expected = reference.expect(task, case, args, "cpu")
        for result in expected.native:
            for value in whole.values():
                if result.is_floating_point() and value.shape == result.shape and result.numel() > 1:
                    assert not torch.equal(value.to(result.dtype), result), case.label()
