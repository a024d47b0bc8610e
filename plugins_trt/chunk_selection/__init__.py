"""Block selection for prefill chunks (InfLLM-v2): which pages each query token attends to, as a bitmap."""
