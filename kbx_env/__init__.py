"""kbx_env: a gymnasium environment and a benchmark for writing Triton GPU kernels.

Public API: ``gymnasium.make("kbx/Kernel-v0", ...)`` and ``"kbx/Schedule-v0"``, ``grade``, ``grade_many``, ``load_tasks``,
``Outcome``, ``Policy``, and the classes ``KernelEnv``, ``ScheduleEnv``, ``Episode``, ``Trajectory``.
"""

from __future__ import annotations

import pathlib as _pathlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_root = _pathlib.Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "tasks").is_dir():
    # A clone keeps tasks/, rewards/, baselines/, train/ and eval/ beside the package; installed, they
    # are subpackages. This line makes the clone look like the installation: kbx_env.tasks and so on.
    __path__.append(str(_root))

if TYPE_CHECKING:
    from kbx_env.baselines.policy import Policy as Policy
    from kbx_env.envs.episode import Episode as Episode
    from kbx_env.envs.episode import Trajectory as Trajectory
    from kbx_env.envs.kernel_env import KernelEnv as KernelEnv
    from kbx_env.envs.schedule_env import ScheduleEnv as ScheduleEnv
    from kbx_env.executor.batch import grade_many as grade_many
    from kbx_env.executor.direct import grade as grade
    from kbx_env.outcome import Outcome as Outcome
    from kbx_env.spec.catalog import load_tasks as load_tasks

_LAZY = {
    "grade": "kbx_env.executor.direct",
    "grade_many": "kbx_env.executor.batch",
    "load_tasks": "kbx_env.spec.catalog",
    "Outcome": "kbx_env.outcome",
    "KernelEnv": "kbx_env.envs.kernel_env",
    "ScheduleEnv": "kbx_env.envs.schedule_env",
    "Policy": "kbx_env.baselines.policy",
    "Episode": "kbx_env.envs.episode",
    "Trajectory": "kbx_env.envs.episode",
}

__all__ = [
    "Episode", "KernelEnv", "Outcome", "Policy", "ScheduleEnv", "Trajectory", "__version__", "grade", "grade_many", "load_tasks",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # torch and triton take seconds to import: the names that need them are looked up on first use.
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kbx_env' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(n for n in globals() if n.startswith("__"))})


def _register() -> None:
    import gymnasium

    if "kbx/Kernel-v0" not in gymnasium.registry:
        gymnasium.register("kbx/Kernel-v0", entry_point="kbx_env.envs.kernel_env:KernelEnv", max_episode_steps=None)
    if "kbx/Schedule-v0" not in gymnasium.registry:
        gymnasium.register("kbx/Schedule-v0", entry_point="kbx_env.envs.schedule_env:ScheduleEnv", max_episode_steps=None)


_register()
