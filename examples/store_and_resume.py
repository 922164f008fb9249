"""Keep gradings in a file, so that a run that goes on grades nothing twice.

    python examples/store_and_resume.py
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

from kbx_env.store import Store
from kbx_env.trl import KernelReward

GOOD = (Path(__file__).parent / "kernels/exp_sqrt.py").read_text()
ANSWERS = [("math/exp_sqrt", GOOD), ("math/exp_sqrt", GOOD.replace("0.5", "0.25"))]

if __name__ == "__main__":
    file = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()) / "gradings.sqlite"
    runs = []
    for number in (1, 2):  # the second run is that of a process which was started again
        reward = KernelReward("default", backend="cpu", workers=1, targets=(), store=file)
        runs.append(reward.grade(ANSWERS))
        reward.close()
        print(f"run {number}: rewards {[round(graded.reward or 0.0, 2) for graded in runs[-1]]}")
    same = all(a.outcome.seconds == b.outcome.seconds for a, b in zip(*runs, strict=True))
    print("the second run was answered from the store:", same)

    store = Store(file)
    print(dict(Counter(str(row.outcome.verdict) for row in store.records())))
    store.close()
