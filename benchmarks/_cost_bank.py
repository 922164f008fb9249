"""The points that the cost model is fitted to: kernels, knobs and sizes, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import _cost_kernels as kernels

WIDTH = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1, "i32": 4}
"""Bytes of an element, by type."""


@dataclass(eq=False)
class Buf:
    """A buffer of ``n`` elements; launches share it by identity.

    Attributes:
        fill: "randn", "zero", "unit" (-1 to 1), "coin" (0 or 1) or "below:K" (integers).
    """

    kind: str
    n: int
    fill: str = "randn"

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.n * WIDTH[self.kind]


@dataclass
class Launch:
    """One kernel launch: runtime arguments in order, then constants."""

    kernel: Any
    grid: tuple[int, int, int]
    args: list[Any]
    const: dict[str, Any]
    warps: int = 4
    stages: int = 3


@dataclass
class Point:
    """A launch sequence that is timed as one."""

    task: str
    size: str
    knobs: str
    launches: list[Launch]

    @property
    def name(self) -> str:
        """Unique name."""
        return f"{self.task}/{self.size}/{self.knobs}"


def cdiv(a: int, b: int) -> int:
    """Divide, rounded up."""
    return -(-a // b)


def _elementwise() -> Iterator[Point]:
    knobs = [(64, 1), (256, 1), (256, 8), (1024, 4), (1024, 16), (4096, 2), (4096, 8), (16384, 4)]
    for e in (14, 18, 22, 26):
        n = (1 << e) - 37 * (e == 22)
        for B, w in knobs:
            g = (cdiv(n, B), 1, 1)
            o = Buf("f32", n, "zero")
            at, how = f"2^{e}", f"B{B}w{w}"
            one: dict[str, Any] = {"const": {"B": B}, "warps": w}
            yield Point("add", at, how, [Launch(kernels._add, g, [Buf("f32", n), Buf("f32", n), o, n], **one)])
            if B in (256, 1024, 4096):
                h = [Buf("f16", n), Buf("f16", n, "zero")]
                yield Point("gelu", at, how, [Launch(kernels._gelu, g, [*h, n], **one)])
                yield Point("rand", at, how, [Launch(kernels._rand, g, [o, n, 1234567], **one)])
            if (B, w) in ((256, 1), (1024, 4), (1024, 16), (4096, 8)):
                yield Point("chain", at, how, [Launch(kernels._chain, g, [Buf("f32", n), o, n], **one)])
                second = Buf("f32", n, "zero")
                args = [Buf("f32", n), Buf("f32", n), Buf("f32", n), second, o, n, 1e-3, 1e-2, 1e-8]
                yield Point("adamw", at, how, [Launch(kernels._adamw, g, args, **one)])
            if w in (1, 4, 8):
                index = Buf("i32", n, f"below:{n}")
                yield Point("gather", at, how, [Launch(kernels._gather, g, [Buf("f32", n), index, o, n], **one)])
            if B in (256, 1024):
                counts, starts = Buf("i32", g[0], "zero"), Buf("i32", g[0], "zero")
                flags = Buf("i8", n, "coin")
                steps = [
                    Launch(kernels._count, g, [flags, counts, n], **one),
                    Launch(kernels._scan, (1, 1, 1), [counts, starts, g[0]], {"B": 1024}, 4),
                    Launch(kernels._compact, g, [Buf("f32", n), flags, starts, o, n], **one),
                ]
                yield Point("compact", at, how, steps)
            if B >= 256 and e > 14:
                out = Buf("f32", 16, "zero")
                yield Point("sum", at, how + "atomic", [Launch(kernels._sum_atomic, g, [Buf("f32", n), out, n], **one)])
                part = Buf("f32", g[0], "zero")
                last = Launch(kernels._sum_one, (1, 1, 1), [part, out, g[0]], {"B": 1024}, 4)
                yield Point(
                    "sum", at, how + "two", [Launch(kernels._sum_blocks, g, [Buf("f32", n), part, n], **one), last]
                )
            if B in (256, 1024) and e < 26:
                bins = 64 if w == 1 else 4096
                args = [Buf("i32", n, f"below:{bins}"), Buf("i32", bins, "zero"), n]
                yield Point("histogram", at, how + f"k{bins}", [Launch(kernels._histogram, g, args, **one)])


def _rows() -> Iterator[Point]:
    for rows, n in ((16, 1000), (4096, 1024), (32768, 2048), (64, 16384), (8192, 8192)):
        at, total = f"{rows}x{n}", rows * n
        B = 1 << (n - 1).bit_length()
        for w in (1, 2, 4, 8, 16):
            if B // w <= 4096:
                args = [Buf("f32", total), Buf("f32", total, "zero"), n]
                yield Point("softmax", at, f"w{w}", [Launch(kernels._softmax, (rows, 1, 1), args, {"B": B}, w)])
        for B, w in ((256, 1), (256, 4), (1024, 4), (1024, 8), (4096, 8)):
            args = [Buf("f32", total), Buf("f32", n), Buf("f32", n), Buf("f32", total, "zero"), n]
            one = Launch(kernels._layer_norm, (rows, 1, 1), args, {"B": B}, w)
            yield Point("layer_norm", at, f"B{B}w{w}", [one])
            args = [Buf("f32", total), Buf("i32", rows, "zero"), n]
            yield Point("argmax", at, f"B{B}w{w}", [Launch(kernels._argmax, (rows, 1, 1), args, {"B": B}, w)])
        for BS, BC, w in ((1, 1024, 4), (4, 256, 4), (4, 1024, 8), (16, 64, 4), (16, 128, 2)):
            loss, out = Buf("f32", rows, "zero"), Buf("f32", 16, "zero")
            args = [Buf("f32", total), Buf("i32", rows, f"below:{n}"), loss, rows, n]
            first = Launch(kernels._loss_rows, (cdiv(rows, BS), 1, 1), args, {"BS": BS, "BC": BC}, w)
            last = Launch(kernels._sum_one, (1, 1, 1), [loss, out, rows], {"B": 1024}, 4)
            yield Point("cross_entropy", at, f"S{BS}C{BC}w{w}", [first, last])
        for BR, BC, w in ((16, 32, 4), (64, 64, 4), (32, 128, 8)):
            args = [Buf("f32", total), Buf("f32", n, "zero"), rows, n]
            one = Launch(kernels._sum_columns, (cdiv(n, BC), 1, 1), args, {"BR": BR, "BC": BC}, w)
            yield Point("sum_columns", at, f"R{BR}C{BC}w{w}", [one])
        for B, w in ((128, 1), (512, 4)):
            if total <= 1 << 24:
                args = [Buf("f32", total), Buf("f32", total, "zero"), rows, n]
                one = Launch(kernels._transpose_rows, (rows, cdiv(n, B), 1), args, {"B": B}, w)
                yield Point("transpose", at, f"naiveB{B}w{w}", [one])
        for BR, BC, w in ((16, 16, 1), (32, 32, 4), (64, 64, 4), (128, 64, 8)):
            args = [Buf("f32", total), Buf("f32", total, "zero"), rows, n]
            one = Launch(kernels._transpose_tiles, (cdiv(rows, BR), cdiv(n, BC), 1), args, {"BR": BR, "BC": BC}, w)
            yield Point("transpose", at, f"R{BR}C{BC}w{w}", [one])
        if n <= 2048:
            for BR, BD, w in ((1, 256, 1), (4, 128, 4), (16, 64, 4)):
                args = [Buf("f32", total), Buf("i32", rows, f"below:{rows}"), Buf("f32", total, "zero"), rows, n]
                one = Launch(kernels._embed, (cdiv(rows, BR), 1, 1), args, {"BR": BR, "BD": BD}, w)
                yield Point("embed", at, f"R{BR}D{BD}w{w}", [one])


def _images() -> Iterator[Point]:
    for images, C, S in ((2, 32, 256), (16, 64, 1024), (32, 128, 3136), (64, 256, 3136)):
        n = images * C * S
        for B, w in ((256, 4), (1024, 4), (1024, 8), (2048, 2)):
            x, mean, scale, o = Buf("f32", n), Buf("f32", C, "zero"), Buf("f32", C, "zero"), Buf("f32", n, "zero")
            first = Launch(kernels._bn_stats, (C, 1, 1), [x, mean, scale, images, C, S], {"B": B}, w)
            last = Launch(kernels._bn_apply, (cdiv(n, B), 1, 1), [x, mean, scale, o, n, C, S], {"B": B}, w)
            yield Point("batch_norm", f"{images}x{C}x{S}", f"B{B}w{w}", [first, last])
    for images, side, K in ((4, 64, 2), (256, 112, 2), (512, 224, 7), (64, 1024, 4)):
        wide = side // K
        n = images * wide * wide
        for B, w in ((64, 1), (128, 4), (256, 2), (1024, 4), (1024, 8)):
            args = [Buf("f32", images * side * side), Buf("f32", n, "zero"), n, wide, side, side, K]
            one = Launch(kernels._pool, (cdiv(n, B), 1, 1), args, {"B": B}, w)
            yield Point("pool", f"{images}x{side}k{K}", f"B{B}w{w}", [one])
    for C, side, pixels in ((3, 64, 1 << 12), (16, 256, 1 << 16), (32, 512, 1 << 20)):
        for B, w in ((64, 2), (128, 4), (256, 4), (512, 4), (512, 16)):
            args = [Buf("f32", C * side * side), Buf("f32", 2 * pixels, "unit"), Buf("f32", C * pixels, "zero")]
            one = Launch(kernels._grid_sample, (cdiv(pixels, B), 1, 1), [*args, pixels, C, side, side], {"B": B}, w)
            yield Point("grid_sample", f"{C}x{side}x{pixels}", f"B{B}w{w}", [one])
    for images, C, side, O, R in ((1, 16, 32, 32, 3), (8, 64, 56, 64, 3), (16, 128, 28, 128, 1), (16, 64, 112, 64, 3)):
        pixels, K = images * side * side, C * R * R
        for kind, BM, BN, BK, w in (
            ("tf32", 64, 32, 32, 4), ("tf32", 64, 64, 32, 4), ("tf32", 128, 64, 32, 8),
            ("ieee", 64, 32, 16, 4), ("ieee", 32, 32, 32, 4),
        ):  # fmt: skip
            args = [Buf("f32", C * pixels), Buf("f32", O * K), Buf("f32", O * pixels, "zero")]
            const = {"KIND": kind, "BM": BM, "BN": BN, "BK": BK}
            g = (cdiv(pixels, BM), cdiv(O, BN), 1)
            one = Launch(kernels._conv, g, [*args, pixels, C, side, side, O, R, K], const, w)
            yield Point("conv", f"{images}x{C}x{side}o{O}r{R}", f"{kind}{BM}x{BN}x{BK}w{w}", [one])


def _product(task: str, kind: str, dims: tuple[int, int, int, int], tile: tuple[int, ...]) -> Point:
    Z, M, N, K = dims
    BM, BN, BK, w, stages = tile
    elem = {"bf16": "bf16", "i8": "i8", "f16": "f16"}.get(kind, "f32")
    out = {"i8": "i32"}.get(elem, elem)
    word = "" if kind in ("bf16", "f16") else kind
    fill = "below:5" if kind == "i8" else "randn"
    args = [Buf(elem, Z * M * K, fill), Buf(elem, Z * K * N, fill), Buf(out, Z * M * N, "zero"), M, N, K]
    const = {"KIND": word, "BM": BM, "BN": BN, "BK": BK}
    one = Launch(kernels._matmul, (cdiv(M, BM), cdiv(N, BN), Z), args, const, w, stages)
    return Point(task, f"{Z}x{M}x{N}x{K}", f"{kind}{BM}x{BN}x{BK}w{w}s{stages}", [one])


def _products() -> Iterator[Point]:
    tiles = [(32, 32, 32, 1, 2), (64, 64, 32, 4, 2), (64, 64, 64, 4, 4), (128, 128, 32, 8, 3), (128, 128, 64, 8, 3),
             (128, 256, 64, 8, 3), (64, 128, 32, 4, 1), (16, 128, 64, 4, 3)]  # fmt: skip
    for dims in ((1, 256, 256, 256), (1, 1000, 1024, 512), (1, 2048, 2048, 2048), (1, 8192, 4096, 4096)):
        for t in tiles:
            yield _product("matmul_bf16", "bf16", dims, t)
            # 8-bit numbers need half the space, so that the depth of the tile may double.
            if t[0] >= 32:
                yield _product("matmul_i8", "i8", dims, (t[0], t[1], max(t[2], 64), *t[3:]))
    yield _product("matmul_bf16", "bf16", (1, 16, 8192, 8192), tiles[-1])
    for dims in ((4, 64, 64, 64), (16, 256, 256, 128), (64, 512, 512, 256)):
        for t in ((32, 32, 32, 4, 2), (64, 64, 32, 4, 2), (64, 64, 32, 4, 4), (128, 64, 32, 8, 3)):
            yield _product("bmm", "tf32", dims, t)
            if t[0] <= 64:
                yield _product("bmm", "ieee", dims, t)
    # One warp holds a whole accumulator of 128 by 128 numbers, for which there are not enough registers.
    for dims in ((1, 512, 512, 512), (1, 2048, 2048, 1024)):
        for t in ((128, 128, 32, 1, 2), (64, 128, 32, 1, 2), (128, 128, 32, 2, 2)):
            yield _product("spills", "f16", dims, t)


def _attentions() -> Iterator[Point]:
    for heads, n in ((4, 256), (16, 1024), (64, 2048)):
        for B, BK, w, stages in ((64, 32, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 32, 4, 3), (32, 32, 2, 2)):
            bufs = [Buf("f16", heads * n * 64) for _ in range(3)]
            args = [*bufs, Buf("f16", heads * n * 64, "zero"), n, 0.125]
            const = {"B": B, "BK": BK, "D": 64}
            one = Launch(kernels._attention, (n // B, heads, 1), args, const, w, stages)
            yield Point("attention", f"{heads}x{n}", f"B{B}K{BK}w{w}s{stages}", [one])


def _powers() -> Iterator[Point]:
    for count in (8, 256, 8192):
        for D, steps, w in ((16, 64, 1), (32, 64, 1), (32, 512, 4), (64, 128, 4), (128, 64, 8)):
            args = [Buf("f32", count * D * D, "unit"), Buf("f32", count * D, "zero"), steps]
            one = Launch(kernels._power, (count, 1, 1), args, {"D": D}, w)
            yield Point("power", f"{count}x{D}t{steps}", f"w{w}", [one])


def points() -> list[Point]:
    """Return every point once."""
    return list({p.name: p for p in (*_elementwise(), *_rows(), *_images(), *_products(), *_attentions(), *_powers())}.values())
