"""The interface of policies, and their construction from a name on a command line."""

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
    """The information that a policy uses besides the task's text; reports show it, as it makes policies unequal."""

    grader_feedback: bool = False
    """Whether it submits sources to the grader and reads the verdicts before it hands in its answer."""
    own_tests: bool = False
    """Whether it runs its own scripts in the sandbox."""


@runtime_checkable
class Policy(Protocol):
    """Answers an observation with kernel source.

    Reports also use these optional members:

    - ``samples(task) -> int``: the number of answers to a task that are graded; default 1.
    - ``repeatable``: ``True`` if the policy gives the same answer every time at no cost, so that a resumed report may
      ask it again; default ``False``.
    - ``answered``: the ids of the tasks for which it has answers, as a set; ``--answered`` leaves the others out.
    - ``concurrency``: the number of answers that may be requested at the same time; default 1.
    - ``needs``: see ``Needs``.

    Attributes:
        name: the policy's name in reports.
    """

    name: str

    def act(self, observation: Mapping[str, Any]) -> str | None:
        """Answer an observation.

        Args:
            observation: at least ``task`` (id), ``prompt``, ``feedback`` and ``turn``; in reports also ``sample``.

        Returns:
            The source text, or ``None`` where the policy has no answer.

        Raises:
            NoAnswer: the policy has no answer; with the reason.
            ModelError: the model's server failed. The sample counts as unknown, not as wrong.
        """


@runtime_checkable
class Episodic(Protocol):
    """A policy that runs a whole episode: it may submit sources and read verdicts, and hands in one source at the end.

    Attributes:
        name: the policy's name in reports.
        needs: the information that it uses besides the task's text.
    """

    name: str
    needs: Needs

    def run(self, task: Task, env: Episode) -> Trajectory:
        """Solve a task.

        Args:
            task: the task.
            env: grades sources and runs scripts.

        Returns:
            The source that is handed in, or the reason why there is none.

        Raises:
            ModelError: the model's server failed. The sample counts as unknown, not as wrong.
        """


AnyPolicy = Policy | Episodic


def policies() -> tuple[str, ...]:
    """Return the names of the policies in ``baselines/``, sorted.

    Each is one file with ``NAME`` and ``build``. The name is that of the file, with dashes for underscores.
    """
    names = (p.stem for p in _HERE.glob("*.py") if not p.stem.startswith("_") and p.stem != "policy")
    return tuple(sorted(n.replace("_", "-") for n in names))


def make_policy(spec: str, access: Access | None = None) -> AnyPolicy:
    """Make a policy from its name on a command line.

    Args:
        spec: the name, with an argument after a colon where the policy takes one: ``expert``, ``replay:FILE.jsonl``,
            ``claude``, ``claude:MODEL``, ``hf:FOLDER`` or the folder alone, ``python:module:attribute``, ...
        access: how policies that ask a model reach it.

    Returns:
        The policy.

    Raises:
        UnknownName: no such policy.
        UsageError: a missing or invalid argument, or no model for a policy that needs one.
    """
    from kbx_env.baselines.llm.access import Access

    name, _, argument = spec.partition(":")
    if name == "python":
        return _imported(spec, argument)
    if name not in policies():
        if spec and pathlib.Path(spec).is_dir():
            name, argument = "hf", spec
        else:
            known = [*policies(), "python:module:attribute"]
            raise UnknownName("policy", spec, known, f"All: {', '.join(known)}, or the folder of a checkpoint")
    module = importlib.import_module(f"kbx_env.baselines.{name.replace('-', '_')}")
    built: AnyPolicy = module.build(argument or None, access or Access())
    return built


def _imported(spec: str, argument: str) -> AnyPolicy:
    """Make a policy of the user's from a module on the path or in the working directory."""
    module, _, attribute = argument.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # Python puts a script's folder on the path, not the working directory
    try:
        value = getattr(importlib.import_module(module), attribute)
        policy = value() if isinstance(value, type) else value
    except Exception as e:  # the user's own module may fail in any way
        raise UsageError(f"policy {spec!r}: {type(e).__name__}: {e}; expected python:module:attribute") from e
    if not isinstance(policy, Policy | Episodic):
        raise UsageError(
            f"policy {spec!r} is no policy; it must have name and act(observation), or name, needs and run(task, env)"
        )
    return policy
