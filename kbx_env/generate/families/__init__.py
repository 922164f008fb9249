"""The families of generated tasks. A module here has ``FAMILIES``: name -> function from a random source to a draft."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from kbx_env.generate.drafts import Draft

Family = Callable[[random.Random, int], Draft]
"""Draws a draft of about a difficulty from 1 to 5."""


def families() -> Mapping[str, Family]:
    """Return all families by name."""
    from kbx_env.generate.families import backward, elementwise, indexing, optimizers, products, rows, scans

    found: dict[str, Family] = {}
    for module in (elementwise, rows, scans, indexing, products, optimizers, backward):
        found |= module.FAMILIES
    return found
