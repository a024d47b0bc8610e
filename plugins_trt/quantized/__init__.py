"""Keys and values in eight bits: one scale for each token and KV head, of its key and of its value."""
