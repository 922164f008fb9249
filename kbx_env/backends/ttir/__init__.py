"""Execute Triton TTIR on numpy, without a GPU."""

from .errors import DeviceAssert, OutOfBounds, TtirError, Unsupported
from .graph import Module
from .launch import launch
from .memory import Meter, Region
from .parser import parse

__all__ = ["DeviceAssert", "Meter", "Module", "OutOfBounds", "Region", "TtirError", "Unsupported", "launch", "parse"]
