"""Paired timing against torch eager, and the roofline that bounds it."""
