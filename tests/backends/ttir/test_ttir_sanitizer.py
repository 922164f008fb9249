"""The sanitizer finds the faults of small kernels, and nothing in correct ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from ttir_helper import to_ttir

from kbx_env.backends.ttir import Meter, OutOfBounds, Region, launch, parse
from kbx_env.backends.ttir.interp.memory import Extent
from kbx_env.backends.ttir.sanitizer.sanitizer import Finding, Sanitizer

OUT, RAW, CLASH, ORDER = "out_of_bounds", "uninitialised_read", "write_conflict", "order_dependent"
LANES = "lane_conflict"


def run(
    text: str, grid: tuple[int, ...], args: list[Any], raw: tuple[int, ...] = (), names: tuple[str, ...] = (), **kw: Any
) -> list[Finding]:
    """Run sanitized, with the arguments of ``raw`` uninitialised and buffers side by side."""
    base, regions, flat = 1 << 32, [], []
    for k, a in enumerate(args):
        if hasattr(a, "dtype") and getattr(a, "ndim", 0):
            bytes_ = a.reshape(-1).view("u1")
            mask = np.zeros(a.nbytes, bool) if k in raw else None
            regions.append(Region(base, bytes_, f"arg{k}", mask))
            flat.append(base)
            base += a.nbytes or 64
        else:
            flat.append(a)
    found = Sanitizer()
    full = (tuple(grid) + (1, 1))[:3]
    try:
        launch(parse(text), full, flat, regions, Meter(), sanitizer=found, names=names, **kw)  # type: ignore[arg-type]
    except OutOfBounds as e:
        assert found.findings and found.findings[-1] == e.finding
    for f in found.findings:
        assert f.kernel and f.line and "0x" not in f.text() and str(1 << 32)[:5] not in f.text()
    return found.findings


F, I = "*fp32", "*i32"


def ones(n: int) -> np.ndarray:
    return np.arange(1, n + 1, dtype=np.float32)


def zeros(n: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(n, dtype)


@triton.jit
def k_scale(x, o, n, SHIFT: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i + SHIFT, mask=i + SHIFT < n) * 2, mask=i < n)


@triton.jit
def k_transpose(x, N, B: tl.constexpr):
    a = tl.program_id(0) * B + tl.arange(0, B)
    b = tl.program_id(1) * B + tl.arange(0, B)
    v = tl.load(x + a[:, None] * N + b[None, :])
    tl.store(x + b[None, :] * N + a[:, None], v)


@triton.jit
def k_carry(x, o, n, B: tl.constexpr):
    p = tl.program_id(0)
    before = tl.load(o + p - 1, mask=p > 0, other=0.0)
    tl.store(o + p, before + tl.sum(tl.load(x + p * B + tl.arange(0, B)), 0))


@triton.jit
def k_two_pass(x, t, o, SKIP: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    if SKIP == 0:
        tl.store(t + i, tl.load(x + i))
    tl.store(o + i, tl.load(t + i) + 1)


@triton.jit
def k_choose(x, y, o, flag, B: tl.constexpr, SHIFT: tl.constexpr):
    i = tl.arange(0, B)
    p = x
    if flag > 0:
        p = y
    tl.store(o + i, tl.load(p + i + SHIFT))


@triton.jit
def k_descriptor(x, o, M, N, S, B: tl.constexpr):
    a = tl.make_tensor_descriptor(x, [M, N], [S, 1], [B, B])
    c = tl.make_tensor_descriptor(o, [M, N], [N, 1], [B, B])
    r = tl.program_id(0) * B
    c.store([r, 0], a.load([r, 0]))


@triton.jit
def k_indirect(x, idx, o, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + i, tl.load(x + tl.load(idx + i)))


@triton.jit
def k_same(o, B: tl.constexpr):
    tl.store(o + tl.arange(0, B), 1.0)
    tl.store(o + tl.arange(0, B), tl.load(o + tl.arange(0, B)))


@triton.jit
def k_lanes(o, n, EQUAL: tl.constexpr, ROWS: tl.constexpr, B: tl.constexpr):
    r, i = tl.arange(0, ROWS), tl.arange(0, B)
    at = tl.program_id(0) * B + r[:, None] * n + i[None, :]
    tl.store(o + at, tl.zeros((ROWS, B), tl.float32) + (0 if EQUAL else r[:, None]))


@triton.jit
def k_persistent(x, n, STEP: tl.constexpr, B: tl.constexpr):
    for t in range(tl.program_id(0), n, tl.num_programs(0) - STEP):
        i = t * B + tl.arange(0, B)
        tl.store(x + i, tl.load(x + i) + 1)


@triton.jit
def k_halves(x, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    words = x.to(tl.pointer_type(tl.int16), bitcast=True)
    low = tl.load(words + 2 * i)
    tl.store(x + i, low.to(tl.int32))


@triton.jit
def k_overlap(x, o, count, step, ATOMIC: tl.constexpr, B: tl.constexpr):
    p, i = tl.program_id(0), tl.arange(0, B)
    tl.store(o + p * step + i, tl.load(x + p * B + i))
    if ATOMIC:
        tl.atomic_add(count + p, 1)


def two(a: str, b: str, extra: dict[str, str] | None = None) -> dict[str, str]:
    return {"x": a, "o": b} | (extra or {})


N4 = {"n": "i32"}
Row = tuple[Any, dict[str, str], dict[str, Any], Any, Any, tuple[int, ...], set[str]]
#: kernel, signature, constants, grid, arguments, uninitialised arguments, kinds (empty: no fault)
SMALL: list[Row] = [
    (k_scale, two(F, F, N4), {"SHIFT": 0, "B": 16}, (4,), lambda: [ones(60), zeros(60), 60], (1,), set()),
    (k_scale, two(F, F, N4), {"SHIFT": 0, "B": 16}, (4,), lambda: [ones(60), zeros(60), 61], (1,), {OUT}),
    (k_scale, two(F, F, N4), {"SHIFT": -1, "B": 16}, (4,), lambda: [ones(60), zeros(60), 60], (1,), {OUT}),
    (k_scale, two(F, F, N4), {"SHIFT": 0, "B": 16}, (4,), lambda: [zeros(0), zeros(60), 60], (), {OUT}),
    (k_scale, two(F, F, N4), {"SHIFT": 0, "B": 16}, (4,), lambda: [ones(60), zeros(60), 60], (0,), {RAW}),
    (k_transpose, {"x": F, "N": "i32"}, {"B": 16}, (1, 1), lambda: [ones(256), 16], (), set()),
    (k_transpose, {"x": F, "N": "i32"}, {"B": 16}, (2, 2), lambda: [ones(1024), 32], (), {ORDER, CLASH}),
    (k_carry, two(F, F, N4), {"B": 16}, (8,), lambda: [ones(128), zeros(8), 8], (), {ORDER}),
    (k_two_pass, {"x": F, "t": F, "o": F}, {"SKIP": 0, "B": 16}, (8,),
     lambda: [ones(128), zeros(128), zeros(128)], (1, 2), set()),
    (k_two_pass, {"x": F, "t": F, "o": F}, {"SKIP": 1, "B": 16}, (8,),
     lambda: [ones(128), zeros(128), zeros(128)], (1, 2), {RAW}),
    (k_choose, {"x": F, "y": F, "o": F, "flag": "i32"}, {"B": 16, "SHIFT": 0}, (1,),
     lambda: [ones(16), ones(32), zeros(16), 1], (), set()),
    (k_choose, {"x": F, "y": F, "o": F, "flag": "i32"}, {"B": 16, "SHIFT": 32}, (1,),
     lambda: [ones(16), ones(32), zeros(16), 1], (), {OUT}),
    (k_descriptor, two(F, F, {"M": "i32", "N": "i32", "S": "i32"}), {"B": 16}, (3,),
     lambda: [ones(40 * 8), zeros(40 * 8), 40, 8, 8], (1,), set()),
    (k_descriptor, two(F, F, {"M": "i32", "N": "i32", "S": "i32"}), {"B": 16}, (3,),
     lambda: [ones(40 * 8), zeros(40 * 8), 40, 8, 12], (1,), {OUT}),
    (k_indirect, {"x": F, "idx": I, "o": F}, {"B": 16}, (1,),
     lambda: [ones(16), np.arange(16, dtype=np.int32), zeros(16)], (), set()),
    (k_indirect, {"x": F, "idx": I, "o": F}, {"B": 16}, (1,),
     lambda: [ones(16), np.arange(16, dtype=np.int32) + 4, zeros(16)], (), {OUT}),
    (k_persistent, {"x": F, "n": "i32"}, {"STEP": 0, "B": 16}, (3,), lambda: [ones(160), 10], (), set()),
    (k_persistent, {"x": F, "n": "i32"}, {"STEP": 1, "B": 16}, (3,), lambda: [ones(160), 10], (), {ORDER, CLASH}),
    (k_halves, {"x": I}, {"B": 16}, (4,), lambda: [np.arange(64, dtype=np.int32)], (), set()),
    (k_same, {"o": F}, {"B": 16}, (8,), lambda: [zeros(16)], (0,), set()),
    (k_lanes, {"o": F, "n": "i32"}, {"EQUAL": False, "ROWS": 4, "B": 16}, (2,), lambda: [zeros(32), 0], (0,), {LANES}),
    (k_lanes, {"o": F, "n": "i32"}, {"EQUAL": True, "ROWS": 4, "B": 16}, (2,), lambda: [zeros(32), 0], (0,), set()),
    (k_lanes, {"o": F, "n": "i32"}, {"EQUAL": False, "ROWS": 4, "B": 16}, (2,), lambda: [zeros(128), 32], (0,), set()),
    (k_lanes, {"o": F, "n": "i32"}, {"EQUAL": False, "ROWS": 4, "B": 16}, (1,), lambda: [zeros(40), 8], (0,), {LANES}),
]  # fmt: skip


def check(row: Row, chunk: int) -> None:
    """Run a kernel of a table in chunks of at most this many bytes an array."""
    kernel, sig, const, grid, args, raw, kinds = row
    got = run(to_ttir(kernel, sig, const), grid, args(), raw, max_bytes=chunk)
    if not kinds:
        assert got == []
    else:
        assert {f.kind for f in got} & kinds and {f.kind for f in got} <= kinds | {RAW}, [f.text() for f in got]


@pytest.mark.parametrize("chunk", [1, 64 << 20])
@pytest.mark.parametrize("k", range(len(SMALL)))
def test_small_kernels(k: int, chunk: int) -> None:
    check(SMALL[k], chunk)


def test_a_finding_says_what_happened_where() -> None:
    text = to_ttir(k_scale, two(F, F, N4), {"SHIFT": 0, "B": 16})
    (f,) = run(text, (4,), [ones(60), zeros(70), 63], names=("inp", "out", "n"))
    line = k_scale.fn.__code__.co_firstlineno + 3
    assert (f.kind, f.kernel, f.line, f.program, f.tensor) == (OUT, "k_scale", line, (3, 0, 0), "inp")
    assert (f.index, f.by, f.access) == (60, 4, "load")
    where = f"k_scale, line {line}: program (3, 0, 0) loads element 60 of `inp`"
    assert f.text() == f"{where}, 4 byte(s) outside the tensor"
    (f,) = run(text, (4,), [ones(63), zeros(63), 63], raw=(0,))
    assert f.text().endswith("loads element 0 of `arg0`, which nothing has written yet")


def test_numbers_that_depend_on_loaded_values_are_not_told() -> None:
    text = to_ttir(k_indirect, {"x": F, "idx": I, "o": F}, {"B": 16})
    (f,) = run(text, (1,), [ones(16), np.full(16, 777, np.int32), zeros(16)])
    assert f.indirect and f.index == 777 and "777" not in f.text()
    assert f.text().endswith("loads an element of `arg0`, outside the tensor")


def test_an_empty_tensor_is_named_by_its_extent_or_argument() -> None:
    text = to_ttir(k_scale, two(F, F, N4), {"SHIFT": 0, "B": 16})
    out = zeros(16)
    region = Region(1 << 32, out.view("u1"), "o", extents=(Extent(0, 0, 0, "x"),))
    for regions, name in (([region], "x"), ([Region(1 << 32, out.view("u1"), "o")], "argument 0")):
        s = Sanitizer()
        with pytest.raises(OutOfBounds):
            launch(parse(text), (1, 1, 1), [0, 1 << 32, 16], regions, Meter(), sanitizer=s)
        (f,) = s.findings
        assert (f.kind, f.tensor, f.index) == (OUT, name, 0) and f.by >= 4


def test_an_extent_is_finer_than_its_region() -> None:
    text = to_ttir(k_scale, two(F, F, N4), {"SHIFT": 0, "B": 16})
    data = zeros(32)
    whole = Region(1 << 32, data.view("u1"), "storage")
    args = [1 << 32, (1 << 32) + 64, 20]
    for extents, count in (((), 0), ((Extent(0, 1 << 32, 64, "x"), Extent(1, (1 << 32) + 64, 64, "o")), 1)):
        s = Sanitizer()
        try:
            launch(parse(text), (1, 1, 1), [*args[:2], 16 + 4 * count],
                   [Region(whole.base, whole.data, whole.name, None, extents)], Meter(), sanitizer=s)  # fmt: skip
            launch(parse(text), (2, 1, 1), [*args[:2], 16 + 4 * count],
                   [Region(whole.base, whole.data, whole.name, None, extents)], Meter(), sanitizer=s)  # fmt: skip
        except OutOfBounds as e:
            assert e.finding.tensor == "x" and e.finding.index == 16
        assert len(s.findings) == count


def test_findings_are_counted_and_bounded() -> None:
    text = to_ttir(k_scale, two(F, F, N4), {"SHIFT": 0, "B": 16})
    s, x, mask = Sanitizer(), zeros(16), np.zeros(64, bool)
    regions = [Region(4096, x.view("u1"), "x", mask), Region(8192, zeros(16).view("u1"), "o")]
    for _ in range(3):
        launch(parse(text), (1, 1, 1), [4096, 8192, 16], regions, Meter(), sanitizer=s)
    assert (len(s.findings), s.counts) == (1, [3])
    for n in range(40):
        s.report(Finding(OUT, "k", n, "", (0, 0, 0), "x", 0))
    assert len(s.findings) == len(s.counts) == 20


def test_stores_mark_what_they_initialise() -> None:
    text = to_ttir(k_scale, two(F, F, N4), {"SHIFT": 0, "B": 16})
    o, mask = zeros(16), np.zeros(64, bool)
    regions = [Region(4096, ones(16).view("u1"), "x"), Region(8192, o.view("u1"), "o", mask)]
    launch(parse(text), (1, 1, 1), [4096, 8192, 10], regions, Meter(), sanitizer=Sanitizer())
    assert mask[:40].all() and not mask[40:].any()


@pytest.mark.parametrize(("shift", "count"), [(0, 0), (1, 1)])
def test_two_arguments_of_one_buffer_are_one_memory(shift: int, count: int) -> None:
    text = to_ttir(k_scale, two(F, F, N4), {"SHIFT": shift, "B": 16})
    region = Region(1 << 32, ones(64).view("u1"), "x")
    for chunk in (1, 64 << 20):
        s = Sanitizer()
        launch(parse(text), (4, 1, 1), [1 << 32, 1 << 32, 64], [region], Meter(), sanitizer=s, max_bytes=chunk)
        assert [f.kind for f in s.findings] == [ORDER] * count


@pytest.mark.parametrize("ptr", ["*i1", "*i8", "*i16", "*i64", "*fp16", "*bf16", "*fp64"])
@pytest.mark.parametrize("atomic", [False, True])
def test_every_width(ptr: str, atomic: bool) -> None:
    sizes = {"*i1": 1, "*i8": 1, "*i16": 2, "*i64": 8, "*fp16": 2, "*bf16": 2, "*fp64": 8}
    text = to_ttir(k_overlap, {"x": ptr, "o": ptr, "count": I, "step": "i32"}, {"B": 16, "ATOMIC": atomic})
    for step, kinds in ((16, set()), (8, {CLASH})):
        x, o = (np.zeros(64 * sizes[ptr], np.uint8) for _ in range(2))
        x[:: sizes[ptr]] = np.arange(64) // 16 % 2
        mask = np.zeros(o.size, bool)
        regions = [Region(4096, x, "x"), Region(8192, o, "o", mask), Region(16384, zeros(4, np.int32).view("u1"), "c")]
        s = Sanitizer()
        launch(parse(text), (4, 1, 1), [4096, 8192, 16384, step], regions, Meter(), sanitizer=s)
        assert {f.kind for f in s.findings} == kinds
        assert mask.sum() == (3 * step + 16) * sizes[ptr]


@triton.jit
def _pair(a, na, b, nb):
    return a + b * nb, na + nb


@triton.jit
def k_flattened(x, o, N, TWO: tl.constexpr):
    n, s = tl.arange(0, 16), tl.arange(0, 64)
    there = (n < N)[:, None] & (s < 64)[None, :]
    v = tl.load(x + n[:, None] * 64 + s[None, :], mask=there, other=0.0)
    if TWO:
        a, b = tl.reduce((tl.ravel(v), tl.ravel(there.to(tl.float32))), 0, _pair)
        tl.store(o, a + b)
    else:
        tl.store(o, tl.sum(tl.ravel(v), 0) + tl.sum(v, 0).sum(0))


@triton.jit
def k_flat_argmax(x, o, FLAT: tl.constexpr):
    v = tl.load(x + tl.arange(0, 16)[:, None] * 64 + tl.arange(0, 64)[None, :])
    tl.store(o, tl.argmax(tl.ravel(v), 0) if FLAT else tl.argmax(tl.max(v, 1), 0))


@pytest.mark.parametrize(("kernel", "consts", "faulty"), [
    (k_flattened, {"TWO": True}, True), (k_flattened, {"TWO": False}, False),
    (k_flat_argmax, {"FLAT": True}, True), (k_flat_argmax, {"FLAT": False}, False),
])  # fmt: skip
def test_tensors_flattened_for_one_reduction_are_told(kernel: Any, consts: dict[str, Any], faulty: bool) -> None:
    """Triton 3.6 paired the wrong elements on an H200: each operand is flattened in the order of its own layout."""
    signature = {"x": F, "o": F if kernel is k_flattened else I} | ({"N": "i32"} if kernel is k_flattened else {})
    text = to_ttir(kernel, signature, consts)
    args: list[Any] = [ones(1024), zeros(1, np.float32 if kernel is k_flattened else np.int32)]
    found = run(text, (1,), args + ([10] if kernel is k_flattened else []))
    assert [f.kind for f in found] == ["reordered"] * faulty
    assert all("pairs the wrong elements" in f.text() for f in found)
