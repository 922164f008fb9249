"""For quantized operations: ``default``, and a wrong kernel loses up to 0.18 for stages of the scheme that it lacks.

Range on the CPU backend: -0.18 to 1.0, wrong kernels less than under ``default``, right ones as under ``default``; on
the CUDA backend -0.18 to 5.0. A scheme has packed operands, an integer product, or neither: the terms of a stage that
it does not have are left out. Over several turns the same numbers are a potential: see ``rewards/shaping.py``. Terms
that need the CPU tier are left out where it has not executed the kernel.
"""

from kbx_env.rewards.presets.default import WEIGHTS as WEIGHTS

SHAPING = {
    "scale": 0.02, "rounding": 0.03, "clamp": 0.01, "packing": 0.04, "product": 0.04, "dequantization": 0.02,
    "margin": 0.02,
}  # fmt: skip
