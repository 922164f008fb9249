"""Policies: expert, replay, eager, zeros; later the five methods of the paper."""
