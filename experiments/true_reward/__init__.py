"""What the same model learns from a naive grader and from ours, when its demonstrations mix honest kernels with cheats."""
