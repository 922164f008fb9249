"""Static slices of a kernel: where pointers come from and which inputs reach which stores.

A forward dataflow analysis over the parsed module computes a ``Fact`` for each value. Loops and block graphs are
iterated until nothing changes; functions are entered once per call, with the facts of that call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kbx_env.backends.ttir.frontend.graph import Block, Func, Module, Op, Region
from kbx_env.backends.ttir.frontend.locs import resolve
from kbx_env.backends.ttir.interp.traffic import dot_kind

UNKNOWN = -1
"""Stands for a pointer of unknown origin: made from an integer or loaded from memory."""
LOADS = ("tt.load", "tt.descriptor_load", "tt.descriptor_gather")
STORES = ("tt.store", "tt.descriptor_store", "tt.descriptor_scatter")
ATOMICS = ("tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_reduce")
_SET: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Fact:
    """What one value depends on; the sets hold positions of kernel arguments.

    Attributes:
        bases: Arguments that the value points into, if it is a pointer or a descriptor.
        values: Arguments whose loaded values reach it through data.
        control: Arguments whose loaded values decide a branch, a trip count or a mask on the way.
        address: Arguments whose loaded values select the addresses of loads on the way.
        dots: Kinds of matrix products, and of roundings to int8, on the way.
        packed: "i8" for integers loaded from memory, "i4" for parts of their bits, "" for everything else.
        read: The loads of these integers, by ``id`` of the operation.
    """

    bases: frozenset[int] = _SET
    values: frozenset[int] = _SET
    control: frozenset[int] = _SET
    address: frozenset[int] = _SET
    dots: frozenset[str] = frozenset()
    packed: str = ""
    read: frozenset[int] = _SET

    def __or__(self, o: Fact) -> Fact:
        if self is o or o is _EMPTY:
            return self
        if self is _EMPTY:
            return o
        return Fact(
            self.bases | o.bases,
            self.values | o.values,
            self.control | o.control,
            self.address | o.address,
            self.dots | o.dots,
            max(self.packed, o.packed, key=_DEPTH.index),
            self.read | o.read,
        )

    def everything(self) -> frozenset[int]:
        """Return every argument whose loaded values the value depends on in any way."""
        return self.values | self.control | self.address

    def under(self, control: frozenset[int]) -> Fact:
        """Return the fact with the arguments ``control`` added to its control dependences."""
        return self if control <= self.control else self | Fact(control=control)


_DEPTH = ("", "i8", "i4")
"""Values of ``Fact.packed``; where facts join, the later one stays."""
_HALVES = ("arith.shrsi", "arith.shrui", "arith.andi", "arith.remsi", "arith.remui", "arith.divsi", "arith.divui")
"""Operations that take some bits out of an integer."""
_INTEGERS = ("i8", "i16", "i32", "i64")
"""Types of loaded integers that may hold packed bytes; wide ones hold several."""
_FLOATS = ("f16", "bf16", "f32", "f64")
_EMPTY = Fact()


@dataclass(frozen=True)
class StoreSlice:
    """What one store or atomic operation of the text depends on.

    The sets hold positions of arguments of the public function. A pointer of unknown origin
    stands for every pointer argument. The old memory content that an atomic operation combines with is not counted.

    Attributes:
        target_args: Arguments that the store may write to.
        value_args: Arguments whose loaded values can reach the stored value through data; the
            condition of a ``tl.where`` counts as data.
        control_args: Arguments whose loaded values decide whether the store, a lane of it or a
            value on the way is executed: branches, trip counts, masks.
        address_args: Arguments whose loaded values select addresses, of the store or of loads.
        dots: Kinds of matrix products that the stored value passes through, "i8*i8->i32" or
            "tf32", as in ``Meter.dot_kinds``; "i4 in f16*f16->f32" where an operand was unpacked from
            halves of bytes; "f32->i8" or "i32->i8" for a rounding to int8.
        line: Source line, 0 when unknown.
    """

    target_args: frozenset[int]
    value_args: frozenset[int]
    control_args: frozenset[int]
    address_args: frozenset[int]
    dots: frozenset[str]
    line: int


class _Analysis:
    """The analysis of one module.

    Args:
        module: The module.

    Attributes:
        accesses: Loads, stores and atomic operations by ``id``, with the arguments that their pointers come from.
        indirect: Accesses whose address or mask depends on loaded values, by ``id``.
        loads: Loads by ``id``.
        unpacked: Loads of integers whose parts become floats, by ``id``.
        stores: Stores and atomic operations by ``id``, with what they depend on.
        integers: Facts of the operands of matrix products and of roundings to int8, by ``id`` and kind.
        depth: Number of nested calls that are analysed now.
        pointers: Positions of the pointers among the kernel's arguments.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.accesses: dict[int, tuple[Op, frozenset[int]]] = {}
        self.indirect: set[int] = set()
        self.loads: dict[int, Op] = {}
        self.unpacked: set[int] = set()
        self.stores: dict[int, tuple[Op, Fact]] = {}
        self.integers: dict[tuple[int, str], list[Fact]] = {}
        self.depth = 0
        entry = module.entry
        first = entry.body.blocks[0]
        self.pointers = frozenset(k for k, t in enumerate(first.arg_types) if t.elem in ("ptr", "desc"))
        facts = [Fact(bases=frozenset([k])) if k in self.pointers else _EMPTY for k in range(len(first.args))]
        self.func(entry, facts, _SET)

    def func(self, func: Func, args: list[Fact], control: frozenset[int]) -> list[Fact]:
        """Return the facts of a function's results, given the facts of its arguments and of the call's control flow."""
        return self.region(func.body, {}, args, control)

    def region(self, region: Region, env: dict[int, Fact], args: list[Fact], control: frozenset[int]) -> list[Fact]:
        """Analyse a region until nothing changes.

        Args:
            region: The region.
            env: Facts by slot, which are updated.
            args: Facts of the arguments of its first block.
            control: Arguments whose loaded values decide whether the region runs.

        Returns:
            Facts of the operands of the terminators that leave the region.
        """
        env.update(zip(region.blocks[0].args, args, strict=False))
        index = {b.label: b for b in region.blocks}
        out: list[Fact] = []
        changed = True
        while changed:
            changed = False
            for block in region.blocks:
                last = self.block(block, env, control)
                if last is None:
                    continue
                if last.name not in ("cf.br", "cf.cond_br"):
                    left = [env.get(a, _EMPTY).under(control) for a in last.args]
                    out = left if not out else [a | b for a, b in zip(out, left, strict=False)]
                    continue
                if last.name == "cf.cond_br":
                    # Everything from here on may depend on the direction of this branch.
                    more = control | env.get(last.args[0], _EMPTY).everything()
                    changed |= more != control
                    control = more
                for label, passed in last.attrs["targets"]:
                    for slot, a in zip(index[label].args, passed, strict=False):
                        new = env.get(slot, _EMPTY) | env.get(a, _EMPTY).under(control)
                        changed |= new != env.get(slot, _EMPTY)
                        env[slot] = new
        return out

    def block(self, block: Block, env: dict[int, Fact], control: frozenset[int]) -> Op | None:
        """Analyse the operations of a block and return its terminator."""
        for op in block.ops:
            facts = [env.get(a, _EMPTY) for a in op.args]
            results = self.op(op, facts, env, control)
            if op.rtypes and op.rtypes[0].elem in _FLOATS:
                # Here parts of bytes become floats: by a conversion, a table, or from their bits.
                self.unpacked.update(*(f.read for f in facts if f.packed == "i4"))
            for k, r in enumerate(op.results):
                env[r] = results[k] if k < len(results) else _join(results)
        return block.ops[-1] if block.ops else None

    # -- operations --------------------------------------------------------------------
    def op(self, op: Op, a: list[Fact], env: dict[int, Fact], control: frozenset[int]) -> list[Fact]:
        """Analyse one operation.

        Args:
            op: The operation.
            a: Facts of its operands.
            env: Facts by slot.
            control: Arguments whose loaded values decide whether the operation runs.

        Returns:
            Facts of its results; where there are more results than facts, the join of all facts holds for the others.
        """
        name = op.name
        if name in LOADS:
            return [self.load(op, a)]
        if name in STORES or name in ATOMICS:
            return [self.store(op, a, control)]
        if name == "scf.for":
            return self.for_loop(op, a, env, control)
        if name == "scf.while":
            return self.while_loop(op, a, env, control)
        if name == "scf.if":
            return self.branch(op, a, env, control)
        if name == "tt.call":
            return self.call(op, a, control)
        known = _join(a)
        for region in op.regions:
            self.region(region, env, [known] * len(region.blocks[0].args), control)
        return [self.value(op, a)]

    def value(self, op: Op, a: list[Fact]) -> Fact:
        """Return the fact of the results of an operation without control flow and without an access to memory."""
        name = op.name
        known = _join(a)
        if name in ("tt.int_to_ptr", "tt.ptr_to_int"):
            bases = frozenset([UNKNOWN]) if name == "tt.int_to_ptr" else _SET
            return Fact(bases, known.values, known.control, known.address, known.dots)
        if name in ("tt.dot", "tt.dot_scaled"):
            kind = dot_kind(op)
            if any(f.packed == "i4" for f in a[:2]):
                kind = f"i4 in {kind}"
            self.record_operands(op, kind, a[:2])
            return replace(known, packed="", read=_SET) | Fact(dots=frozenset([kind]))
        if name in ("arith.fptosi", "arith.trunci") and op.rtypes[0].elem == "i8":
            kind = f"{op.types[0].elem}->i8"
            self.record_operands(op, kind, a[:1])
            return known | Fact(dots=frozenset([kind]))
        if name in _HALVES and a[0].packed == "i8":
            # Only some bits of a byte go on: two numbers of four bits are packed in it.
            return replace(known, packed="i4")
        return known

    def record_operands(self, op: Op, kind: str, operands: list[Fact]) -> None:
        """Record the facts of the operands of a product or a rounding to int8, joined over repeated visits."""
        before = self.integers.get((id(op), kind), [_EMPTY] * len(operands))
        self.integers[id(op), kind] = [a | b for a, b in zip(before, operands, strict=True)]

    def branch(self, op: Op, a: list[Fact], env: dict[int, Fact], control: frozenset[int]) -> list[Fact]:
        """Analyse an ``scf.if``; arguments and result as for ``op``."""
        inner = control | a[0].everything()
        paths = [self.region(r, env, [], inner) for r in op.regions]
        return [_join([p[k] for p in paths if k < len(p)]).under(inner) for k in range(len(op.results))]

    def load(self, op: Op, a: list[Fact]) -> Fact:
        """Record a load and return the fact of its result."""
        masks = a[1:2] if op.name == "tt.load" else []
        data = _join(a[2:]) if op.name == "tt.load" else _EMPTY
        where = a[0] if op.name == "tt.load" else _join(a)
        mask = _join(masks)
        bases = self.access(op, a[0].bases, where, mask)
        integers = bool(op.rtypes) and op.rtypes[0].elem in _INTEGERS
        self.loads[id(op)] = op
        # A pointer that was itself in memory may point anywhere.
        pointers = frozenset([UNKNOWN]) if op.rtypes and op.rtypes[0].elem == "ptr" else _SET
        return Fact(
            pointers,
            bases | data.values,
            where.control | data.control | mask.everything(),
            where.values | where.address | data.address,
            data.dots,
            "i8" if integers else "",
            frozenset([id(op)]) if integers else _SET,
        )

    def store(self, op: Op, a: list[Fact], control: frozenset[int]) -> Fact:
        """Record a store or an atomic operation and return the fact of its result."""
        where, deciding, value = a[0], a[2:], a[1] if len(a) > 1 else _EMPTY
        if op.name == "tt.atomic_cas":
            deciding, value = [a[1], *a[3:]], a[2]
        elif op.name.startswith("tt.descriptor"):
            where, deciding, value = _join(a[:-1]), [], a[-1]
        mask = _join(deciding if op.name != "tt.atomic_cas" else a[3:])
        bases = self.access(op, a[0].bases, where, mask)
        mask = _join(deciding)
        fact = Fact(
            bases,
            value.values,
            value.control | where.control | mask.everything() | control,
            value.address | where.values | where.address,
            value.dots,
        )
        self.stores[id(op)] = op, fact | self.stores.get(id(op), (op, _EMPTY))[1]
        # The result of an atomic operation is the old content of its target.
        return Fact(_SET, bases | value.values, fact.control, fact.address, value.dots)

    def access(self, op: Op, bases: frozenset[int], where: Fact, mask: Fact) -> frozenset[int]:
        """Record an access to memory.

        Args:
            op: The load, store or atomic operation.
            bases: Arguments that its pointer comes from; empty when unknown.
            where: Fact of its addresses.
            mask: Fact of its mask.

        Returns:
            The arguments that its pointer comes from, or ``UNKNOWN``.
        """
        if where.everything() or mask.everything():
            self.indirect.add(id(op))
        bases = bases or frozenset([UNKNOWN])
        # Recorded are the bases over all calls of the function; returned are those of this call.
        self.accesses[id(op)] = op, bases | self.accesses.get(id(op), (op, _SET))[1]
        return bases

    def for_loop(self, op: Op, a: list[Fact], env: dict[int, Fact], control: frozenset[int]) -> list[Fact]:
        """Analyse an ``scf.for`` until nothing changes; arguments and result as for ``op``."""
        bounds = _join(a[:3])
        inner = control | bounds.everything()
        carried = a[3:]
        while True:
            left = self.region(op.regions[0], env, [bounds, *carried], inner)
            new = [c | y for c, y in zip(carried, left, strict=False)]
            if new == carried:
                return [c.under(inner) for c in carried]
            carried = new

    def while_loop(self, op: Op, a: list[Fact], env: dict[int, Fact], control: frozenset[int]) -> list[Fact]:
        """Analyse an ``scf.while`` until nothing changes; arguments and result as for ``op``."""
        before, after = op.regions
        carried, inner = a, control
        while True:
            cond, *passed = self.region(before, env, carried, inner)
            inner = control | cond.everything()
            left = self.region(after, env, passed, inner)
            new = [c | y.under(inner) for c, y in zip(carried, left, strict=False)]
            if new == carried:
                return [p.under(inner) for p in passed]
            carried = new

    def call(self, op: Op, a: list[Fact], control: frozenset[int]) -> list[Fact]:
        """Analyse a call; unknown functions and calls nested deeper than 32 join the facts of their arguments."""
        func = self.module.funcs.get(op.attrs.get("callee", ""))
        if func is None or self.depth > 32:
            return [_join(a)]
        self.depth += 1
        try:
            return self.func(func, a, control)
        finally:
            self.depth -= 1


def _join(facts: list[Fact]) -> Fact:
    out = _EMPTY
    for f in facts:
        out = out | f
    return out


def _known(analysis: _Analysis, args: frozenset[int]) -> frozenset[int]:
    return analysis.pointers if UNKNOWN in args else args


def _analyse(module: Module) -> _Analysis:
    # Kept in the module: all launches of a compiled kernel share it.
    memo: dict[str, Any] = vars(module)
    if "_analysis" not in memo:
        memo["_analysis"] = _Analysis(module)
    found: _Analysis = memo["_analysis"]
    return found


def store_slices(module: Module) -> list[StoreSlice]:
    """Return the backward slice of each store and atomic operation.

    Args:
        module: Result of ``parse``.

    Returns:
        One slice per operation of the text, in the order of the text as far as functions called
        several times allow; the calls of a function are joined.
    """
    found = _analyse(module)
    out = []
    for op, f in found.stores.values():
        target, values, control, address = (_known(found, s) for s in (f.bases, f.values, f.control, f.address))
        out.append(StoreSlice(target, values, control, address, f.dots, resolve(module.locs, op.loc)[1]))
    return out


def operand_slices(module: Module) -> list[tuple[str, list[frozenset[int]]]]:
    """Return the backward slices of the operands of matrix products and of roundings to int8.

    Args:
        module: Result of ``parse``.

    Returns:
        For each such operation: its kind as in ``StoreSlice.dots`` and, operand by operand, the positions of the
        arguments whose loaded values can reach it through data.
    """
    found = _analyse(module)
    return [(kind, [_known(found, f.values) for f in facts]) for (_, kind), facts in found.integers.items()]


def annotate(module: Module) -> None:
    """Write the results of the analysis into the attributes of every access.

    ``attrs["tensors"]`` becomes the sorted tuple of argument positions that its pointer may come
    from, empty when that is unknown; ``attrs["indirect"]`` whether its addresses or its mask depend on loaded
    values; ``attrs["unpacked"]``, of loads, whether parts of their integers become floats. Repeated calls do nothing.
    """
    memo = vars(module)
    if "_annotated" not in memo:
        for op, bases in _analyse(module).accesses.values():
            op.attrs["tensors"] = () if UNKNOWN in bases else tuple(sorted(bases))
            op.attrs["indirect"] = id(op) in _analyse(module).indirect
        for key, op in _analyse(module).loads.items():
            op.attrs["unpacked"] = key in _analyse(module).unpacked
        memo["_annotated"] = True


def accessed(module: Module, names: tuple[str, ...]) -> frozenset[int]:
    """Return positions of the pointer arguments that operations of these names access; all of them when unknown."""
    found = _analyse(module)
    out = _SET
    for op, bases in found.accesses.values():
        if op.name in names:
            out |= _known(found, bases)
    return out


def unknown_access(module: Module) -> bool:
    """Return whether some access uses a pointer of unknown origin."""
    return any(UNKNOWN in bases for _, bases in _analyse(module).accesses.values())
