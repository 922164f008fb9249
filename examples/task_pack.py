"""Write a task of your own into a pack, check it, and grade kernels for it.

    python examples/task_pack.py
"""

import sys
import tempfile
from pathlib import Path

import gymnasium

import kbx_env
from kbx_env.__main__ import main
from kbx_env.spec.catalog import expert_source

if __name__ == "__main__":
    pack = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()) / "mine"
    main(["new-task", "math/swish", "--pack", str(pack)])  # a template that can be graded as it is
    print(sorted(p.relative_to(pack).as_posix() for p in pack.rglob("*.py")))
    print("check-pack ends with", main(["check-pack", str(pack)]))

    env = gymnasium.make("kbx/Kernel-v0", tasks_from=str(pack), split="train", backend="cpu", max_turns=1)
    observation, info = env.reset(seed=0)
    print(observation["task"])
    observation, reward, terminated, truncated, info = env.step(expert_source(observation["task"]))
    print(info["outcome"].verdict, reward)
    env.close()
    print(len(kbx_env.load_tasks(tasks_from=f"builtin,{pack}")), "tasks with those of the benchmark")
