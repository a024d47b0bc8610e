"""Block selection (InfLLM-v2) for decode and verify steps of up to 64 tokens."""
