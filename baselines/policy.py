"""What a policy is, and how one is made from its name on a command line."""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kbx_env.envs.episode import Episode, Trajectory
from kbx_env.errors import UnknownName, UsageError
from kbx_env.spec.task import Task

if TYPE_CHECKING:
    from kbx_env.baselines.llm.access import Access

_HERE = pathlib.Path(__file__).parent


@dataclass(frozen=True)
class Needs:
    """What a policy uses besides the task's text: methods that see verdicts are not compared to those that do not."""

    grader_feedback: bool = False
    """Submits to the grader on the way and reads the verdicts."""
    own_tests: bool = False
    """Runs scripts of its own in the sandbox."""


@runtime_checkable
class Policy(Protocol):
    """Answers an observation with kernel source.

    Optional members matter to reports: ``samples(task) -> int``, how many answers are graded (default 1);
    ``repeatable = True``, when the policy answers alike every time at no cost (a resumed report may then ask it again);
    ``concurrency``, how many answers may be asked for at once (default 1); ``needs``, see `Needs`.
    """

    name: str

    def act(self, observation: Mapping[str, Any]) -> str | None:
        """Source text, or ``None`` where the policy has no answer.

        Args:
            observation: at least ``task`` (id), ``prompt``, ``feedback`` and ``turn``; in reports ``sample`` too.

        Raises:
            NoAnswer: no answer, and why.
            ModelError: the model's server failed; the sample stays unknown.
        """


@runtime_checkable
class Episodic(Protocol):
    """A policy that drives its turns itself: it submits, reads verdicts, and hands in one source at the end."""

    name: str
    needs: Needs

    def run(self, task: Task, env: Episode) -> Trajectory:
        """Solve a task.

        Raises:
            ModelError: the model's server failed; the sample stays unknown.
        """


AnyPolicy = Policy | Episodic


def policies() -> tuple[str, ...]:
    """Names of the policies in ``baselines/``: one file each, with ``NAME`` and ``build``; dashes stand for underscores."""
    names = (p.stem for p in _HERE.glob("*.py") if not p.stem.startswith("_") and p.stem != "policy")
    return tuple(sorted(n.replace("_", "-") for n in names))


def make_policy(spec: str, access: Access | None = None) -> AnyPolicy:
    """A policy from its name on a command line.

    Args:
        spec: ``expert``, ``replay:FILE.jsonl``, ``claude``, ``claude:MODEL``, ``hf:FOLDER`` or the folder alone,
            ``python:module:attribute``, ...
        access: how policies that ask a model reach it.

    Raises:
        UnknownName: no such policy.
        UsageError: a missing or unusable argument, or no model for a policy that needs one.
    """
    from kbx_env.baselines.llm.access import Access

    name, _, argument = spec.partition(":")
    if name == "python":
        return _users_own(spec, argument)
    if name not in policies():
        if spec and pathlib.Path(spec).is_dir():
            name, argument = "hf", spec
        else:
            known = [*policies(), "python:module:attribute"]
            raise UnknownName("policy", spec, known, f"All: {', '.join(known)}, or the folder of a checkpoint")
    module = importlib.import_module(f"kbx_env.baselines.{name.replace('-', '_')}")
    built: AnyPolicy = module.build(argument or None, access or Access())
    return built


def _users_own(spec: str, argument: str) -> AnyPolicy:
    module, _, attribute = argument.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a script has its own folder on the path, not the user's
    try:
        made = getattr(importlib.import_module(module), attribute)
        policy = made() if isinstance(made, type) else made
    except Exception as e:  # the user's own module may fail in any way
        raise UsageError(f"policy {spec!r}: {type(e).__name__}: {e}; expected python:module:attribute") from e
    if not isinstance(policy, Policy | Episodic):
        raise UsageError(f"policy {spec!r} has no name and act(observation), or name, needs and run(task, env)")
    return policy
