"""The parts for RLlib: the envs, the network as a module, and a learner that leaves masked steps out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from gymnasium import VectorizeMode
from gymnasium.spaces import MultiDiscrete
from kbx_env.train.ppo_envs import make_envs, side_by_side
from kbx_env.train.schedule_policy import ScheduleNet
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import TorchMultiCategorical
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule

from kbx_env.envs.schedule import SLOTS


class ScheduleModule(TorchRLModule, ValueFunctionAPI):
    """``ScheduleNet`` as RLlib's module; ``model_config`` has its ``hiddens`` and ``still``, the action space has its reach."""

    def setup(self) -> None:
        """Build the network."""
        assert isinstance(self.model_config, dict)
        assert isinstance(self.action_space, MultiDiscrete)
        moves = int(self.action_space.nvec[0])
        # ``still`` counts for a new module only: a restored one gets all weights, biases too, from the checkpoint afterwards.
        self.net = ScheduleNet(self.model_config["hiddens"], moves // 2, self.model_config.get("still", 0.0))
        self.action_dist_cls = TorchMultiCategorical.get_partial_dist_cls(  # type: ignore[misc]
            space=self.action_space, input_lens=[moves] * len(SLOTS)
        )

    def _forward(self, batch: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self.net.logits(batch[Columns.OBS])}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Any:
        """Return the values of a batch, (n,) float32."""
        return self.net.values(batch[Columns.OBS])


class WithoutMasked(ConnectorV2):
    """Drops episodes with a masked step: nothing is learnt from a fault of the machine."""

    def __call__(self, *, batch: Any, episodes: list[Any], **more: Any) -> Any:
        """Remove episodes from ``episodes`` in place, and return the batch unchanged."""
        kept = [e for e in episodes if not any(i.get("masked") for i in e.get_infos())]
        # RLlib fails on an empty batch, so one episode stays: the advantage of a single step is 0 once it is centred.
        episodes[:] = kept or episodes[:1]
        return batch


class _Learner(PPOTorchLearner):
    def build(self) -> None:
        super().build()
        assert self._learner_connector is not None
        self._learner_connector.prepend(WithoutMasked())


def configure(
    env: Mapping[str, Any], *, hiddens: list[int], still: float, batch: int, max_turns: int, minibatch: int, epochs: int, lr: float,
    entropy: float, clip: float, seed: int,
) -> PPOConfig:  # fmt: skip
    """Return the configuration of the algorithm.

    Args:
        env: ``file``, ``workers``, ``grade`` and ``options`` of ``ppo_envs.Together``.
        hiddens: widths of the layers.
        still: initial logit of the moves that leave a slot as it is.
        batch: steps an iteration.
        max_turns: steps an episode.
        minibatch: steps an update.
        epochs: passes over a batch.
        lr: learning rate of Adam.
        entropy: weight of the entropy bonus.
        clip: PPO's clip range.
        seed: seed of weights, sampling and order of tasks.

    Returns:
        The configuration; ``build_algo`` makes the algorithm.
    """
    from ray.tune.registry import register_env

    envs = side_by_side(batch, max_turns)
    register_env("kbx-schedule", make_envs)
    logging.getLogger("ray.rllib").setLevel(logging.ERROR)  # silences a note about its new API, which is used here
    config = PPOConfig()
    config.environment("kbx-schedule", env_config=dict(env))
    # The envs run in this process: gradings take most of the time and have processes of their own.
    config.env_runners(
        num_env_runners=0, num_envs_per_env_runner=envs, rollout_fragment_length="auto",
        gym_env_vectorize_mode=VectorizeMode.VECTOR_ENTRY_POINT,
    )  # fmt: skip
    # An episode is a few gradings, each with its own reward: no discount, no bootstrapping.
    config.training(
        train_batch_size_per_learner=batch, minibatch_size=min(minibatch, batch), num_epochs=epochs, lr=lr, gamma=1.0,
        lambda_=1.0, entropy_coeff=entropy, clip_param=clip, grad_clip=1.0, learner_class=_Learner,
    )  # fmt: skip
    made = {"hiddens": list(hiddens), "still": still}
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=ScheduleModule, model_config=made))
    config.learners(num_learners=0, num_gpus_per_learner=0)
    config.debugging(seed=seed, log_level="ERROR")
    return config
