"""The layers of defence by name, so that each can be left out to see what it is worth.

A grader that lacks a layer says so in every outcome, and no reward is ever paid for such an outcome.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from kbx_env.errors import UnknownName


class DefenceLayer(StrEnum):
    """One layer; what it holds back is told in docs/threat_model.md."""

    SCREEN = "screen"
    """Forbidden imports and names in the text."""
    FIREWALL = "firewall"
    """Torch operations that compute raise in the runner."""
    HOST = "host"
    """Doors from tensors to host memory, and the budget of values read back."""
    LOCKDOWN = "lockdown"
    """The audit hook: files, processes, sockets, ctypes, foreign modules."""
    KERNEL = "kernel"
    """Landlock, no capabilities, no network: held by the operating system."""
    SECRET = "secret"
    """Inputs that nobody can know beforehand."""
    CASES = "cases"
    """Many sizes, layouts and parameters instead of one."""
    EFFECTS = "effects"
    """Inputs must be unchanged, results must be new tensors."""
    CONSTANT = "constant"
    """A result that depends on no input is no work."""
    PROVENANCE = "provenance"
    """Results must come out of Triton stores."""
    CONTRACT = "contract"
    """Quantized tasks: integer operands must reach the result."""
    PROOF = "proof"
    """CUDA: the same source passes on the CPU tier first, where the grader executes the launches."""
    ABLATION = "ablation"
    """CUDA: without the launches the result must be wrong."""
    REPROBE = "reprobe"
    """The firewall must still stand after the run."""


def chosen(names: Iterable[str]) -> frozenset[DefenceLayer]:
    """The layers of these names.

    Raises:
        UnknownName: not a layer.
    """
    known = [d.value for d in DefenceLayer]
    for name in names:
        if name not in known:
            raise UnknownName("defence", name, known)
    return frozenset(DefenceLayer(n) for n in names)
