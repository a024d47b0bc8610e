"""Quantizers: dense checkpoints into 4-bit (GPTQ's format) or ternary ones, a part of a layer at a time."""
