"""Searches over the tunable numbers of a kernel, without a model."""
