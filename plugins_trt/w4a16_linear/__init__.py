"""Linear layers with 4-bit weights and 16-bit activations, for 1 to 64 rows."""
