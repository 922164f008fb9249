"""The server app: ``uvicorn kbx_env.integrations.openenv.server:app``. Run one process: its grader has the workers.

Environment variables: those of ``kbx_env.integrations.settings``, and ``KBX_SPLIT`` (``train``), ``KBX_CATEGORY``,
``KBX_MAX_TURNS`` (4) and ``KBX_SESSIONS`` (64, at a time).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from openenv.core.env_server.http_server import create_app

from kbx_env.integrations.openenv.environment import KernelEnvironment
from kbx_env.integrations.openenv.models import KernelAction, KernelObservation
from kbx_env.integrations.settings import grader_of, number_of
from kbx_env.train.warm_grader import WarmGrader


def make_app(settings: Mapping[str, str] | None = None, grader: WarmGrader | None = None) -> Any:
    """Make the app.

    Args:
        settings: environment variables; by default those of the process.
        grader: grades the submissions; by default one by the settings.

    Returns:
        A FastAPI app.

    Raises:
        UsageError: a setting that is not accepted.
    """
    settings = os.environ if settings is None else settings
    grader = grader or grader_of(settings)
    made = functools.partial(
        KernelEnvironment, grader, settings.get("KBX_SPLIT", "train"), settings.get("KBX_CATEGORY"),
        number_of(settings, "KBX_MAX_TURNS", 4),
    )  # fmt: skip
    made()  # a wrong setting ends the start, not the first session
    sessions = number_of(settings, "KBX_SESSIONS", 64)
    return create_app(made, KernelAction, KernelObservation, env_name="kbx_env", max_concurrent_envs=sessions)


def __getattr__(name: str) -> Any:
    """Make ``app`` when a server asks for it, so that importing the module starts nothing."""
    if name == "app":
        globals()["app"] = made = make_app()
        return made
    raise AttributeError(name)
