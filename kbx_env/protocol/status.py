"""Process states in a zygote's answers."""

ALIVE = 1000
"""Stands for the exit status of a process that has not ended; larger than any exit status."""
READY_BYTES = 4
"""Length of the process id, little-endian, that a zygote sends when it is warm."""
