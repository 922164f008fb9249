"""What both sides of the trust boundary speak."""
