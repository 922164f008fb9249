"""For models whose kernels seldom run: ``default``, and a wrong kernel loses up to 0.1, less the later it stops.

Under ``default`` all answers of such a model earn the same, and a GRPO group with equal rewards has no gradient: nine
in ten groups were so (docs/measurements). Range on the CPU backend: -0.1 to 1.0, wrong kernels less than under
``default``, right ones as under ``default``; on the CUDA backend -0.1 to 5.0. Over several turns the same numbers are
a potential: see ``rewards/shaping.py``.
"""

from kbx_env.rewards.presets.default import WEIGHTS as WEIGHTS

SHAPING = {"progress": 0.05, "sound": 0.05}
