"""Models of some million random weights that learn short kernels within minutes."""
