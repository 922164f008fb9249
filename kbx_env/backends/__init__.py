"""Execution of kernel launches on the CPU, and estimates of their time on a GPU."""
