"""Adapters for other frameworks, about a page each (``docs/trainers.md``). Import the one you need: each needs its framework."""
