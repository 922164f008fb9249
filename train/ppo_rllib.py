"""What RLlib needs to know: the env with its record, the network as a module, and a learner that leaves masked steps out."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import MultiDiscrete
from kbx_env.train.schedule_policy import ScheduleNet
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import TorchMultiCategorical
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule

from kbx_env.schedule import SLOTS
from kbx_env.schedule_env import ScheduleEnv


class Recorded(gymnasium.Wrapper[np.ndarray, np.ndarray, np.ndarray, np.ndarray]):
    """Writes a line a grading to a file that all env runners share; RLlib is told only whether a step is masked."""

    def __init__(self, env: ScheduleEnv, file: str | Path) -> None:
        super().__init__(env)
        self._inner, self._file = env, Path(file)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """As the env's."""
        return self.env.reset(seed=seed, options=options)[0], {"masked": False}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """As the env's, and a line."""
        before = self._inner.gradings
        seen, reward, terminated, truncated, info = self.env.step(action)
        row = {
            "task": info["task"], "settings": info["settings"], "verdict": str(info["outcome"].verdict),
            "correct": info["outcome"].correct, "masked": info["masked"], "value": info["value"],
            "default": self._inner.default(info["task"]),
        }  # fmt: skip
        if not info["outcome"].correct:
            row["message"] = info["outcome"].message[:300]
        row["gradings"] = self._inner.gradings - before  # with the default's own, where it was not known
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        # One write to a file opened for appending: lines of several processes do not mix.
        fd = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
        return seen, reward, terminated, truncated, {"masked": info["masked"]}


def make_env(options: Mapping[str, Any]) -> Recorded:
    """An env from ``env_config``: ``file`` of the record, the rest is ``ScheduleEnv``'s."""
    given = dict(options)
    file = given.pop("file")
    return Recorded(ScheduleEnv(**given), file)


class ScheduleModule(TorchRLModule, ValueFunctionAPI):
    """``ScheduleNet`` as RLlib's module; ``model_config`` has its ``hiddens`` and ``still``, the action space tells its reach."""

    def setup(self) -> None:
        """Build the network."""
        assert isinstance(self.model_config, dict)
        assert isinstance(self.action_space, MultiDiscrete)
        moves = int(self.action_space.nvec[0])
        # Only where a module is made: one that is restored takes its weights, bias included, from the checkpoint afterwards.
        self.net = ScheduleNet(self.model_config["hiddens"], moves // 2, self.model_config.get("still", 0.0))
        self.action_dist_cls = TorchMultiCategorical.get_partial_dist_cls(  # type: ignore[misc]
            space=self.action_space, input_lens=[moves] * len(SLOTS)
        )

    def _forward(self, batch: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self.net.logits(batch[Columns.OBS])}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Any:
        """(n,) float32."""
        return self.net.values(batch[Columns.OBS])


class WithoutMasked(ConnectorV2):
    """Takes episodes with a masked step out of the batch: a fault of the machine teaches nothing."""

    def __call__(self, *, batch: Any, episodes: list[Any], **more: Any) -> Any:
        """The batch as it is; ``episodes`` loses some."""
        kept = [e for e in episodes if not any(i.get("masked") for i in e.get_infos())]
        # RLlib cannot learn from nothing; the advantage of a single step is 0 once it is centred.
        episodes[:] = kept or episodes[:1]
        return batch


class _Learner(PPOTorchLearner):
    def build(self) -> None:
        super().build()
        assert self._learner_connector is not None
        self._learner_connector.prepend(WithoutMasked())


def configure(
    env: Mapping[str, Any], *, hiddens: list[int], still: float, workers: int, batch: int, minibatch: int, epochs: int, lr: float,
    entropy: float, clip: float, seed: int, timeout: float,
) -> PPOConfig:  # fmt: skip
    """The algorithm's configuration.

    Args:
        env: options of ``make_env``.
        hiddens: widths of the layers.
        still: what the logits of not moving begin with.
        workers: env runners in processes of their own; 0 grades in this process.
        batch: steps an iteration.
        minibatch: steps an update.
        epochs: passes over a batch.
        lr: learning rate of Adam.
        entropy: weight of the entropy bonus.
        clip: PPO's clip range.
        seed: of weights, sampling and order of tasks.
        timeout: seconds that one iteration's gradings may take.
    """
    from ray.tune.registry import register_env

    register_env("kbx-schedule", make_env)
    logging.getLogger("ray.rllib").setLevel(logging.ERROR)  # a paragraph on its newer interface, which this is
    config = PPOConfig()
    config.environment("kbx-schedule", env_config=dict(env))
    config.env_runners(
        num_env_runners=workers, num_envs_per_env_runner=1, rollout_fragment_length="auto", sample_timeout_s=timeout
    )
    # An episode is a few gradings, and all of them are paid in full: no discount, no bootstrapping.
    config.training(
        train_batch_size_per_learner=batch, minibatch_size=min(minibatch, batch), num_epochs=epochs, lr=lr, gamma=1.0,
        lambda_=1.0, entropy_coeff=entropy, clip_param=clip, grad_clip=1.0, learner_class=_Learner,
    )  # fmt: skip
    made = {"hiddens": list(hiddens), "still": still}
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=ScheduleModule, model_config=made))
    config.learners(num_learners=0, num_gpus_per_learner=0)
    config.fault_tolerance(restart_failed_env_runners=True)
    config.debugging(seed=seed, log_level="ERROR")
    return config
