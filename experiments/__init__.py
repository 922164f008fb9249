"""Studies of our own and the small models that they use. Not installed with the package."""
