"""Generates task packs: tasks composed from primitives whose kernels can be composed as well.

A family (``families``) draws a *draft*: the text of a task and of its kernel. ``build`` writes the drafts that are new
(``duplicates``) and proven (``eval/task_checks.py``) into a pack.
"""
