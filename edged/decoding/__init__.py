"""From logits to text: sampling parameters, stops, incremental detokenizing."""
