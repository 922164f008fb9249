"""What times and moves tensors on the device. The grader and the runner both use it; neither trusts the other's copy."""
