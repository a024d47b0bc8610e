"""edgectl: one module a command."""
