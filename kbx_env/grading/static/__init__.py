"""What is read from a source without running it."""
