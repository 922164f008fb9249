"""Execute Triton TTIR on numpy, without a GPU."""

from kbx_env.backends.ttir.errors import (
    Deadlock,
    DecidesOnUnwritten,
    DeviceAssert,
    Finding,
    OutOfBounds,
    TtirError,
    Unsupported,
)
from kbx_env.backends.ttir.frontend.graph import Module
from kbx_env.backends.ttir.frontend.parser import parse
from kbx_env.backends.ttir.interp.launch import Descriptor, launch
from kbx_env.backends.ttir.interp.memory import Extent, Meter, Region
from kbx_env.backends.ttir.interp.perturb import Perturbation
from kbx_env.backends.ttir.interp.slices import operand_slices, store_slices, unknown_access
from kbx_env.backends.ttir.sanitizer.sanitizer import Sanitizer

__all__ = [
    "Deadlock", "DecidesOnUnwritten", "Descriptor", "DeviceAssert", "Extent", "Finding", "Meter", "Module",
    "OutOfBounds", "Perturbation", "Region", "Sanitizer", "TtirError", "Unsupported", "launch", "operand_slices",
    "parse", "store_slices", "unknown_access",
]  # fmt: skip
