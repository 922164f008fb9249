"""What a launch must be, before the executor looks at it: a kernel that a compiler has made, and arguments that fit it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from kbx_env.backends import ttir
from kbx_env.backends.engine.storage import TraceError, whole


def genuine(text: str) -> None:
    """What the executor stumbles over must at least be a kernel: text that Triton's own parser and verifier accept.

    Raises:
        TraceError: it is none, so no compiler has printed it.
    """
    from triton._C.libtriton import ir, nvidia

    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with open(os.memfd_create("ttir"), "wb") as f, silent():
        f.write(text.encode("utf-8", "replace"))
        f.flush()
        try:
            ir.parse_mlir_module(f"/proc/self/fd/{f.fileno()}", context)
        except RuntimeError:
            raise TraceError("kernel text that no compiler has made") from None


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """What a library writes past Python to the standard error goes nowhere: it would quote the submission."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def fits(module: ttir.Module, values: Sequence[Any]) -> None:
    """Launch arguments must be those of the kernel.

    Raises:
        TraceError: another number of them, or another kind.
    """
    types = module.entry.body.blocks[0].arg_types
    if len(values) != len(types):
        raise TraceError(f"{len(values)} launch arguments for {len(types)} parameters")
    for value, t in zip(values, types, strict=True):
        if isinstance(value, ttir.Descriptor):
            ok = t.elem == "desc" and t.pointee is not None
            ok = ok and len(t.pointee.shape) == len(value.shape) == len(value.strides)  # type: ignore[union-attr]
        else:
            ok = t.elem != "desc" and (type(value) is int or not (t.elem == "ptr" or t.dtype.kind in "ib"))
        if not ok:
            raise TraceError(f"launch argument {str(value)[:40]!r} for a parameter of type {t.elem}")


def argument(value: Any) -> Any:
    """A launch argument as the executor takes it.

    Raises:
        TraceError: neither a number nor a descriptor.
    """
    if type(value) in (int, float):
        return value
    if isinstance(value, dict) and set(value) == {"base", "shape", "strides", "padding"}:
        base = whole(value["base"], "address", 1 << 63)
        if not all(isinstance(value[k], list) for k in ("shape", "strides")):
            raise TraceError("launch argument: shape and strides of a descriptor")
        shape = [whole(n, "shape", 1 << 31) for n in value["shape"]]
        strides = [whole(n, "stride", 1 << 40) for n in value["strides"]]
        return ttir.Descriptor(base, tuple(shape), tuple(strides), str(value["padding"])[:8])
    raise TraceError(f"launch argument {str(value)[:40]!r}")
