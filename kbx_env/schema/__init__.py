"""JSON Schemas (draft 2020-12) of what the project writes: ``outcome.json`` and ``report.json`` beside this module.

``docs/generate.py`` writes ``outcome.json`` from the dataclasses of ``kbx_env.outcome``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kbx_env.errors import UnknownName

NAMES = ("outcome", "report")
"""The schemas. ``outcome`` describes ``Outcome.to_json``; ``report`` describes ``report.json`` and refers to ``outcome``."""


def load(name: str) -> dict[str, Any]:
    """Return a schema.

    Args:
        name: one of ``NAMES``.

    Returns:
        The JSON Schema.

    Raises:
        UnknownName: no such schema.
    """
    if name not in NAMES:
        raise UnknownName("schema", name, NAMES)
    found: dict[str, Any] = json.loads((Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8"))
    return found
