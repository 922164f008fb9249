"""The network that chooses schedules, and the trained policy without Ray: ``ScheduleAgent.load(DIR)``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kbx_env.backends import cost
from kbx_env.envs import schedule_features as features
from kbx_env.envs.schedule import MIDDLE, MOVES, REACHES, SLOTS, Template, template
from kbx_env.errors import UsageError
from kbx_env.spec.catalog import load_task

WEIGHTS, ABOUT, FORMAT = "policy.npz", "policy.json", 1
"""Files of a policy, and the version of their format."""
CHECKPOINTS = "checkpoints"
"""Folder of checkpoints, in the folder of a run."""
_NEVER = -1e6
"""Added to the logit of a move that changes nothing. It is finite, so that the entropy has no term 0 times infinity."""


class ScheduleNet(nn.Module):
    """Maps features to logits of each slot's moves and to a value, with two separate stacks of tanh layers."""

    def __init__(self, hiddens: Sequence[int], reach: int = max(MOVES), still: float = 0.0) -> None:
        """Make a network with random weights.

        Args:
            hiddens: widths of the layers.
            reach: longest move, in steps along a slot's choices.
            still: added to the initial bias of the moves that leave a slot as it is.
        """
        super().__init__()
        self.reach = reach
        self.policy = _stack(len(features.NAMES), hiddens, len(SLOTS) * (2 * reach + 1))
        with torch.no_grad():
            self.policy[-1].bias.view(len(SLOTS), -1)[:, reach] += still  # type: ignore[index, operator, union-attr]
        self.value = _stack(len(features.NAMES), hiddens, 1)

    def logits(self, seen: torch.Tensor) -> torch.Tensor:
        """Return the logits of moves; those of moves that change nothing are very low.

        Args:
            seen: (n, features) float32 features.

        Returns:
            (n, slots * moves) float32.
        """
        legal = seen[..., features.LEGAL].unflatten(-1, (len(SLOTS), len(MOVES)))
        within = legal[..., MIDDLE - self.reach : MIDDLE + self.reach + 1].flatten(-2)
        return self.policy(seen) + (1.0 - within) * _NEVER

    def values(self, seen: torch.Tensor) -> torch.Tensor:
        """Return the expected sum of rewards, (n,) float32, from (n, features) float32 features."""
        return self.value(seen).squeeze(-1)


def _stack(inputs: int, hiddens: Sequence[int], outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hiddens:
        layers += [nn.Linear(inputs, width), nn.Tanh()]
        inputs = width
    last = nn.Linear(inputs, outputs)
    # Initially all moves are about equally likely, and all values are about 0.
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


@dataclass(frozen=True)
class About:
    """How a policy was trained; kept beside its weights."""

    hiddens: tuple[int, ...]
    """Widths of the layers."""
    backend: str
    """``cpu`` or ``cuda``."""
    device: str | None
    """Name of the GPU whose peaks are among the features; ``None``: unknown."""
    max_turns: int
    """Gradings of an episode."""
    idle: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Knobs without a slot, by task."""
    reach: int = max(MOVES)
    """Longest move, in steps along a slot's choices."""


def save_policy(folder: Path, weights: Mapping[str, np.ndarray], about: About) -> None:
    """Write a policy in a format that is read without Ray.

    Args:
        folder: where to write.
        weights: arrays by name.
        about: how it was trained.
    """
    np.savez(folder / WEIGHTS, **{k: np.asarray(v) for k, v in weights.items()})  # type: ignore[arg-type]
    layout = {"format": FORMAT, "features": features.VERSION, "slots": SLOTS, "moves": MOVES}
    (folder / ABOUT).write_text(json.dumps({**layout, **about.__dict__}, indent=1))


def newest(folder: str | Path) -> Path:
    """Return the checkpoint in a folder: the folder itself, or the last checkpoint of a run.

    Args:
        folder: folder of a checkpoint or of a run.

    Returns:
        The checkpoint's folder.

    Raises:
        UsageError: there is none.
    """
    folder = Path(folder)
    if (folder / ABOUT).is_file():
        return folder
    found = sorted(p for p in (folder / CHECKPOINTS).glob("[0-9]*") if p.name.isdigit() and (p / ABOUT).is_file())
    if not found:
        raise UsageError(
            f"no checkpoint of train/ppo.py in {str(folder)!r}: give its out= folder, or one in checkpoints/"
        )
    return found[-1]


class ScheduleAgent:
    """A trained policy that chooses a schedule for a task, greedily, without grading and without Ray.

    A policy that was trained with several gradings an episode answers as for the first one.
    """

    def __init__(self, net: ScheduleNet, about: About) -> None:
        """An agent with a network and the facts about its training."""
        self.net, self.about = net, about
        self._device = cost.load(about.device) if about.device else None

    @classmethod
    def load(cls, checkpoint: str | Path) -> ScheduleAgent:
        """Read a checkpoint, or the newest one of a run's folder.

        Args:
            checkpoint: folder of the checkpoint or of the run.

        Returns:
            The agent.

        Raises:
            UsageError: it is no checkpoint of ``train/ppo.py``, or has other features or slots.
        """
        folder = newest(checkpoint)
        try:
            data: dict[str, Any] = json.loads((folder / ABOUT).read_text())
            wanted = [FORMAT, features.VERSION, list(SLOTS), list(MOVES)]
            if [data.get(k) for k in ("format", "features", "slots", "moves")] != wanted:
                raise UsageError(
                    f"the policy in {str(folder)!r} was trained on other features or slots; train it again"
                )
            idle = {t: tuple(names) for t, names in data["idle"].items()}
            reach = data.get("reach", max(MOVES))  # older checkpoints do not have it
            if reach not in REACHES:
                raise UsageError(f"the policy in {str(folder)!r} has moves of {reach!r} steps; known: {REACHES}")
            about = About(tuple(data["hiddens"]), data["backend"], data["device"], data["max_turns"], idle, reach)
            net = ScheduleNet(about.hiddens, reach)
            with np.load(folder / WEIGHTS, allow_pickle=False) as weights:
                net.load_state_dict({k: torch.from_numpy(weights[k]) for k in weights.files})
        except UsageError:
            raise
        except Exception as e:
            raise UsageError(f"{str(folder)!r} holds no policy of train/ppo.py: {type(e).__name__}: {e}"[:300]) from e
        return cls(net.eval(), about)

    def template(self, task: str) -> Template:
        """Return the task's template, with the slots that the policy knows."""
        return template(load_task(task).id, tuple(sorted(self.about.idle.get(task, ()))), self.about.reach)

    def observe(self, task: str, sizes: str = "published") -> np.ndarray:
        """Return the observation of an env before the first grading.

        Args:
            task: the task's id.
            sizes: the timed sizes, ``published`` or ``held-out``.

        Returns:
            float32 ``(len(NAMES),)``.
        """
        seen = features.static(load_task(task), self.template(task), self.about.backend, self._device, sizes)
        return np.concatenate([seen, features.changing(0.0, None, None, 0.0, 0.0, 1.0)])

    def act(self, seen: np.ndarray) -> np.ndarray:
        """Return the likeliest move of each slot; among equal ones that nearest to the expert.

        Args:
            seen: float32 ``(len(NAMES),)``, an observation.

        Returns:
            int64 ``(len(SLOTS),)``, an action for an env of the same reach.
        """
        with torch.no_grad():
            logits = self.net.logits(torch.from_numpy(seen)[None])[0].reshape(len(SLOTS), -1).numpy()
        order = sorted(range(2 * self.about.reach + 1), key=lambda m: abs(m - self.about.reach))
        return np.array([max(order, key=lambda m, row=row: row[m]) for row in logits], np.int64)  # type: ignore[misc]

    def settings(self, task: str, sizes: str = "published") -> dict[str, int]:
        """Return the knobs that the policy's schedule changes, with their values.

        Args:
            task: the task's id.
            sizes: the timed sizes, ``published`` or ``held-out``.

        Returns:
            Values by the name of the knob.
        """
        return self.template(task).settings(self.act(self.observe(task, sizes)))

    def source(self, task: str, sizes: str = "published") -> str:
        """Return the kernel with the policy's schedule.

        Args:
            task: the task's id.
            sizes: the timed sizes, ``published`` or ``held-out``.

        Returns:
            A Python module.

        Raises:
            UsageError: no such task, or it has no expert.
        """
        return self.template(task).render(self.act(self.observe(task, sizes)))
