"""Hyper-parameters of the published models that are measured, as their `config.json` has them; torch-free."""

from __future__ import annotations

MINICPM4_8B = {
    "model_type": "minicpm",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "vocab_size": 73448,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}
"""With the positions that LongRoPE gives it."""
