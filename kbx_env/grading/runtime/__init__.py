"""The grader's clients of the untrusted processes. What comes back is a claim."""
