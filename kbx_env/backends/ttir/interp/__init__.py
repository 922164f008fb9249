"""Executes a parsed kernel over a grid."""
