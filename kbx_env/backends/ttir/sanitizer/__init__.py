"""Finds faults of kernels that a run on a GPU does not report."""
