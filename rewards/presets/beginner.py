"""For models that write hardly anything that runs: ``default``, and for a wrong kernel up to 0.065 more for how far it gets.

Under ``default`` all answers of such a model earn the same, and a group without a difference teaches nothing: nine in ten of
GRPO's groups were so (docs/measurements). Range on the CPU backend: 0 to 1.0, wrong kernels up to 0.45, right ones as under
``default``; on the CUDA backend 0 to 5.0. Over several turns the same numbers are a potential: see ``rewards/shaping.py``.
"""

from kbx_env.rewards.presets.default import WEIGHTS as WEIGHTS

SHAPING = {"progress": 0.05, "sound": 0.05}
