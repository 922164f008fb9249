"""Train a tiny model with GRPO until it writes correct kernels: minutes on two CPU cores, without a GPU, network or account.

    python examples/learn.py [--seed 0] [--out runs/learn]

The model begins with random weights. It is taught four kernels in which half of some places are faulty, so that few of its
answers are right. Then TRL's own trainer pays it for what the grader says. `OUT/curve.png` shows the reward.
"""

import argparse
import sys
from pathlib import Path

import torch
from trl import GRPOConfig, GRPOTrainer

from kbx_env import jsonl
from kbx_env.trl import KernelReward, prompts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # experiments/ is not installed
from experiments.learning_curve import beginner, curve  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("runs/learn"))
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=120, help="steps of GRPO, 16 answers to each task")
parser.add_argument("--sft-steps", type=int, default=300)
parser.add_argument("--tasks", default=beginner.TASKS)

if __name__ == "__main__":
    a = parser.parse_args()
    if a.out.exists():
        parser.error(f"{a.out} exists; remove it, or give another folder by --out")
    curve.prepare()
    torch.set_num_threads(1)  # for so small a model more threads are slower
    model = beginner.beginner(a.out / "beginner", a.seed, tasks=a.tasks, steps=a.sft_steps)
    data = prompts("train", tasks=a.tasks, backend="cpu")
    args = GRPOConfig(
        str(a.out / "grpo"), seed=a.seed, max_steps=a.steps, num_generations=16, per_device_train_batch_size=16 * len(data),
        max_completion_length=80, learning_rate=1e-3, lr_scheduler_type="linear", scale_rewards="none", loss_type="dr_grpo",
        adam_epsilon=1e-6, adam_beta2=0.99, max_grad_norm=0.05, logging_steps=1, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=True, bf16=False,
    )  # fmt: skip
    # grading_seed makes a run repeatable; in earnest leave it out, and inputs are secret and new in every grading.
    with KernelReward("default", "cpu", workers=2, grading_seed=a.seed, store=a.out / "gradings.sqlite") as reward:
        trainer = GRPOTrainer(str(model), reward, args, train_dataset=data)
        curve.only_ours(trainer, curve.Curve(a.out, a.steps))
        trainer.train()
    trainer.save_model(str(a.out / "final"))
    print(curve.draw([a.out / curve.FILE], a.out / "curve.png"))
    print(curve.summary(jsonl.read(a.out / curve.FILE)))
