"""Whether demonstrations of generated tasks help a small model to solve the benchmark's eval tasks."""
