"""For models whose kernels seldom run: ``default``, and for a wrong kernel up to 0.065 more for the stage it reaches.

Under ``default`` all answers of such a model earn the same, and a GRPO group with equal rewards has no gradient: nine
in ten groups were so (docs/measurements). Range on the CPU backend: 0 to 1.0, wrong kernels up to 0.45, right ones as
under ``default``; on the CUDA backend 0 to 5.0. Over several turns the same numbers are a potential: see
``rewards/shaping.py``.
"""

from kbx_env.rewards.presets.default import WEIGHTS as WEIGHTS

SHAPING = {"progress": 0.05, "sound": 0.05}
