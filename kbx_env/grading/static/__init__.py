"""Static analysis: reads a source without running it."""
