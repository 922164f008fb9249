"""Search the block sizes and warps of an expert kernel.

    python examples/schedule_env.py

An action is a move of each of eight slots; the reward on the CPU contains an estimated time, on CUDA a measured one.
"""

import gymnasium
import numpy as np

from kbx_env.envs.schedule_env import ScheduleEnv

if __name__ == "__main__":
    env = gymnasium.make("kbx/Schedule-v0", task="math/softmax", backend="cpu", max_turns=3, targets=())
    observation, info = env.reset(seed=0)
    print(info["task"], "observation of", observation.shape[0], "numbers")
    larger, fewer_warps = np.array(ScheduleEnv.DEFAULT), np.array(ScheduleEnv.DEFAULT)
    larger[0] += 1  # the first block size, one step up
    fewer_warps[4] -= 1
    for name, action in {"expert": ScheduleEnv.DEFAULT, "larger block": larger, "fewer warps": fewer_warps}.items():
        observation, reward, terminated, truncated, info = env.step(action)
        print(f"{name}: {info['outcome'].verdict}, changed {info['settings']}, reward {reward:.2f}")
    print("episode ended:", terminated)
    env.close()
