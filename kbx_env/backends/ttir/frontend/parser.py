"""Parse the text of a TTIR module, as MLIR prints it: one operation per line."""

from __future__ import annotations

import re
from typing import Any

from kbx_env.backends.ttir.errors import TtirError
from kbx_env.backends.ttir.frontend import text as tx
from kbx_env.backends.ttir.frontend.graph import Block, Func, Module, Op, Region, Type
from kbx_env.backends.ttir.interp.fusion import fuse
from kbx_env.backends.ttir.interp.liveness import annotate

_RESULTS = re.compile(r"((?:%[\w$.\-]+(?::\d+)?(?:,\s*)?)+)\s*=\s*(.*)$", re.S)
_NAME = re.compile(r'"?([A-Za-z_][\w.]*)"?\s*(.*)$', re.S)
_LOCDEF = re.compile(r"(#loc\d*) = loc\((.*)\)\s*$")
_PARAM = re.compile(r"(%[\w$.\-]+): ")
_TARGET = re.compile(r"\^(\w+)(?:\(([^)]*)\))?")
_SCALED = re.compile(r"\s*%[\w$.#\-]+( scale %[\w$.#\-]+)?, %[\w$.#\-]+( scale)?")
_SAME_AS_FIRST = {"tt.addptr", "tt.advance"}
"""Operations whose result has the type of the first operand."""


class _Parser:
    """Parses one module.

    Args:
        text: The module.

    Attributes:
        locs: Location definitions by alias.
        lines: The lines that are not location definitions or comments, stripped.
        i: Index of the current line.
        scopes: Slots by name of the value, from the outermost region to the current one.
        slots: Number of slots of the current function so far.
        max_elements: Largest number of elements of any tensor so far.
    """

    def __init__(self, text: str) -> None:
        self.locs: dict[str, str] = {}
        self.lines: list[str] = []
        for line in text.splitlines():
            m = _LOCDEF.match(line.strip())
            if m:
                self.locs[m.group(1)] = m.group(2)
            elif line.strip() and not line.startswith("#"):
                self.lines.append(line.strip())
        self.i = 0
        self.scopes: list[dict[str, list[int]]] = []
        self.slots = 0
        self.max_elements = 1

    # -- names -------------------------------------------------------------------------
    def define(self, name: str, count: int = 1) -> list[int]:
        """Return the slots of a new value ``name``, which has ``count`` parts."""
        ids = list(range(self.slots, self.slots + count))
        self.slots += count
        self.scopes[-1][name] = ids
        return ids

    def use(self, ref: str) -> int:
        """Return the slot of a value, written ``%name`` or ``%name#part``."""
        name, _, idx = ref.partition("#")
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name][int(idx or 0)]
        raise TtirError(f"undefined value {ref}")

    def uses(self, s: str) -> list[int]:
        """Return the slots of the values that a text names."""
        return [self.use(r) for r in tx.VALUE.findall(s)]

    def params(self, s: str) -> tuple[list[int], list[Type]]:
        """Define the ``%name: type`` parameters of a text; return their slots and types."""
        ids, types = [], []
        hits = list(_PARAM.finditer(s))
        for k, m in enumerate(hits):
            end = hits[k + 1].start() if k + 1 < len(hits) else len(s)
            ids += self.define(m.group(1))
            types.append(tx.types_in(s[m.end() : end])[0])
        return ids, types

    # -- structure ---------------------------------------------------------------------
    @staticmethod
    def strip_loc(line: str) -> tuple[str, str]:
        """Split a line into the operation and its location, "" without one."""
        at = line.rfind(" loc(")
        if at >= 0 and line.endswith(")"):
            return line[:at].rstrip(), line[at + 1 :]
        return line, ""

    def region(self, names: list[str], types: list[Type]) -> Region:
        """Parse a region up to the closing brace, which stays the current line.

        Args:
            names: Names of the arguments of its first block.
            types: Their types.

        Returns:
            The region.
        """
        self.scopes.append({})
        entry = Block("bb0")
        for n, t in zip(names, types, strict=False):
            entry.args += self.define(n)
            entry.arg_types.append(t)
        blocks = [entry]
        while True:
            line = self.lines[self.i]
            if line.startswith("}"):
                break
            if line.startswith("^"):
                head = line.split("//")[0].strip()
                label = re.match(r"\^(\w+)", head)
                assert label
                if blocks[-1].ops or blocks[-1].args:
                    blocks.append(Block(label.group(1)))
                blocks[-1].label = label.group(1)
                ids, ts = self.params(head)
                blocks[-1].args += ids
                blocks[-1].arg_types += ts
                self.i += 1
            elif line.startswith("//"):
                self.i += 1
            else:
                blocks[-1].ops.append(self.op())
        self.scopes.pop()
        return Region(blocks)

    def module(self, fp_fusion: bool) -> Module:
        """Parse all functions and run the passes over them; ``fp_fusion`` as for ``parse``."""
        funcs: dict[str, Func] = {}
        while self.i < len(self.lines):
            line = self.lines[self.i]
            if line.startswith("tt.func"):
                f = self.func(line)
                funcs[f.name] = f
            self.i += 1
        if not funcs:
            raise TtirError("the text holds no tt.func")
        module = Module(funcs, self.locs, self.max_elements)
        if fp_fusion:
            fuse(module)
        annotate(module)
        return module

    def func(self, line: str) -> Func:
        """Parse the function whose header is ``line``, the current line."""
        m = re.match(r"tt\.func\s+(public\s+|private\s+)?@(\"[^\"]*\"|[\w.$\-]+)\(", line)
        if not m:
            raise TtirError(f"cannot parse {line[:80]}")
        self.slots = 0
        self.scopes = [{}]
        end = tx.close(line, m.end() - 1)
        ids, types = self.params(line[m.end() : end])
        rest = line[end + 1 :].split("attributes")[0]
        n_results = len(tx.types_in(rest.split("->")[1])) if "->" in rest else 0
        self.i += 1
        body = self.region([], [])
        body.blocks[0].args = ids
        body.blocks[0].arg_types = types
        return Func(m.group(2).strip('"'), "public" in (m.group(1) or ""), body, self.slots, n_results)

    # -- operations --------------------------------------------------------------------
    def op(self) -> Op:
        """Parse the operation that begins at the current line."""
        line, loc = self.strip_loc(self.lines[self.i])
        self.i += 1
        names: list[tuple[str, int]] = []
        m = _RESULTS.match(line) if line.startswith("%") else None
        if m:
            for r in m.group(1).split(","):
                n, _, c = r.strip().partition(":")
                names.append((n, int(c or 1)))
            line = m.group(2)
        m = _NAME.match(line)
        if not m:
            raise TtirError(f"cannot parse {line[:80]}")
        name, rest = m.group(1), m.group(2)
        if name == "scf.for":
            op = self.scf_for(rest)
        elif name == "scf.if":
            op = self.scf_if(rest)
        elif name == "scf.while":
            op = self.scf_while(rest)
        elif rest.endswith("({"):
            op = self.generic(name, rest)
        else:
            op = self.plain(name, rest)
        if op.regions:
            # The location of an operation with regions is on its closing line.
            loc = self.strip_loc(self.lines[self.i - 1])[1]
        op.loc = loc
        for n, c in names:
            op.results += self.define(n, c)
        while 0 < len(op.rtypes) < len(op.results):
            op.rtypes.append(op.rtypes[-1])
        for t in op.rtypes + op.types:
            self.max_elements = max(self.max_elements, t.size, t.pointee.size if t.pointee else 1)
        return op

    def scf_for(self, rest: str) -> Op:
        """Parse a counted loop; ``rest`` is its text after the name."""
        m = re.match(r"(unsigned )?(%\S+) = (%\S+) to (%\S+) step (%\S+)\s*(.*)", rest, re.S)
        if not m:
            raise TtirError(f"cannot parse scf.for {rest}")
        tail, names, inits, rtypes = m.group(6), [m.group(2)], [], []
        if tail.startswith("iter_args("):
            end = tx.close(tail, 9)
            for a, b in re.findall(r"(%\S+) = (%[\w$.\-#]+)", tail[10:end]):
                names.append(a)
                inits.append(self.use(b))
            tail = tail[end + 1 :].strip()
            if tail.startswith("->"):
                end = tx.close(tail, tail.index("("))
                rtypes = tx.types_in(tail[:end])
                tail = tail[end + 1 :]
        ivt = (tx.types_in(tail) or [Type("index")])[0]
        args = [self.use(m.group(k)) for k in (3, 4, 5)] + inits
        body = self.region(names, [ivt, *rtypes])
        self.i += 1
        return Op("scf.for", args, [ivt], [], rtypes, {"unsigned": bool(m.group(1))}, [body])

    def scf_if(self, rest: str) -> Op:
        """Parse a branch; ``rest`` is its text after the name."""
        args = self.uses(rest.split("->")[0])
        rtypes = tx.types_in(rest.split("->", 1)[1]) if "->" in rest else []
        regions = [self.region([], [])]
        if re.match(r"\}\s*else\s*\{", self.lines[self.i]):
            self.i += 1
            regions.append(self.region([], []))
        self.i += 1
        return Op("scf.if", args, [], [], rtypes, {}, regions)

    def scf_while(self, rest: str) -> Op:
        """Parse a loop with a condition; ``rest`` is its text after the name."""
        names, args = [], []
        if rest.startswith("("):
            end = tx.close(rest, 0)
            for a, b in re.findall(r"(%\S+) = (%[\w$.\-#]+)", rest[:end]):
                names.append(a)
                args.append(self.use(b))
            rest = rest[end + 1 :]
        ins, _, outs = rest.partition("->")
        before = self.region(names, tx.types_in(ins))
        self.i += 1
        after = self.region([], [])
        self.i += 1
        return Op("scf.while", args, [], [], tx.types_in(outs), {}, [before, after])

    def generic(self, name: str, rest: str) -> Op:
        """Parse an operation with regions in MLIR's generic form."""
        head, strings = tx.hide_strings(rest)
        args = self.uses(head)
        regions = [self.region([], [])]
        while self.lines[self.i].startswith("}, {"):
            self.i += 1
            regions.append(self.region([], []))
        tail, _ = self.strip_loc(self.lines[self.i])
        self.i += 1
        ins, _, outs = tail.partition("->")
        attrs = tx.attributes(head, strings)
        return Op(name, args, tx.types_in(ins), [], tx.types_in(outs), attrs, regions)

    def plain(self, name: str, rest: str) -> Op:
        """Parse an operation without regions; ``rest`` is its text after the name."""
        rest, strings = tx.hide_strings(rest)
        if name == "arith.constant":
            head, tail = tx.split_types(rest)
            t = (tx.types_in(tail) or [Type("i1")])[0]
            if strings:
                head = head.replace("\x000\x00", f'"{strings[0]}"')
            return Op(name, [], [], [], [t], {"value": tx.constant(head, t)})
        if name in ("cf.br", "cf.cond_br"):
            targets = []
            for label, inner in _TARGET.findall(rest):
                targets.append((label, self.uses(inner.split(" : ")[0])))
            args = self.uses(rest.split("^")[0])
            return Op(name, args, [], [], [], {"targets": targets})
        head, tail = tx.split_types(rest)
        types, rtypes = _types(name, tail)
        return Op(name, self.uses(head), types, [], rtypes, _attributes(name, head, tail, strings))


def _attributes(name: str, head: str, tail: str, strings: list[str]) -> dict[str, Any]:
    """Parse the attributes of an operation without regions.

    Args:
        name: Name of the operation.
        head: Its text before the types, with literals hidden.
        tail: The text of its types.
        strings: The contents of the literals.

    Returns:
        The attributes by name; ``word`` is the first word of the text, ``groups`` the number of values in each pair of
        square brackets.
    """
    attrs = tx.attributes(head, strings)
    attrs["strings"] = strings
    word = re.match(r"[a-z_]\w*", head)
    attrs["word"] = word.group() if word else ""
    callee = re.search(r"@(\x00\d+\x00|[\w.$\-]+)", head)
    if callee:
        attrs["callee"] = callee.group(1)
        if callee.group(1)[0] == "\x00":
            attrs["callee"] = strings[int(callee.group(1).strip("\x00"))]
    groups = re.findall(r"\[([^\]]*)\]", head)
    attrs["groups"] = [len(tx.VALUE.findall(g)) for g in groups]
    if name == "tt.dot_scaled":
        scales = _SCALED.match(head)
        assert scales
        attrs["scales"] = [bool(g) for g in scales.groups()]
    elif name == "tt.reshape":
        attrs["reorder"] = "allow_reorder" in head
    elif name == "tt.descriptor_reduce":
        attrs["unsigned"] = "xui" in tail
    return attrs


def _types(name: str, tail: str) -> tuple[list[Type], list[Type]]:
    """Parse the types of an operation without regions.

    Args:
        name: Name of the operation.
        tail: The text of its types.

    Returns:
        The types of the operands, as far as they are written, and the types of the results.
    """
    for arrow in ("->", " to "):
        if arrow in tail:
            ins, _, outs = tail.partition(arrow)
            types, rtypes = tx.types_in(ins), tx.types_in(outs)
            break
    else:
        types = tx.types_in(tail)
        rtypes = types[:1] if name in _SAME_AS_FIRST else types[-1:]
    if name in ("arith.cmpi", "arith.cmpf"):
        rtypes = [Type("i1", types[0].shape)]
    elif name == "tt.load" and types:
        p = types[0].pointee
        assert p
        rtypes = [p if p.shape else Type(p.elem, types[0].shape, p.pointee)]
    elif name in ("tt.make_tensor_descriptor", "tt.make_tensor_ptr"):
        rtypes = [Type("desc", (), types[-1])]
    elif name == "arith.addui_extended":
        rtypes = [types[0], types[-1]]
    return types, rtypes


def parse(text: str, *, fp_fusion: bool = True) -> Module:
    """Parse the text of a TTIR module.

    Args:
        text: The module as the compiler prints it, with or without locations.
        fp_fusion: The launch option ``enable_fp_fusion``: contract ``a * b + c`` to one rounding.

    Returns:
        The module. Launches do not change its meaning, so that it may be cached.

    Raises:
        TtirError: the text is not a module.
    """
    return _Parser(text).module(fp_fusion)
