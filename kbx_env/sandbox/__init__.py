"""Untrusted code: the processes in which submissions run."""
