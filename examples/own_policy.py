"""A policy of your own in a report, beside the expert kernels.

    python examples/own_policy.py

The command line does the same: kbx report --policy expert --policy python:own_policy:Half ...
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kbx_env.eval import report

from kbx_env.spec.catalog import expert_source


class Half:
    """Hands in our kernel for one task, and the same kernel with one sign changed for the other."""

    name = "half"

    def act(self, observation: Mapping[str, Any]) -> str | None:
        """Answer with a source; a language model would read observation["prompt"]."""
        source = expert_source(observation["task"])
        return source.replace("x <= 0.0", "x >= 0.0") if source and observation["task"] == "activation/relu" else source


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    out = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()) / "report"
    report.main([
        "--policy", "expert", "--policy", "python:own_policy:Half", "--backend", "cpu", "--split", "all",
        "--tasks", "math/abs,activation/relu", "--targets", "none", "--workers", "1", "--out", str(out),
    ])  # fmt: skip
    for line in (out / "report.md").read_text().splitlines():
        if " of 2 correctly" in line:
            print(line)
