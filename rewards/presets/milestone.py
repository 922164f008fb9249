"""Milestones: a correct kernel, one 5 % faster than eager, and one 5 % faster than torch.compile too.

Each milestone pays 1 once, so that a kernel twice as fast earns no more than one that is 5 % faster: for training in which a
few very fast kernels should not outweigh many that are a little faster. Wrong kernels are paid as under ``default``.
Range on the CPU backend: 0 to 1.0. Range on the CUDA backend: 0 to 3.0. ``COMPILED`` asks gradings for the time of torch.compile;
where it is not known, that milestone is left out.
"""

WEIGHTS = {"compiles": 0.1, "cases": 0.3, "correct": 0.6, "milestone_eager": 1.0, "milestone_compiled": 1.0}
COMPILED = True
