"""Small models to quantize, and the widened model that a folder stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fixtures.small_models import byte_tokenizer
from quantized_files import gptq_weight
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from edged.checkpoint.model_folder import write_json

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
}
CONFIGS = {"llama": LlamaConfig(**SIZES), "qwen2": Qwen2Config(**{**SIZES, "tie_word_embeddings": True})}


def random_model(kind: str = "llama", seed: int = 0) -> Any:
    """A random model of transformers, in fp32, whose norms are not all ones."""
    torch.manual_seed(seed)
    loader: Any = AutoModelForCausalLM
    model = loader.from_config(CONFIGS[kind], dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data.uniform_(0.5, 1.5)
    return model


def write_folder(folder: Path, model: Any) -> Path:
    """Save a model with a tokenizer of bytes."""
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|end|>"})
    return folder


def widened(folder: Path, model: Any) -> dict[str, torch.Tensor]:
    """The state of a model with what stands in a GPTQ folder, widened by the format's definition."""
    tensors = load_file(folder / "model.safetensors")
    state = {
        name: torch.from_numpy(array.astype(np.float32)) for name, array in tensors.items() if _dense(name)
    }
    for name in tensors:
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            state[f"{module}.weight"] = torch.from_numpy(gptq_weight(tensors, module).astype(np.float32))
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def _dense(name: str) -> bool:
    return not name.endswith(("qweight", "qzeros", "scales", "g_idx"))
