"""The messages that both sides of the trust boundary exchange."""
