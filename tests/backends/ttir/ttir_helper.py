"""Compile ``@triton.jit`` kernels to TTIR without a GPU."""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend


def to_ttir(fn: Any, sig: dict[str, str], const: dict[str, Any] | None = None, **opts: Any) -> str:
    """Return the TTIR text with locations of ``fn`` for the given signature."""
    const = dict(const or {})
    full = {n: ("constexpr" if n in const else sig[n]) for n in fn.arg_names}
    src = ASTSource(fn=fn, signature=full, constexprs=const)
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options(opts)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(options)
    module_map = backend.get_module_map()
    mod = src.make_ir(target, options, codegen, module_map, context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, src.language)
    mod = stages["ttir"](mod, {})
    return mod.str()


def execute(text: str, grid: tuple[int, ...], args: list[Any], **kw: Any) -> Any:
    """Run TTIR text; array arguments become buffers, far apart. Return the meter."""
    from kbx_env.backends.ttir import Meter, Region, launch, parse

    base, regions, flat = 1 << 32, [], []
    for k, a in enumerate(args):
        if hasattr(a, "dtype") and getattr(a, "ndim", 0):
            regions.append(Region(base, a.reshape(-1).view("u1"), f"arg{k}"))
            flat.append(base)
            base += (a.nbytes + (1 << 20)) // 256 * 256
        else:
            flat.append(a)
    meter = Meter()
    full = (tuple(grid) + (1, 1))[:3]
    launch(parse(text), full, flat, regions, meter, **kw)  # type: ignore[arg-type]
    return meter
