"""Parses the text of a TTIR module into a graph of operations."""
