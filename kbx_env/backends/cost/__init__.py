"""Estimates microseconds of kernel launches from counts of their work, without a GPU; these are no measurements."""

from kbx_env.backends.cost.cubin import Resources, resources
from kbx_env.backends.cost.devices import Constants, Device, load, names
from kbx_env.backends.cost.facts import LaunchFacts, count, facts
from kbx_env.backends.cost.model import Estimate, Occupancy, estimate_us, occupancy

__all__ = [
    "Constants", "Device", "Estimate", "LaunchFacts", "Occupancy", "Resources", "count", "estimate_us", "facts",
    "load", "names", "occupancy", "resources",
]  # fmt: skip
