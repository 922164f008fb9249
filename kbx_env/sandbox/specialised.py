"""Compiles one specialisation of a kernel to TTIR, in the process of a submission and in the one that is trusted."""

from __future__ import annotations

import hashlib
import inspect
import math
import re
import threading
from collections.abc import Mapping
from typing import Any

import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compiler
from triton.compiler.code_generator import CodeGenerator
from triton.language.core import base_type, base_value, is_builtin
from triton.language.semantic import TritonSemantic
from triton.runtime.jit import JITCallable

_PLAIN = (bool, int, float, str, tuple, list, base_value, base_type, tl.dtype, tl.constexpr)
"""Types of compile-time values whose methods a kernel may call."""


class ForeignCall(Exception):
    """A kernel calls Python code that is not Triton's while it is compiled."""


def guard_compiler() -> None:
    """Keep the compiler from calling Python functions that are neither Triton's nor arithmetic (this process, for good).

    Triton calls whatever a kernel names, such as a function of a module, and it calls it as the compiler, whose files and
    processes are not the submission's.
    """
    plain = CodeGenerator.call_Function

    def call(generator: Any, node: Any, fn: Any, args: Any, kws: Any) -> Any:
        if not _harmless(fn) and fn not in generator.builtin_namespace.values():
            raise ForeignCall(f"a kernel calls {str(getattr(fn, '__qualname__', type(fn).__name__))[:60]}, which is not Triton's")
        return plain(generator, node, fn, args, kws)

    CodeGenerator.call_Function = call


def quicken_compiler() -> None:
    """Have the compiler parse a function once, and describe equal block types once (this process, for good).

    It parses each function for every kernel that calls it, and makes a type for every value: a quarter of its time. It also
    computes integers a second time to assert that none overflows, and drops that unless the kernel is compiled for debugging:
    another eighth. The TTIR stays the same.
    """
    parse, describe = JITCallable.parse, tl.block_type.__init__
    check_overflow = TritonSemantic.binary_op_sanitize_overflow_impl
    trees: dict[str, Any] = {}
    described: dict[tuple[Any, ...], dict[str, Any]] = {}

    def parse_once(function: Any) -> Any:
        text = function._src
        if text not in trees:
            trees[text] = parse(function)
        return trees[text]

    def describe_once(block: Any, element_ty: Any, shape: Any) -> None:
        sizes = [s.value if isinstance(s, tl.constexpr) else s for s in shape]
        key = (element_ty.name, *sizes) if type(element_ty) is tl.dtype and all(type(s) is int for s in sizes) else None
        if key in described:
            vars(block).update(described[key], element_ty=element_ty, shape=_copied(described[key]["shape"]))
            return
        describe(block, element_ty, shape)
        if key is not None:
            described[key] = {**vars(block), "shape": _copied(block.shape)}

    def check_if_asserted(semantic: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if semantic.builder.options.debug:
            check_overflow(semantic, lhs, rhs, binary_op)

    TritonSemantic.binary_op_sanitize_overflow_impl = check_if_asserted
    JITCallable.parse = parse_once
    tl.block_type.__init__ = describe_once


def _copied(shape: Any) -> Any:
    """Return a copy of a shape as Triton keeps it: a kernel can assign to its elements."""
    copied = object.__new__(type(shape))
    vars(copied).update(vars(shape), values=list(shape.values))
    return copied


def _harmless(fn: Any) -> bool:
    """Return whether a function may be called while a kernel is compiled."""
    if isinstance(fn, JITCallable) or is_builtin(fn):
        return True
    owner = getattr(fn, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        return isinstance(owner, _PLAIN) or (isinstance(owner, type) and issubclass(owner, _PLAIN))
    if isinstance(fn, type) and issubclass(fn, _PLAIN):
        return True
    module = getattr(fn, "__module__", None) or ""
    return module.startswith("triton.language") or getattr(math, getattr(fn, "__name__", ""), None) is fn


_CONTEXTS: dict[str, Any] = {}
"""The compiler's context for each kind of GPU, for ``context_of``."""


def context_of(backend: Any, target: GPUTarget) -> Any:
    """Return the context in which kernels are compiled: the same for all kernels of a process and, made before, of its forks.

    To make one takes 5 ms. It holds types and constants that kernels share, but nothing that depends on a kernel.

    Args:
        backend: Triton's compiler for the target.
        target: the GPU.
    """
    if target.backend not in _CONTEXTS:
        context = _CONTEXTS[target.backend] = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
    return _CONTEXTS[target.backend]


class _ThreadContexts:
    """Stands for the compiler's module ``ir`` where kernels are compiled from the source to the binary."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(ir, name)

    def context(self) -> Any:
        """Return the context of this thread."""
        if not hasattr(self._of_thread, "context"):
            self._of_thread.context = ir.context()
            ir.load_dialects(self._of_thread.context)
        return self._of_thread.context

    def load_dialects(self, context: Any) -> None:
        """Load Triton's dialects into a context, unless it is this thread's, which has them."""
        if context is not getattr(self._of_thread, "context", None):
            ir.load_dialects(context)


def keep_contexts() -> None:
    """Have each thread compile all its kernels for a GPU in one context, which takes 5 ms to make (this process, for good)."""
    compiler.ir = _ThreadContexts()


def ttir_of(source: ASTSource, backend: Any, options: Any, target: GPUTarget) -> str:
    """Compile a specialised kernel to TTIR.

    Args:
        source: function, signature, constants and attributes.
        backend: Triton's compiler for the target.
        options: its options.
        target: the GPU.

    Returns:
        The text.
    """
    context = context_of(backend, target)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    try:
        module = source.make_ir(target, options, codegen, modules, context)
    except TypeError:  # the target became an argument in triton 3.5
        module = source.make_ir(options, codegen, modules, context)  # type: ignore[call-arg]
    return str(stages["ttir"](module, {"target": target, **options.__dict__}))


_DIVISOR = " {tt.divisibility = 16 : i32}"
"""How TTIR says of a parameter that Triton knows it to be divisible by 16."""
_HEAD = re.compile(r"(?m)^  tt\.func public @\w+\((%.*)\) attributes ")


def with_divisors(text: str, signature: Mapping[str, Any], attrs: Mapping[Any, Any]) -> str | None:
    """Return the TTIR of a kernel for parameters of other divisibility.

    No pass before TTIR looks at divisibility, so nothing but the list of parameters differs.

    Args:
        text: the TTIR of the same specialisation with other ``attrs``.
        signature: types of the kernel's parameters.
        attrs: properties of parameters, by position.

    Returns:
        The text; ``None`` if it must be compiled: a parameter is a tuple or a descriptor, or has another property.
    """
    head = _HEAD.search(text)
    if head is None or not all(isinstance(kind, str) and not kind.startswith("tensordesc") for kind in signature.values()):
        return None
    if any(list(map(list, pairs)) not in ([], [["tt.divisibility", 16]]) for pairs in attrs.values()):
        return None
    passed = [i for i, kind in enumerate(signature.values()) if kind != "constexpr"]
    parameters = head[1].replace(_DIVISOR, "").split(", %")
    if len(parameters) != len(passed):
        return None
    for k, i in enumerate(passed):
        if attrs.get((i,)):
            parameters[k], found = re.subn(r"^(%?\w+: \S+)(?= loc\()", rf"\1{_DIVISOR}", parameters[k])
            if not found:
                return None
    return text[: head.start(1)] + ", %".join(parameters) + text[head.end(1) :]


def kernel_row(text: str, options: Any) -> dict[str, Any]:
    """Return what the engine needs of a compiled kernel.

    Args:
        text: its TTIR.
        options: compiler options.

    Returns:
        ``text``; ``fused``, whether products and sums may be contracted; the ``options`` of the launch; ``key``, a hash of them.
    """
    fused = bool(getattr(options, "enable_fp_fusion", True))
    chosen = {k: getattr(options, k, None) for k in ("num_warps", "num_stages", "num_ctas", "maxnreg")}
    chosen["enable_fp_fusion"] = fused
    key = hashlib.sha256(f"{chosen} {text}".encode()).hexdigest()[:32]
    return {"key": key, "text": text, "fused": fused, "options": chosen}
