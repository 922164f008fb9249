"""Tools for a search over the tunable numbers of a kernel, without a language model."""
