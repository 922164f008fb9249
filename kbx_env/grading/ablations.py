"""The defence layers of a grader by name. Each can be left out to measure its effect.

A grader without a layer says so in the manifest of every outcome, and such an outcome never gets a reward.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from kbx_env.errors import UnknownName


class DefenceLayer(StrEnum):
    """One defence layer; docs/threat_model.md lists the attacks that each stops."""

    SCREEN = "screen"
    """Forbidden imports and names in the text are rejected."""
    FIREWALL = "firewall"
    """Torch operations that compute raise an error in the runner."""
    HOST = "host"
    """Access from tensors to host memory is denied, and the number of values read back is limited."""
    LOCKDOWN = "lockdown"
    """The audit hook in the runner denies files, processes, sockets, ctypes and foreign modules."""
    KERNEL = "kernel"
    """The operating system confines the runner: Landlock, no capabilities, no network."""
    SECRET = "secret"
    """Inputs come from a secret seed."""
    CASES = "cases"
    """Many sizes, layouts and parameters are tried instead of one."""
    DERIVED = "derived"
    """Every grading draws cases of its own beside the declared ones."""
    EFFECTS = "effects"
    """Inputs must be unchanged, results must be new tensors."""
    REPEAT = "repeat"
    """CPU tier: a few secret cases are called again on the same memory with other values."""
    CONSTANT = "constant"
    """A result that depends on no input is rejected."""
    PROVENANCE = "provenance"
    """Results must be written by Triton stores."""
    SOURCE = "source"
    """CPU tier: kernels are compiled from the source in a process without the submission's code; else in the submission's."""
    CONTRACT = "contract"
    """Quantized tasks: integer operands must reach the result."""
    PROOF = "proof"
    """CUDA: the same source passes on the CPU tier first, where the grader executes the launches."""
    ABLATION = "ablation"
    """CUDA: without the launches the result must be wrong."""
    REPROBE = "reprobe"
    """The firewall must still stand after the run."""


def chosen(names: Iterable[str]) -> frozenset[DefenceLayer]:
    """Look up layers by name.

    Args:
        names: of layers.

    Returns:
        The layers.

    Raises:
        UnknownName: a name is not that of a layer.
    """
    known = [d.value for d in DefenceLayer]
    for name in names:
        if name not in known:
            raise UnknownName("defence", name, known)
    return frozenset(DefenceLayer(n) for n in names)
