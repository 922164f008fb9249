"""Checks of a launch before the executor runs it: the kernel is a compiler's output, and the arguments fit it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from kbx_env.backends import ttir
from kbx_env.backends.engine.storage import TraceError, bounded_int


def require_triton_ir(text: str) -> None:
    """Check that Triton's own parser and verifier accept a kernel that the executor failed on.

    Args:
        text: TTIR of the kernel, from an untrusted process.

    Raises:
        TraceError: they refuse it, so that no compiler has printed it.
    """
    from triton._C.libtriton import ir, nvidia

    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with open(os.memfd_create("ttir"), "wb") as f, stderr_silenced():
        f.write(text.encode("utf-8", "replace"))
        f.flush()
        try:
            ir.parse_mlir_module(f"/proc/self/fd/{f.fileno()}", context)
        except RuntimeError:
            raise TraceError("kernel text that no compiler has made") from None


@contextlib.contextmanager
def stderr_silenced() -> Iterator[None]:
    """Discard what a C++ library writes to the standard error: it would quote the submission."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def check_arguments(module: ttir.Module, values: Sequence[Any]) -> None:
    """Check the arguments of a launch against the kernel's parameters.

    Args:
        module: The kernel.
        values: Results of ``decode_argument``.

    Raises:
        TraceError: their number or a kind differs.
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


def decode_argument(value: Any) -> Any:
    """Convert a launch argument from the trace to the form that the executor takes.

    Args:
        value: A number, or a descriptor as a dictionary of ``base``, ``shape``, ``strides`` and ``padding``.

    Returns:
        The number, or a ``ttir.Descriptor``.

    Raises:
        TraceError: it is neither.
    """
    if type(value) in (int, float):
        return value
    if isinstance(value, dict) and set(value) == {"base", "shape", "strides", "padding"}:
        base = bounded_int(value["base"], "address", 1 << 63)
        if not all(isinstance(value[k], list) for k in ("shape", "strides")):
            raise TraceError("launch argument: shape and strides of a descriptor")
        shape = [bounded_int(n, "shape", 1 << 31) for n in value["shape"]]
        strides = [bounded_int(n, "stride", 1 << 40) for n in value["strides"]]
        return ttir.Descriptor(base, tuple(shape), tuple(strides), str(value["padding"])[:8])
    raise TraceError(f"launch argument {str(value)[:40]!r}")
