"""Execute Triton TTIR on numpy, without a GPU."""

from .disturb import Disturbance
from .errors import Deadlock, DecidesOnUnwritten, DeviceAssert, Finding, OutOfBounds, TtirError, Unsupported
from .graph import Module
from .launch import Descriptor, launch
from .memory import Extent, Meter, Region
from .parser import parse
from .sanitizer import Sanitizer
from .slices import operand_slices, store_slices, unknown_access

__all__ = [
    "Deadlock", "DecidesOnUnwritten", "Descriptor", "DeviceAssert", "Disturbance", "Extent", "Finding", "Meter", "Module",
    "OutOfBounds", "Region", "Sanitizer", "TtirError", "Unsupported", "launch", "operand_slices", "parse", "store_slices",
    "unknown_access",
]  # fmt: skip
