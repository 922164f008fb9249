"""Reward presets compared without a language model."""
