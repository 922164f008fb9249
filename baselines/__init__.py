"""Policies, one a file: the paper's methods, searches, and references such as ``expert``, ``eager`` and ``zeros``."""
