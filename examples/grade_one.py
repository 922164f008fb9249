"""Grade one kernel, and read what the outcome says.

    python examples/grade_one.py
"""

from pathlib import Path

import kbx_env

SOURCE = (Path(__file__).parent / "kernels/exp_sqrt.py").read_text()

if __name__ == "__main__":
    outcome = kbx_env.grade("math/exp_sqrt", SOURCE, backend="cpu", targets=("sm_90",))
    print("verdict", outcome.verdict)
    assert outcome.cases is not None and outcome.evidence is not None
    print("cases", outcome.cases.passed, "of", outcome.cases.total)
    print("moves no more bytes than needed:", outcome.evidence.moved_bytes == outcome.evidence.ideal_bytes)
    for build in outcome.compile:
        print("build for", build.target, "ok" if build.ok else build.error)
    print("speedup", outcome.speedup)  # None: nothing is timed on the CPU backend
