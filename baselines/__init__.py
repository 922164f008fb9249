"""Policies, one a file: the methods of the paper, searches, and references such as ``expert``, ``eager`` and ``zeros``."""
