"""A small language model that is trained on measured speedups of kernels with different schedules."""
