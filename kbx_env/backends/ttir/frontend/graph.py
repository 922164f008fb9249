"""The parsed form of a TTIR module: types, operations, blocks and functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

STORAGE: dict[str, np.dtype[Any]] = {
    "i1": np.dtype(np.bool_),
    "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "index": np.dtype(np.int64),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f8E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "f8E4M3FN": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "f8E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "f8E4M3B11FNUZ": np.dtype(ml_dtypes.float8_e4m3b11fnuz),
}
"""Dtype that stores each element type; ``index`` is a 64-bit integer."""


@dataclass(frozen=True)
class Type:
    """An MLIR type.

    Attributes:
        elem: Element type name; "ptr" for pointers, "desc" for tensor descriptors.
        shape: Tensor shape, () for scalars.
        pointee: For pointers and descriptors, the type pointed to.
    """

    elem: str
    shape: tuple[int, ...] = ()
    pointee: Type | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Numpy dtype that stores one element; addresses are 64-bit integers."""
        if self.elem in ("ptr", "desc"):
            return np.dtype(np.int64)
        return STORAGE[self.elem]

    @property
    def bits(self) -> int:
        """Width of an integer type in bits."""
        return 1 if self.elem == "i1" else self.dtype.itemsize * 8

    @property
    def size(self) -> int:
        """Number of elements."""
        n = 1
        for s in self.shape:
            n *= s
        return n


@dataclass
class Op:
    """One operation.

    Attributes:
        name: Operation name such as "arith.addf".
        args: Slots of the operands; a slot is the index of a value in the environment of its function.
        types: Types written in the text after the colon, operands first.
        results: Slots of the results.
        rtypes: Types of the results.
        attrs: Attributes and operation-specific data.
        regions: Nested regions.
        loc: Location reference, resolved only for messages.
        used: Whether any result is used.
        dead: Slots whose last use is this operation.
        run: The handler, filled in when the operation first runs.
    """

    name: str
    args: list[int]
    types: list[Type]
    results: list[int]
    rtypes: list[Type]
    attrs: dict[str, Any] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    loc: str = ""
    used: bool = False
    dead: list[int] = field(default_factory=list)
    run: Any = None


@dataclass
class Block:
    """A basic block: argument slots and operations, the last one a terminator.

    ``code`` is what the interpreter needs of the operations, filled in when the block first runs.
    """

    label: str
    args: list[int] = field(default_factory=list)
    arg_types: list[Type] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    code: Any = None


@dataclass
class Region:
    """A list of blocks, entered through the first."""

    blocks: list[Block] = field(default_factory=list)


@dataclass
class Func:
    """A function.

    Attributes:
        name: Its name.
        public: Whether it is the kernel itself.
        body: Its blocks; the arguments of the first one are those of the function.
        slots: Number of values.
        n_results: Number of results.
    """

    name: str
    public: bool
    body: Region
    slots: int = 0
    n_results: int = 0


@dataclass
class Module:
    """A parsed module.

    Attributes:
        funcs: Functions by name.
        locs: Location definitions by alias.
        max_elements: Largest number of elements of any tensor, which decides how many programs run together.
        serial: Whether programs may wait for one another (a loop reads memory with atomic operations or volatile
            loads); then they run one at a time, see serial.py, or together where lockstep.py finds that possible.
        together: Whether ``lockstep.run_together`` may be tried: it has not failed in an earlier launch.
    """

    funcs: dict[str, Func]
    locs: dict[str, str]
    max_elements: int = 1
    serial: bool = False
    together: bool = True

    @property
    def entry(self) -> Func:
        """The public function, that is the kernel."""
        for f in self.funcs.values():
            if f.public:
                return f
        return next(iter(self.funcs.values()))
