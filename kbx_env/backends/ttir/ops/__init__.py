"""The operations of TTIR, one module a dialect."""
