"""For fused operations: ``default``, and a wrong kernel loses up to 0.14 for not fusing in cases that it passes.

A source without a kernel that compiles passes no case; of the 0.05 that it loses beside, it keeps a part for few
statically certain errors (``sound``). Of 144 answers of published models to fused tasks, 77 did not compile or
raised, and 4 ran with wrong values (docs/measurements).

Range on the CPU backend: -0.19 to 1.0, wrong kernels less than under ``default``, right ones as under ``default``; on
the CUDA backend -0.19 to 5.0, where a right kernel's traffic shows in its time. Over several turns the same numbers
are a potential: see ``rewards/shaping.py``. Terms that need the CPU tier are left out where it has not executed the
kernel.
"""

from kbx_env.rewards.presets.default import WEIGHTS as WEIGHTS

SHAPING = {"launches": 0.04, "traffic": 0.05, "intermediates": 0.05, "sound": 0.05}
