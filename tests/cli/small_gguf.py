"""A GGUF file of a few kilobytes."""

from __future__ import annotations

import gguf
import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, WIDE = 64, 2, 2, 1, 96
TOKENS = [chr(byte) for byte in range(33, 127)] + ["Ġ", "Ċ", "ab", "<|end|>"]


def write_gguf(path, architecture="llama", *, linears=None):
    """A random model of 64 hidden elements, with a byte-level vocabulary; ``linears`` is the type of its linears."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(TOKENS) - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(len(TOKENS) - 1)
    writer.add_eos_token_id(len(TOKENS) - 1)
    random = np.random.default_rng(1)
    head = HIDDEN // HEADS
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HEADS * head, HIDDEN),
            "attn_k": (KV_HEADS * head, HIDDEN),
            "attn_v": (KV_HEADS * head, HIDDEN),
            "attn_output": (HIDDEN, HEADS * head),
            "ffn_gate": (WIDE, HIDDEN),
            "ffn_up": (WIDE, HIDDEN),
            "ffn_down": (HIDDEN, WIDE),
        }.items():
            shapes[f"blk.{layer}.{name}"] = shape
    for name, shape in shapes.items():
        values = random.standard_normal(shape, np.float32)
        kind = linears if len(shape) == 2 and name != "token_embd" else None
        if kind is not None:
            values = gguf.quantize(values, kind)
        writer.add_tensor(f"{name}.weight", values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
