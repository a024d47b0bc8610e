"""Attention of prefill chunks over pages: dense, and sparse over the pages that block selection chose."""
