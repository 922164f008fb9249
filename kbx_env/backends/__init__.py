"""Where launches are executed."""
