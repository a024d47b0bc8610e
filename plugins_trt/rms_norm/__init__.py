"""residual += scale * branch, then RMSNorm of it."""
