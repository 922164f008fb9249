"""From the text of a TTIR module to its graph."""
