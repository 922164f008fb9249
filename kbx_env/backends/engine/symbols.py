"""Checks the functions that a kernel takes from libdevice: no device can link others."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from kbx_env.backends.ttir.frontend.graph import Module, Op, Region

_ROW = re.compile(r'\(\s*((?:core\.dtype\("\w+"\),?\s*)+)\):\s*\("(__nv_\w+)",\s*core\.dtype\("(\w+)"\)\)')
"""One row of a table in Triton's ``libdevice.py``: ``(core.dtype("fp32"), ): ("__nv_expf", core.dtype("fp32"))``."""
_ELEMENTS = {"fp16": "f16", "bf16": "bf16", "fp32": "f32", "fp64": "f64"} | {
    f"{sign}int{n}": f"i{n}" for sign in ("", "u") for n in (1, 8, 16, 32, 64)
}
"""Names of element types in Triton's tables, and in TTIR, which knows no signs of integers."""


class UnknownSymbol(Exception):
    """A kernel calls an external function that libdevice does not have.

    Args:
        symbol: Its name.
        signature: Its argument types and result type as the kernel calls it.
    """

    name = "CompilationError"

    def __init__(self, symbol: str, signature: str) -> None:
        super().__init__(f"unresolved external function {symbol[:80]!r} of type {signature[:200]}: libdevice has no such function")


@functools.cache
def signatures() -> frozenset[tuple[str, tuple[str, ...], str]]:
    """Return symbol, argument types and result type of every function that Triton's ``libdevice`` module calls."""
    found = importlib.util.find_spec("triton")
    assert found is not None and found.origin is not None
    text = (Path(found.origin).parent / "language/extra/cuda/libdevice.py").read_text()
    rows = set()
    for arguments, symbol, result in _ROW.findall(text):
        names = re.findall(r'"(\w+)"', arguments)
        rows.add((symbol, tuple(_ELEMENTS[n] for n in names), _ELEMENTS[result]))
    return frozenset(rows)


def require_known_symbols(module: Module) -> None:
    """Check every external function that a kernel calls.

    Args:
        module: The kernel.

    Raises:
        UnknownSymbol: libdevice has no function of that name and type.
    """
    for op in (op for f in module.funcs.values() for op in _operations(f.body)):
        if op.name == "tt.extern_elementwise":
            symbol, result = str(op.attrs.get("symbol", "")), op.rtypes[0].elem
            arguments = tuple(t.elem for t in op.types[: len(op.args)])
            if (symbol, arguments, result) not in signatures():
                raise UnknownSymbol(symbol, f"({', '.join(arguments)}) -> {result}")


def _operations(region: Region) -> Iterator[Op]:
    for block in region.blocks:
        for op in block.ops:
            yield op
            for inner in op.regions:
                yield from _operations(inner)
