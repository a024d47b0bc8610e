"""Appends a step's keys and values to their pages: q/k norm, RoPE, compressed keys, in one launch."""
