"""The rows that an EAGLE draft runs on: embeddings beside hidden states, and the window that each row attends to."""
