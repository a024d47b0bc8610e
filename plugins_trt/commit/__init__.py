"""Keeps the accepted path of a verified tree: its keys and values, and the compressed keys it completes."""
