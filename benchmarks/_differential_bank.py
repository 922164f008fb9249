"""The kernels of ttir_differential.py, as expressions from which a module is written.

An elementwise case stores one expression of its inputs ``x``, ``y``, ``z``; a block case has a
body of its own. Groups: "exact" must agree in every bit, "ulp" is correctly rounded arithmetic,
"approx" uses approximate instructions, "relative" sums in an unspecified order.
"""

from __future__ import annotations

from dataclasses import dataclass

N = 1024


@dataclass(frozen=True)
class Case:
    """One kernel.

    Attributes:
        name: Name of the kernel and of the row in the report.
        group: How results are compared.
        body: Lines after the loads, which store to ``o``.
        inputs: Element types of the inputs.
        output: Element type of the output.
        special: Whether inputs contain NaN, infinities, denormals and extremes.
        finite: Interval of the ordinary inputs.
        size: Number of elements of each input and of the output.
        programs: Number of programs.
    """

    name: str
    group: str
    body: str
    inputs: tuple[str, ...]
    output: str
    special: bool = True
    finite: tuple[float, float] = (-8.0, 8.0)
    size: int = N
    programs: int = 1


def _each(name: str, group: str, expr: str, inputs: str, output: str, **kw: object) -> Case:
    return Case(name, group, f"tl.store(o + i, {expr})", tuple(inputs.split()), output, **kw)  # type: ignore[arg-type]


def _integers() -> list[Case]:
    out = []
    for t in ("i8", "i16", "i32", "i64", "u8", "u32", "u64"):
        for name, e in (
            ("arithmetic", "(x + y) * x - y"),
            ("bits", "(x & y) ^ (x | 5) ^ ~y"),
            ("shifts", "(x << (y & 7)) ^ (x >> (y & 7))"),
            ("division", "x // tl.where(y == 0, 1, y) + x % tl.where(y == 0, 1, y)"),
            ("order", "tl.minimum(x, y) ^ tl.maximum(x, y) ^ tl.where(x < y, x, y * 0)"),
        ):
            out.append(_each(f"{name}_{t}", "exact", e, f"{t} {t}", t))
    out.append(_each("umulhi_u32", "exact", "tl.umulhi(x, y)", "u32 u32", "u32"))
    out.append(_each("umulhi_u64", "exact", "tl.umulhi(x, y)", "u64 u64", "u64"))
    out.append(_each("extend", "exact", "x.to(tl.int64) * 3 + y.to(tl.int64)", "i8 u32", "i64"))
    out.append(_each("booleans", "exact", "((x > y) & (x != 3) | (y == 0)).to(tl.int32)", "i32 i32", "i32"))
    out.append(_each("popcount", "exact", "libdevice.popc(x) * 64 + libdevice.clz(x)", "i32", "i32"))
    out.append(_each("brev_ffs", "exact", "libdevice.brev(x) ^ libdevice.ffs(x)", "i32", "i32"))
    return out


def _conversions() -> list[Case]:
    out = []
    for t in ("i8", "i16", "i32", "i64", "u8", "u32", "u64"):
        long = {"i": "int", "u": "uint"}[t[0]] + t[1:]
        for f in ("fp32", "fp16", "bf16", "fp64"):
            out.append(_each(f"{f}_to_{t}", "exact", f"x.to(tl.{long})", f, t, finite=(-400.0, 400.0)))
        for f, name in (("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16")):
            out.append(_each(f"{t}_to_{f}", "exact", f"x.to(tl.{name})", t, f))
    floats = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp8e4nv": "float8e4nv", "fp8e5": "float8e5"}
    for a in floats:
        for b in floats:
            if a != b and not (a[:3] == "fp8" and b[:3] == "fp8"):
                out.append(_each(f"{a}_to_{b}", "exact", f"x.to(tl.{floats[b]})", a, b, finite=(-600.0, 600.0)))
    for b in ("fp16", "bf16", "fp8e5"):
        e = f"tl.cast(x, tl.{floats[b]}, fp_downcast_rounding='rtz')"
        out.append(_each(f"fp32_to_{b}_rtz", "exact", e, "fp32", b))
    out.append(_each("bitcast", "exact", "x.to(tl.int32, bitcast=True) ^ 5", "fp32", "i32"))
    return out


def _floats() -> list[Case]:
    out = []
    for t in ("fp32", "fp16", "bf16", "fp64"):
        for name, e in (
            ("add", "x + y"), ("multiply", "x * y"), ("fused", "x * y + z"), ("fused_minus", "x * y - z"),
            ("minus_fused", "z - x * y"), ("two_products", "x * y + z * x"), ("maximum", "tl.maximum(x, y)"),
            ("minimum", "tl.minimum(x, y)"), ("absolute", "tl.abs(x) - y"), ("negative", "-x"),
        ):  # fmt: skip
            out.append(_each(f"{name}_{t}", "ulp", e, f"{t} {t} {t}", t))
        out.append(
            _each(f"compare_{t}", "exact", "((x < y) | (x == z) | (x != x)).to(tl.int32)", f"{t} {t} {t}", "i32")
        )
        out.append(_each(f"divide_{t}", "ulp" if t == "fp64" else "approx", "x / y", f"{t} {t}", t))
        out.append(_each(f"remainder_{t}", "ulp", "x % y", f"{t} {t}", t))
    nan = "propagate_nan=tl.PropagateNan.ALL"
    out.append(_each("maximum_nan", "ulp", f"tl.maximum(x, y, {nan})", "fp32 fp32", "fp32"))
    out.append(_each("clamp", "ulp", "tl.clamp(x, -1.0, 2.0)", "fp32", "fp32"))
    out.append(_each("clamp_nan", "ulp", f"tl.clamp(x, -1.0, 2.0, {nan})", "fp32", "fp32"))
    for name, e in (
        ("div_rn", "tl.div_rn(x, y)"), ("sqrt_rn", "tl.sqrt_rn(x)"), ("fma", "tl.fma(x, y, x)"),
        ("floor", "tl.floor(x)"), ("ceil", "tl.ceil(x)"), ("rint", "libdevice.rint(x)"), ("round", "libdevice.round(x)"),
        ("trunc", "libdevice.trunc(x)"), ("copysign", "libdevice.copysign(x, y)"), ("add_rd", "libdevice.add_rd(x, y)"),
        ("mul_ru", "libdevice.mul_ru(x, y)"), ("div_rz", "libdevice.div_rz(x, y)"), ("fmod", "libdevice.fmod(x, y)"),
        ("nextafter", "libdevice.nextafter(x, y)"), ("lib_fma", "libdevice.fma(x, y, x)"),
        ("where_product", "tl.where(x > 0, x * y, y) + y"), ("square_plus", "x * x * x + x"),
    ):  # fmt: skip
        out.append(_each(name, "ulp", e, "fp32 fp32", "fp32"))
    return out


def _approximate() -> list[Case]:
    out = []
    for name in ("exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "rsqrt", "erf", "sigmoid"):
        out.append(_each(name, "approx", f"tl.{name}(x)", "fp32", "fp32"))
    for name in ("tanh", "exp", "log1p", "expm1", "atan", "asinh", "cbrt", "erfc", "lgamma", "tan", "sinh", "log10",
                 "normcdf", "sinpi", "rcbrt", "erfinv", "j0"):  # fmt: skip
        out.append(_each(f"lib_{name}", "approx", f"libdevice.{name}(x)", "fp32", "fp32"))
    out.append(_each("lib_pow", "approx", "libdevice.pow(x, y)", "fp32 fp32", "fp32"))
    out.append(_each("lib_atan2", "approx", "libdevice.atan2(x, y)", "fp32 fp32", "fp32"))
    out.append(_each("lib_hypot", "approx", "libdevice.hypot(x, y)", "fp32 fp32", "fp32"))
    out.append(_each("exp_fp64", "approx", "tl.exp(x)", "fp64", "fp64"))
    return out


def _rows(name: str, group: str, body: str, t: str, output: str, special: bool = False) -> Case:
    lines = f"r = tl.arange(0, 8)\nc = tl.arange(0, 128)\nv = tl.load(p0 + r[:, None] * 128 + c[None, :])\n{body}"
    return Case(name, group, lines, (t,), output, special)


def _blocks() -> list[Case]:
    full = "tl.store(o + r[:, None] * 128 + c[None, :], {})"
    one = "tl.store(o + r, {})"
    out = [
        _rows("sum_fp32", "relative", one.format("tl.sum(v, 1)"), "fp32", "fp32"),
        _rows("sum_fp16", "relative", one.format("tl.sum(v, 1)"), "fp16", "fp16"),
        _rows("sum_i32", "exact", one.format("tl.sum(v, 1)"), "i32", "i32"),
        _rows("max_fp32", "ulp", one.format("tl.max(v, 1)"), "fp32", "fp32", True),
        _rows("argmax_fp32", "exact", one.format("tl.argmax(v, 1)"), "fp32", "i32"),
        _rows("argmin_i8", "exact", one.format("tl.argmin(v, 1)"), "i8", "i32"),
        _rows("xor_i32", "exact", one.format("tl.xor_sum(v, 1)"), "i32", "i32"),
        _rows("cumsum_fp32", "relative", full.format("tl.cumsum(v, 1)"), "fp32", "fp32"),
        _rows("cumsum_i32", "exact", full.format("tl.cumsum(v, 1, reverse=True)"), "i32", "i32"),
        _rows("cumprod_i32", "exact", full.format("tl.cumprod(v, 1)"), "i32", "i32"),
        _rows("sort_fp32", "ulp", full.format("tl.sort(v)"), "fp32", "fp32"),
        _rows("sort_i32", "exact", full.format("tl.sort(v, descending=True)"), "i32", "i32"),
        _rows("flip_i8", "exact", full.format("tl.flip(v, 1)"), "i8", "i8"),
        _rows("softmax", "relative", full.format("tl.softmax(v, dim=1, keep_dims=True)"), "fp32", "fp32"),
        _rows("transpose", "exact", "tl.store(o + c[:, None] * 8 + r[None, :], tl.trans(v))", "i16", "i16"),
        _rows("reshape", "exact", "tl.store(o + tl.arange(0, 1024), tl.reshape(tl.permute(v, (1, 0)), (1024,)))", "i32", "i32"),
        _rows("join", "exact", "a, b = tl.split(tl.reshape(v, (8, 64, 2)))\n"
              "tl.store(o + tl.arange(0, 1024), tl.reshape(tl.interleave(b, a), (1024,)))", "i32", "i32"),
        _rows("gather", "exact", full.format("tl.gather(v, tl.broadcast_to((c * 7 % 128)[None, :], (8, 128)), 1)"), "i32", "i32"),
        _rows("histogram", "exact", "tl.store(o + c, tl.histogram(tl.reshape(v, (1024,)) & 127, 128))", "i32", "i32"),
        _rows("atomics", "exact", "tl.atomic_add(o + (v & 63), v)\ntl.atomic_max(o + 64 + (v & 63), v)\n"
              "tl.atomic_xor(o + 128 + (v & 63), v)", "i32", "i32"),
        _rows("layer_norm", "relative", "m = tl.sum(v, 1) / 128\nd = v - m[:, None]\ns = tl.sum(d * d, 1) / 128\n"
              + full.format("d * tl.rsqrt(s + 1e-5)[:, None]"), "fp32", "fp32"),
        Case("philox", "exact", "a, b, c, d = tl.randint4x(tl.load(p0), i)\ntl.store(o + i, a ^ (b << 1) ^ (c << 2) ^ (d << 3))",
             ("i64",), "u32"),
        Case("rand", "exact", "tl.store(o + i, tl.rand(tl.load(p0), i))", ("i64",), "fp32"),
        Case("randn", "approx", "tl.store(o + i, tl.randn(tl.load(p0), i))", ("i64",), "fp32"),
        Case("collatz", "exact", "v = tl.program_id(0) + 1\nk = 0\nwhile v != 1:\n    if v % 2 == 0:\n        v = v // 2\n"
             "    else:\n        v = 3 * v + 1\n    k += 1\ntl.store(o + tl.program_id(0), k)", ("i32",), "i32", programs=64),
    ]  # fmt: skip
    dot = (
        "r = tl.arange(0, 32)\nat = r[:, None] * 32 + r[None, :]\n"
        "tl.store(o + at, tl.dot(tl.load(p0 + at), tl.load(p1 + at){}))"
    )
    for t, to, extra in (
        ("fp16", "fp32", ""), ("bf16", "fp32", ""), ("fp8e4nv", "fp32", ""), ("fp8e5", "fp32", ""), ("i8", "i32", ""),
        ("fp16", "fp16", ", out_dtype=tl.float16"), ("fp32", "fp32", ", input_precision='ieee'"),
        ("fp32", "fp32", ", input_precision='tf32'"), ("fp32", "fp32", ", input_precision='tf32x3'"),
    ):  # fmt: skip
        name = f"dot_{t}_{to}" + ("_" + extra.split("'")[1] if "'" in extra else "")
        out.append(Case(name, "exact" if t == "i8" else "relative", dot.format(extra), (t, t), to, False, (-2.0, 2.0)))
    return out


def cases(quick: bool = False) -> list[Case]:
    """Return the bank, every fifth elementwise case when ``quick``."""
    each = _integers() + _conversions() + _floats() + _approximate()
    return (each[::5] if quick else each) + _blocks()


def source(case: Case) -> str:
    """Return the definition of a case's kernel."""
    pointers = [f"p{k}" for k in range(len(case.inputs))]
    lines = [f"def {case.name}({', '.join(pointers)}, o, N: tl.constexpr):", "i = tl.arange(0, N)"]
    if case.body.startswith("tl.store(o + i, ") and "p0" not in case.body:
        lines += [f"{v} = tl.load({p} + i)" for v, p in zip("xyz", pointers, strict=False)]
    lines += case.body.split("\n")
    return "@triton.jit\n" + lines[0] + "".join(f"\n    {line}" for line in lines[1:]) + "\n"
