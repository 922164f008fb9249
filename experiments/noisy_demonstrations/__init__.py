"""Demonstrations with random faults, for a model whose kernels are often wrong."""
