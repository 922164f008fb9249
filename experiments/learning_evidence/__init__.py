"""Whether training improves a small model within some minutes of a GPU."""
