"""Presets, one a file."""
