"""The default reward: 0 for a rejected or unparsable source, then compiling, cases, all correct, log2 of the speedup.

Range on the CPU backend: 0 to 1.0 (0.1 compiles, up to 0.3 for cases, 0.6 for all correct).
Range on the CUDA backend: 0 to 5.0 (the same, plus log2 of the speedup beyond the noise, at most 4).
The two must not be compared or mixed.
"""

WEIGHTS = {"compiles": 0.1, "cases": 0.3, "correct": 0.6, "speed": 1.0}
