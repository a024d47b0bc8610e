"""4-bit weights into 16-bit ones."""
