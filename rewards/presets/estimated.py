"""The default reward, and on the CPU backend up to 1.0 more for estimated nearness to the roofline of an H200.

Range on the CPU backend: 0 to 2.0; on the CUDA backend as ``default``, 0 to 5.0, where time is measured. The estimate
orders kernels and is not a time: rank correlation (Spearman) 0.94 over 538 measured points (docs/measurements).
"""

WEIGHTS = {"compiles": 0.1, "cases": 0.3, "correct": 0.6, "speed": 1.0, "estimated": 1.0}
ESTIMATE = "h200"
