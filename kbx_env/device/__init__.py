"""Times calls and moves tensors on the device, for the grader and the runner; neither trusts the other's process."""
