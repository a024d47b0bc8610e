"""Choosing the next token of each row of logits."""
