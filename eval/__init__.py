"""The benchmark report."""
