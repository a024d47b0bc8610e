"""Operators of our own: a contract, a torch reference, CUDA sources and a TensorRT plugin each."""
