"""An episode of several turns with gymnasium: each turn reads the verdict on the last one.

    python examples/episode.py
"""

from pathlib import Path

import gymnasium

import kbx_env  # noqa: F401 (registers the environments)

GOOD = (Path(__file__).parent / "kernels/exp_sqrt.py").read_text()
ANSWERS = ("no kernel", GOOD.replace("0.5", "0.25"), f"Here it is:\n```python\n{GOOD}```")
"""What a language model could answer; the last one is prose around a block of source."""

if __name__ == "__main__":
    env = gymnasium.make("kbx/Kernel-v0", task="math/exp_sqrt", backend="cpu", reward="default", max_turns=4)
    observation, info = env.reset(seed=0)
    print(observation["prompt"].splitlines()[0])
    for answer in ANSWERS:
        observation, reward, terminated, truncated, info = env.step(answer)
        print(f"turn {observation['turn']}: {info['outcome'].verdict}, reward {reward:.2f}, solved {terminated}")
        print("   ", observation["feedback"].splitlines()[1])
        if terminated or truncated:
            break
    env.close()
