"""Linear layers with ternary weights, two bits each, and 16-bit activations."""
