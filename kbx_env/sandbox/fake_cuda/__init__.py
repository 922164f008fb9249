"""A stand-in CUDA device for host code on a machine without a GPU."""
