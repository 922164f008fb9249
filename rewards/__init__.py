"""Reward terms, one a file, and the presets that compose them."""
