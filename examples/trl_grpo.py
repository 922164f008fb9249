"""GRPO on kernels with TRL's own trainer.

Run it with the folder or the hub name of a model that has a chat template:

    python train/build_model.py out=runs/tiny hidden=64 layers=1 heads=2 vocab=1024   # random weights, for a first try
    python examples/trl_grpo.py runs/tiny
"""

import sys

import torch
from trl import GRPOConfig, GRPOTrainer

from kbx_env.trl import KernelReward, prompts

if __name__ == "__main__":
    args = GRPOConfig("runs/trl", max_steps=3, num_generations=4, per_device_train_batch_size=4, max_completion_length=256,
                      learning_rate=1e-6, scale_rewards="none", logging_steps=1, use_cpu=not torch.cuda.is_available())  # fmt: skip
    trainer = GRPOTrainer(sys.argv[1], KernelReward("default"), args, train_dataset=prompts("train"))
    trainer.train()
    trainer.save_model("runs/trl/final")
