"""Declarations of tasks: inputs, criteria, costs; and the catalog that finds them."""
