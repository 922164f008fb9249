"""The configurations of experiments are accepted by the scripts that they are for."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl")
from kbx_env.train import grpo, grpo_setup, sft  # noqa: E402
from kbx_env.train.settings import read  # noqa: E402

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.mark.parametrize("study", ["small_models", "noisy_demonstrations"])
def test_configurations_of_sft(study: str, tmp_path: Path) -> None:
    from trl import SFTConfig

    s = read(sft.Settings, [str(EXPERIMENTS / study / "sft.yaml"), "model=m", "data=d", f"out={tmp_path}"])
    assert isinstance(sft._config(s), SFTConfig)
    sft._adapter(s)


def test_configuration_of_grpo(tmp_path: Path) -> None:
    from trl import GRPOConfig

    file = EXPERIMENTS / "noisy_demonstrations/grpo.yaml"
    s = read(grpo.Settings, [str(file), "model=m", f"out={tmp_path}", "trainer.use_cpu=true"])
    grpo_setup.check(s)
    assert isinstance(grpo_setup.config_of_run(s), GRPOConfig)
