"""Grade many kernels at a time in worker processes.

    python examples/grade_in_parallel.py
"""

from collections import Counter

import kbx_env
from kbx_env.spec.catalog import expert_source

TASKS = ("activation/relu", "math/abs", "math/add", "math/exp_sqrt")

if __name__ == "__main__":  # worker processes import this file
    pairs = [(task, expert_source(task) or "") for task in TASKS]
    pairs += [(task, "import torch") for task in TASKS]  # defines no function
    outcomes = kbx_env.grade_many(pairs, workers=2, backend="cpu", targets=())
    for (task, _), outcome in zip(pairs, outcomes, strict=True):  # in the order of the pairs
        print(f"{task:20} {outcome.verdict}")
    print(dict(Counter(str(o.verdict) for o in outcomes)))
