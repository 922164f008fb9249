"""For quantized operations: ``default``, and for a wrong kernel up to 0.18 more for stages of the scheme that the grader saw hold.

Range on the CPU backend: 0 to 1.0, wrong kernels up to 0.58, right ones as under ``default``; on the CUDA backend 0 to 5.0.
A scheme has either packed operands, an integer product, or neither: what it has not is left out. Over several turns the same
numbers are a potential: see ``rewards/shaping.py``. Terms that the CPU tier has not seen are left out.
"""

from kbx_env.rewards.presets.default import WEIGHTS as WEIGHTS

SHAPING = {
    "scale": 0.02, "rounding": 0.03, "clamp": 0.01, "packing": 0.04, "product": 0.04, "dequantization": 0.02, "margin": 0.02,
}  # fmt: skip
