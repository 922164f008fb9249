"""One launcher for kernels of every signature (CUDA, Triton 3.6).

Triton 3.6 has gcc build a launcher for each signature: four in a grading, 0.2 s of a core each. ``launcher.c`` reads the types of
the arguments when it launches, as Triton's own launcher does from 3.7 on, where nothing is replaced.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from triton.runtime import build

SOURCE = Path(__file__).with_suffix(".c")
NAME = "kbx_launcher"
MOST_ARGUMENTS = 512
"""Arguments of one kernel that ``launcher.c`` takes, those in tuples and the brackets of tuples included."""
_TRITONS_NAME = "__triton_launcher"
_ARGUMENTS = "iiiKKppOOOOOO"
"""What a launcher of Triton 3.6 takes before the kernel's arguments, as ``PyArg_ParseTuple`` names it. Another Triton does not have
this text, and keeps its launcher."""
_LETTERS = {
    "constexpr": "x", "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "L", "u1": "B", "u8": "B", "u16": "H", "u32": "I",
    "u64": "K", "fp16": "e", "bf16": "t", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip


class Letters(str):
    """The types of a kernel's arguments, one letter each, in place of the source of a launcher."""


def letters_of(signature: Iterable[Any]) -> Letters | None:
    """Return the types of a kernel's arguments as ``launcher.c`` reads them.

    Args:
        signature: Triton's types of all parameters, in order; a tuple has a tuple of types.

    Returns:
        The letters; ``None`` if a parameter is a tensor descriptor, for which Triton's own launcher is built, or if there are more
        arguments than ``MOST_ARGUMENTS``.
    """
    found = []
    for kind in signature:
        if isinstance(kind, tuple):
            inner = letters_of(kind)
            letter = None if inner is None else f"({inner})"
        else:
            letter = "P" if kind.startswith("*") else _LETTERS.get(kind)
        if letter is None:
            return None
        found.append(letter)
    letters = Letters("".join(found))
    return letters if len(letters) <= MOST_ARGUMENTS else None


def build_launcher(**options: Any) -> Any:
    """Build ``launcher.c``, or load it from Triton's cache.

    Args:
        options: folders and libraries, as ``triton.runtime.build.compile_module_from_src`` takes them.

    Returns:
        The module.
    """
    return build.compile_module_from_src(src=SOURCE.read_text(), name=NAME, **options)


def install() -> None:
    """Have Triton launch kernels by ``launcher.c`` in this process, where Triton would build a launcher for each signature.

    To be called before a submission is loaded: the module is built now, or comes from the cache.
    """
    driver: Any = importlib.import_module("triton.backends.nvidia.driver")
    if getattr(driver, "_BASE_ARGS_FORMAT", None) != _ARGUMENTS:
        return
    source_of: Callable[..., str] = driver.make_launcher
    compiled: Callable[..., Any] = driver.compile_module_from_src
    launch = build_launcher(library_dirs=driver.library_dirs(), include_dirs=driver.include_dirs, libraries=driver.libraries).launch

    def make_launcher(constants: Any, signature: Any, tensordesc_meta: Any) -> str:
        letters = letters_of(signature.values())
        return source_of(constants, signature, tensordesc_meta) if letters is None else letters

    def compile_module_from_src(src: str, name: str, **options: Any) -> Any:
        if name == _TRITONS_NAME and isinstance(src, Letters):
            return types.SimpleNamespace(launch=functools.partial(launch, src.encode()))
        return compiled(src=src, name=name, **options)

    driver.make_launcher, driver.compile_module_from_src = make_launcher, compile_module_from_src
