"""For fused operations: ``default``, and for a wrong kernel up to 0.14 more for fusing in the cases that it passes.

A source of which no kernel compiled passes none; it is paid up to 0.05 for having few errors that are certain (``sound``). Of 144
answers of published models to fused tasks 77 did not compile or raised, and 4 ran and had wrong values (docs/measurements).

Range on the CPU backend: 0 to 1.0, wrong kernels up to 0.54, right ones as under ``default``; on the CUDA backend 0 to 5.0, where a
right kernel's traffic shows in its time. Over several turns the same numbers are a potential: see ``rewards/shaping.py``.
Terms that the CPU tier has not seen are left out.
"""

from kbx_env.rewards.presets.default import WEIGHTS as WEIGHTS

SHAPING = {"launches": 0.04, "traffic": 0.05, "intermediates": 0.05, "sound": 0.05}
