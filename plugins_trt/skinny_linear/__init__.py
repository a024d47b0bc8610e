"""y = x Wᵀ for few rows of x: a stream over the weights."""
