"""Numbers that a zygote answers with."""

ALIVE = 1000
"""Instead of an exit status, of a process that has not ended."""
