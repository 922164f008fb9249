"""Coverage: ``default``, and a wrong kernel loses up to 0.1, less the more of the results its fused kernels stored.

A model that writes a kernel for a small part of a task and copies the rest is told apart from one that does all of it.
Range on the CPU backend: -0.1 to 1.0, wrong kernels less than under ``default``, right ones as under ``default``; on the
CUDA backend -0.1 to 5.0. Over several turns the same numbers are a potential: see ``rewards/shaping.py``. The term is left out
where the CPU tier has not executed the kernel.
"""

from kbx_env.rewards.presets.default import WEIGHTS as WEIGHTS

SHAPING = {"coverage": 0.1}
