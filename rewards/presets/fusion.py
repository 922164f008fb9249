"""For fused operations: ``default``, and for a wrong kernel up to 0.11 more: for fusing in the cases that it passes, and for the
steps of the operation that it computes in those that it fails.

Range on the CPU backend: 0 to 1.0, wrong kernels up to 0.51, right ones as under ``default``; on the CUDA backend 0 to 5.0, where a
right kernel's traffic shows in its time. Over several turns the same numbers are a potential: see ``rewards/shaping.py``.
Terms that the CPU tier has not seen are left out.
"""

from kbx_env.rewards.presets.default import WEIGHTS as WEIGHTS

SHAPING = {"launches": 0.01, "traffic": 0.01, "intermediates": 0.01, "operators": 0.08}
