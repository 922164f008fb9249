"""Estimate microseconds of kernel launches from what they do, without a GPU: never a measurement."""

from .cubin import Resources, resources
from .devices import Constants, Device, load, names
from .facts import LaunchFacts, count, facts
from .model import Estimate, Occupancy, estimate_us, occupancy

__all__ = [
    "Constants", "Device", "Estimate", "LaunchFacts", "Occupancy", "Resources", "count", "estimate_us", "facts",
    "load", "names", "occupancy", "resources",
]  # fmt: skip
