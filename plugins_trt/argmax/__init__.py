"""The largest logit of each row, for greedy decoding."""
