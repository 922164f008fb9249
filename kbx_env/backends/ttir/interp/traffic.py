"""Counters of launches: bytes by tensor, memory sectors, repeated reads, operations by unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kbx_env.backends.ttir.frontend.graph import Block, Op, Type
from kbx_env.backends.ttir.sanitizer.shadow import Array, Shadow, alignment_and_stride, any_nonzero

SECTOR = 32
"""Bytes of a sector, the smallest piece that a GPU moves between memory and its caches."""
_NOWHERE = np.iinfo(np.int64).max
"""Stands for the sector of a lane that takes no part: behind all others, because masks mostly leave out the last lanes."""
_WARP = 32
"""Lanes of a warp, whose accesses are joined."""
_REGION_PER_ELEMENT = ("tt.reduce", "tt.scan", "tt.map_elementwise")
_INT = frozenset("addi subi muli divsi divui remsi remui andi ori xori shli shrsi shrui cmpi maxsi maxui minsi minui "
                 "select ceildivsi floordivsi".split())  # fmt: skip
_FLOAT = frozenset("addf subf mulf negf cmpf maximumf minimumf maxnumf minnumf".split())
_MATH_FLOAT = frozenset("math.absf math.fma math.floor math.ceil tt.clampf".split())
_SPECIAL = ("tt.precise_sqrt", "tt.precise_divf", "tt.extern_elementwise", "arith.divf", "arith.remf")


@dataclass
class TensorTraffic:
    """Bytes that unmasked lanes moved to and from one tensor; an atomic operation counts its operand once."""

    loaded: int = 0
    stored: int = 0
    atomic: int = 0


@dataclass
class LaunchTraffic:
    """The counters of one launch.

    Attributes:
        kernel: Name of the kernel.
        grid: Number of programs along x, y and z.
        tensors: Bytes by tensor name; "" stands for pointers that may come from several tensors.
        loaded_sector_bytes: Bytes of the 32-byte sectors that loads request (detailed mode, else 0).
        stored_sector_bytes: The same for stores.
        unique_loaded_bytes: Bytes loaded at least once (detailed mode, else 0).
        dots: Operations of matrix products by kind; a multiplication and an addition count as two.
        flops: Operations by unit: "tensor" (matrix products except f32*f32 and f64*f64 ones),
            "fp32" (16-bit floats as well), "fp64", "int" and "special" (divisions, roots,
            transcendental functions). A fused multiplication and addition counts as two.
        arguments: Bytes by the positions of the arguments that a pointer may come from; () where that is unknown.
    """

    kernel: str
    grid: tuple[int, int, int]
    tensors: dict[str, TensorTraffic] = field(default_factory=dict)
    loaded_sector_bytes: int = 0
    stored_sector_bytes: int = 0
    unique_loaded_bytes: int = 0
    dots: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    arguments: Counter[tuple[int, ...]] = field(default_factory=Counter)

    @property
    def loaded_bytes(self) -> int:
        """Bytes read by unmasked lanes."""
        return sum(t.loaded for t in self.tensors.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes written by unmasked lanes."""
        return sum(t.stored for t in self.tensors.values())

    @property
    def atomic_bytes(self) -> int:
        """Bytes of the operands of atomic operations."""
        return sum(t.atomic for t in self.tensors.values())

    @property
    def reread_bytes(self) -> int:
        """Bytes loaded from addresses that this launch had loaded before (detailed mode)."""
        return self.loaded_bytes - self.unique_loaded_bytes

    @property
    def efficiency(self) -> float:
        """Bytes of unmasked lanes over bytes of sectors (detailed mode); above 1 where lanes share an address."""
        moved = self.loaded_sector_bytes + self.stored_sector_bytes
        return (self.loaded_bytes + self.stored_bytes) / moved if moved else 1.0


def dot_kind(op: Op) -> str:
    """Return the kind of a matrix product, "i8*i8->i32" or the precision of a rounded f32 one."""
    out = op.rtypes[0]
    if op.name == "tt.dot_scaled":
        return f"scaled {op.attrs['lhs']}*{op.attrs['rhs']}->{out.elem}"
    a, b = op.types[:2]
    precision = str(op.attrs.get("inputPrecision", "ieee")) if a.elem == "f32" else "ieee"
    return f"{a.elem}*{b.elem}->{out.elem}" if precision == "ieee" else precision


def _dot_flops(op: Op) -> int:
    a, out = op.types[0], op.rtypes[0]
    inner = a.shape[-1]
    if op.name == "tt.dot_scaled" and op.attrs.get("lhs") == "e2m1" and op.attrs.get("lhs_k_pack", True):
        inner *= 2
    return 2 * out.size * inner


def _float_unit(t: Type) -> str:
    return "fp64" if t.elem == "f64" else "fp32"


def _op_cost(op: Op, out: Counter[str]) -> None:
    """Add the operations of one program in one run of ``op`` to ``out``."""
    dialect, _, name = op.name.partition(".")
    t = op.rtypes[0] if op.rtypes else Type("i32")
    if op.name in ("tt.dot", "tt.dot_scaled"):
        kind, flops = dot_kind(op), _dot_flops(op)
        out[f"dot {kind}"] += flops
        out[{"f32*f32->f32": "fp32", "f64*f64->f64": "fp64"}.get(kind, "tensor")] += flops
    elif op.name in _REGION_PER_ELEMENT:
        inner: Counter[str] = Counter()
        for block in op.regions[0].blocks:
            for o in block.ops:
                _op_cost(o, inner)
        size = op.types[0].size if op.types else 1
        times = size - t.size if op.name == "tt.reduce" else size // max(op.attrs.get("pack", 1), 1)
        for unit, n in inner.items():
            out[unit] += n * times
    elif op.name in _SPECIAL:
        out["special"] += t.size
    elif dialect == "arith" and name in _FLOAT or op.name in _MATH_FLOAT:
        twice = 2 if op.name == "math.fma" or "fused" in op.attrs else 1
        out[_float_unit(op.types[0] if op.types else t)] += twice * t.size
    elif dialect == "math":
        out["special"] += t.size
    elif dialect == "arith" and name in _INT or op.name in ("tt.addptr", "tt.mulhiui"):
        out["int"] += t.size


def block_cost(block: Block) -> Counter[str]:
    """Return the operations of one program in one run of a block, by unit and "dot <kind>"."""
    memo = vars(block)
    if "_cost" not in memo:
        cost: Counter[str] = Counter()
        for op in block.ops:
            _op_cost(op, cost)
        memo["_cost"] = cost
    found: Counter[str] = memo["_cost"]
    return found


def sectors(addr: Array, mask: Array | None) -> int:
    """Count the distinct 32-byte sectors that each group of 32 lanes touches.

    Args:
        addr: Byte addresses: int64, (programs, lanes), in row-major order of the tensor.
        mask: Lanes that take part, of the same shape; ``None`` for all.

    Returns:
        The number of sectors, summed over the groups.
    """
    width = min(_WARP, addr.shape[1])
    if mask is None:
        flat = addr.reshape(-1)
        step = alignment_and_stride(flat)[1]
        if len(flat) == 1 or step >= SECTOR:
            return len(flat)
        if step > 0 and (len(flat) == width or not step * width % SECTOR):
            # Neighbours are less than a sector apart: a group touches all from its first lane's to its last lane's.
            first = int(flat[0])
            return len(flat) // width * ((first + step * (width - 1) >> 5) - (first >> 5) + 1)
    lines = addr.reshape(-1, width) >> 5
    if mask is not None:
        np.copyto(lines, _NOWHERE, where=~mask.reshape(-1, width))
    before, after = lines[:, :-1], lines[:, 1:]
    falls = after < before
    if any_nonzero(falls):
        rows = falls.any(axis=1)
        lines[rows] = np.sort(lines[rows], axis=1)
    count = int(np.count_nonzero(after != before)) + len(lines)
    return count if mask is None else count - int(np.count_nonzero(lines[:, -1] == _NOWHERE))


@dataclass
class Meter:
    """Counters of any number of launches.

    Attributes:
        launches: Number of launches.
        loaded_bytes: Bytes read by unmasked lanes.
        stored_bytes: Bytes written by unmasked lanes.
        dot_flops: Floating point or integer operations of matrix products.
        dot_kinds: Kinds of matrix products, such as "f16*f16->f32" or "tf32".
        atomics: Unmasked lanes of atomic operations.
        detail: Whether to count sectors and repeated reads, which takes longer.
        per_launch: One entry per launch.
    """

    launches: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    dot_flops: int = 0
    dot_kinds: set[str] = field(default_factory=set)
    atomics: int = 0
    detail: bool = False
    per_launch: list[LaunchTraffic] = field(default_factory=list)
    _blocks: dict[int, tuple[Block, int]] = field(default_factory=dict, repr=False)
    _moved: dict[tuple[tuple[int, ...], str], int] = field(default_factory=dict, repr=False)
    _seen: dict[int, Shadow] = field(default_factory=dict, repr=False)

    # -- totals ------------------------------------------------------------------------
    @property
    def flops(self) -> Counter[str]:
        """Operations by unit, over all launches; see ``LaunchTraffic.flops``."""
        return sum((t.flops for t in self.per_launch), Counter())

    @property
    def dots(self) -> Counter[str]:
        """Operations of matrix products by kind, over all launches."""
        return sum((t.dots for t in self.per_launch), Counter())

    @property
    def atomic_bytes(self) -> int:
        """Bytes of the operands of atomic operations, over all launches."""
        return sum(t.atomic_bytes for t in self.per_launch)

    @property
    def tensors(self) -> dict[str, TensorTraffic]:
        """Bytes by tensor name, over all launches."""
        out: dict[str, TensorTraffic] = {}
        for launch in self.per_launch:
            for name, t in launch.tensors.items():
                sum_ = out.setdefault(name, TensorTraffic())
                sum_.loaded, sum_.stored, sum_.atomic = (
                    sum_.loaded + t.loaded, sum_.stored + t.stored, sum_.atomic + t.atomic,
                )  # fmt: skip
        return out

    # -- calls by the executor ------------------------------------------------------------
    def begin(self, kernel: str, grid: tuple[int, int, int]) -> None:
        """Start a launch of ``grid`` programs of a kernel."""
        self.launches += 1
        self.per_launch.append(LaunchTraffic(kernel, grid))
        self._blocks, self._seen, self._moved = {}, {}, {}

    def ran(self, block: Block, programs: int) -> None:
        """Count one run of a block by some programs."""
        before = self._blocks.get(id(block))
        self._blocks[id(block)] = block, programs + (before[1] if before else 0)

    def end(self, label: Callable[[int], str]) -> None:
        """Finish the launch, also one that failed; ``label`` returns the name of an argument's tensor."""
        now = self.per_launch[-1]
        for (tensors, kind), size in self._moved.items():
            now.arguments[tensors] += size
            name = label(tensors[0]) if len(tensors) == 1 else ""
            traffic = now.tensors.setdefault(name, TensorTraffic())
            setattr(traffic, kind, getattr(traffic, kind) + size)
        for block, n in self._blocks.values():
            for unit, cost in block_cost(block).items():
                if unit.startswith("dot "):
                    now.dots[unit[4:]] += n * cost
                else:
                    now.flops[unit] += n * cost
        for shadow in self._seen.values():
            now.unique_loaded_bytes += int(np.count_nonzero(shadow.arrays["seen"])) * shadow.grain
        self._blocks, self._seen, self._moved = {}, {}, {}

    def adopt(self, other: Meter) -> None:
        """Count the launch that has begun as ``other`` counted it, which counted nothing else."""
        self.loaded_bytes += other.loaded_bytes
        self.stored_bytes += other.stored_bytes
        self.dot_flops += other.dot_flops
        self.dot_kinds |= other.dot_kinds
        self.atomics += other.atomics
        self.per_launch[-1] = other.per_launch[-1]
        self._blocks, self._seen, self._moved = other._blocks, other._seen, other._moved

    def moved(self, kind: str, tensors: tuple[int, ...], size: int) -> None:
        """Count the bytes of one access.

        Args:
            kind: "loaded", "stored" or "atomic".
            tensors: Argument positions that its pointer may come from.
            size: Bytes of its unmasked lanes.
        """
        if kind == "loaded":
            self.loaded_bytes += size
        elif kind == "stored":
            self.stored_bytes += size
        key = tensors, kind
        self._moved[key] = self._moved.get(key, 0) + size

    def trace(self, kind: str, addr: Array, mask: Array | None, shape: Sequence[int], programs: int) -> None:
        """Count the sectors of an access to global memory.

        Args:
            kind: "loaded" or "stored".
            addr: Byte addresses: int64, broadcastable to (programs or 1, *shape).
            mask: Lanes that take part, broadcastable likewise; ``None`` for all.
            shape: Tensor shape of the access.
            programs: Number of programs that a leading axis of length 1 stands for.
        """
        n = max(len(addr), len(mask) if mask is not None else 1)
        full = (n, *shape)
        lines = (addr if addr.shape == full else np.broadcast_to(addr, full)).reshape(n, -1)
        on = None if mask is None else (mask if mask.shape == full else np.broadcast_to(mask, full)).reshape(n, -1)
        count = sectors(lines, on) * (programs if n == 1 else 1) * SECTOR
        now = self.per_launch[-1]
        if kind == "loaded":
            now.loaded_sector_bytes += count
        else:
            now.stored_sector_bytes += count

    def seen(self, region: int, size: int, offsets: Array, item: int) -> None:
        """Record loads, to count repeated ones.

        Args:
            region: Index of the region.
            size: Bytes of the region.
            offsets: Byte offsets of the elements: (lanes,).
            item: Bytes of one element.
        """
        shadow = self._seen.get(region)
        if shadow is None:
            shadow = self._seen[region] = Shadow(size, {"seen": np.bool_})
        index = shadow.at(offsets, item)
        shadow.arrays["seen"][index] = True
