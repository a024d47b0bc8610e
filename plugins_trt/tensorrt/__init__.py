"""The operators as TensorRT plugins: one set of classes for TensorRT (10.3 and later) and TensorRT-RTX (1.7 and later)."""
