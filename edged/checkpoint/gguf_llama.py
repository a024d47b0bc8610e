"""GGUF architecture ``llama``: its metadata as a Hugging Face configuration, its tensors under their names there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edged.errors import CheckpointError

if TYPE_CHECKING:
    from edged.checkpoint.gguf_file import GgufFile, GgufTensor

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_MLP = ("ffn_gate", "ffn_up", "ffn_down")
# Used up by the configuration instead of copied.
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# What would change the model's mathematics and is not part of a Hugging Face Llama.
_UNSUPPORTED = {
    "expert_count": 0,
    "attention.sliding_window": 0,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.alpha": 0.0,
}


class TensorSource(NamedTuple):
    """Where an output tensor comes from.

    ``heads`` is the number of heads whose rows llama.cpp stored in the order of its rotary embedding (pairs beside
    each other) and that have to go back to halves; 0 where rows stay.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    heads: int = 0


def head_order(rows: int, heads: int) -> np.ndarray[Any, Any]:
    """Return the source row of each output row that undoes llama.cpp's permutation of q and k, [rows].

    llama.cpp rotates dimensions (2i, 2i+1) together, Hugging Face (i, i + d/2): llama.cpp's row 2i + j of a head
    is row i + j·d/2 of the original.
    """
    order: np.ndarray[Any, Any] = (
        np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
    )
    return order


def exact_decimal(value: float) -> float:
    """Return the shortest decimal that is this float32: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def llama_config(file: GgufFile) -> dict[str, Any]:
    """Return ``config.json`` for a GGUF file of architecture ``llama`` (token ids are added by the tokenizer).

    Raises:
        CheckpointError: A key is missing, contradicts another, or asks for what a Hugging Face Llama has not.
    """
    for key, neutral in _UNSUPPORTED.items():
        value = file.get(f"llama.{key}", neutral)
        if value != neutral:
            raise CheckpointError(f"{file.path}: llama.{key} = {value} is not supported")
    hidden = _required(file, "embedding_length")
    heads = _per_layer(file, "attention.head_count")
    kv_heads = _per_layer(file, "attention.head_count_kv", heads)
    head_dim = file.get("llama.attention.key_length", hidden // heads if heads else 0)
    if min(hidden, heads, kv_heads, head_dim) < 1 or heads % kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{file.path}: {heads} query heads and {kv_heads} key/value heads of {head_dim} dimensions do not fit"
        )
    for key in ("attention.value_length", "rope.dimension_count"):
        value = file.get(f"llama.{key}", head_dim)
        if value != head_dim:
            raise CheckpointError(
                f"{file.path}: llama.{key} = {value} is not supported; heads have {head_dim}"
            )
    eps = file.find("llama.attention.layer_norm_rms_epsilon", float)
    if eps is None:
        raise CheckpointError(f"{file.path}: llama.attention.layer_norm_rms_epsilon is missing")
    context = _required(file, "context_length")
    base = exact_decimal(file.get("llama.rope.freq_base", 10000.0))
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _vocabulary_rows(file),
        "hidden_size": hidden,
        "intermediate_size": _per_layer(file, "feed_forward_length"),
        "num_hidden_layers": _required(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": exact_decimal(eps),
        "rope_theta": base,
        "rope_scaling": _rope_scaling(file, base, head_dim, context),
        "attention_bias": any(f"blk.0.{name}.bias" in file.tensors for name in _ATTENTION),
        "mlp_bias": any(f"blk.0.{name}.bias" in file.tensors for name in _MLP),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    _check_positive(file, config)
    _check_positive(file, config["rope_scaling"] or {})
    return config


def llama_tensors(file: GgufFile, config: dict[str, Any]) -> dict[str, TensorSource]:
    """Map each tensor of the model to its source.

    Raises:
        CheckpointError: Tensors are missing, left over or of the wrong shape; all of them are listed.
    """
    expected = _expected(config)
    names = _gguf_names(config)
    missing = [gguf for gguf, name in names.items() if name in expected and gguf not in file.tensors]
    unknown = [name for name in file.tensors if names.get(name) not in expected and name not in _ROPE_TENSORS]
    if missing or unknown:
        raise CheckpointError(
            f"{file.path}: {_listing('missing tensors', missing)}{_listing('tensors without a place', unknown)}"
            f"the file does not fit its own metadata"
        )
    sources: dict[str, TensorSource] = {}
    for gguf, name in names.items():
        shape = expected.get(name)
        if shape is None:
            continue
        tensor = file.tensors[gguf]
        if tensor.shape != shape:
            raise CheckpointError(
                f"{file.path}: tensor {gguf!r} has the shape {list(tensor.shape)}, the metadata says {list(shape)}"
            )
        heads = 0
        if ".attn_q." in gguf:
            heads = config["num_attention_heads"]
        elif ".attn_k." in gguf:
            heads = config["num_key_value_heads"]
        sources[name] = TensorSource(tensor, shape, heads)
    return sources


def _check_positive(file: GgufFile, values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, float) and not (math.isfinite(value) and value > 0):
            raise CheckpointError(f"{file.path}: {key} would be {value}; it must be a positive number")


def _listing(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{what}: {', '.join(names[:10])}{more}; "


def _required(file: GgufFile, key: str) -> int:
    value = file.find(f"llama.{key}", int)
    if value is None or value < 1:
        raise CheckpointError(f"{file.path}: llama.{key} is {value}; a positive number is needed")
    return value


def _per_layer(file: GgufFile, key: str, default: int | None = None) -> int:
    """Read a number that newer files may give for each layer; all layers must agree."""
    value = file.metadata.get(f"llama.{key}")
    if isinstance(value, list):
        if len(set(value)) != 1 or not isinstance(value[0], int):
            raise CheckpointError(f"{file.path}: llama.{key} differs between layers, which is not supported")
        return int(value[0])
    if value is None and default is not None:
        return default
    return _required(file, key)


def _vocabulary_rows(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing or no matrix")
    rows = embedding.shape[0]
    stated = file.get("llama.vocab_size", rows)
    if stated != rows:
        raise CheckpointError(
            f"{file.path}: llama.vocab_size is {stated}, but token_embd.weight has {rows} rows"
        )
    return rows


def _gguf_names(config: dict[str, Any]) -> dict[str, str]:
    """Map every name that a GGUF file of this architecture may use to its Hugging Face name."""
    names = dict(_TOP)
    for layer in range(config["num_hidden_layers"]):
        for gguf, name in _LAYER.items():
            suffixes = ("",) if gguf.endswith(".weight") else (".weight", ".bias")
            for suffix in suffixes:
                names[f"blk.{layer}.{gguf}{suffix}"] = f"model.layers.{layer}.{name}{suffix}"
    return names


def _expected(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a Hugging Face Llama of this configuration has, with their shapes."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    matrices = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, shape in matrices.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if config["attention_bias" if name.startswith("self_attn") else "mlp_bias"]:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def _rope_scaling(file: GgufFile, base: float, head_dim: int, context: int) -> dict[str, Any] | None:
    if "rope_factors_long.weight" in file.tensors:
        return _longrope(file, head_dim, context)
    if "rope_freqs.weight" in file.tensors:
        return _frequency_factors(file, base, head_dim, context)
    kind = file.get("llama.rope.scaling.type", "none")
    factor = file.get("llama.rope.scaling.factor", file.get("llama.rope.scale_linear", 1.0))
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return {"rope_type": "linear", "factor": exact_decimal(factor)} if factor != 1.0 else None
    if kind == "yarn":
        return _yarn(file, factor, context)
    if kind != "none":
        raise CheckpointError(f"{file.path}: llama.rope.scaling.type {kind!r} is not supported")
    return None


def _yarn(file: GgufFile, factor: float, context: int) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": exact_decimal(factor),
        "original_max_position_embeddings": file.get("llama.rope.scaling.original_context_length", context),
    }
    attention = file.get(
        "llama.rope.scaling.yarn_attn_factor", file.get("llama.rope.scaling.attn_factor", 1.0)
    )
    if attention != 1.0:  # llama.cpp multiplies it with YaRN's own; Hugging Face takes the product
        scaling["attention_factor"] = exact_decimal(attention) * (0.1 * math.log(factor) + 1.0)
    for key in ("beta_fast", "beta_slow"):
        value = file.find(f"llama.rope.scaling.yarn_{key}", float)
        if value is not None:
            scaling[key] = exact_decimal(value)
    return scaling


def _read_factors(file: GgufFile, name: str, head_dim: int) -> list[float]:
    tensor = file.tensors.get(name)
    if tensor is None or tensor.shape != (head_dim // 2,):
        raise CheckpointError(f"{file.path}: tensor {name!r} is missing or not of shape [{head_dim // 2}]")
    factors = np.concatenate(list(file.read_rows(tensor)), axis=None)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise CheckpointError(f"{file.path}: tensor {name!r} holds factors that are not positive")
    return [exact_decimal(value) for value in factors]


def _longrope(file: GgufFile, head_dim: int, context: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "long_factor": _read_factors(file, "rope_factors_long.weight", head_dim),
        "short_factor": _read_factors(file, "rope_factors_short.weight", head_dim),
        "original_max_position_embeddings": file.get("llama.rope.scaling.original_context_length", context),
        "attention_factor": exact_decimal(file.get("llama.rope.scaling.attn_factor", 1.0)),
    }


def _frequency_factors(file: GgufFile, base: float, head_dim: int, context: int) -> dict[str, Any]:
    """Say what ``rope_freqs.weight`` divides the frequencies by: Llama 3's rule where it fits, else the list itself."""
    factors = _read_factors(file, "rope_freqs.weight", head_dim)
    rule = {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if np.allclose(llama3_factors(base, head_dim, rule), factors, rtol=1e-5, atol=0.0):
        return rule
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "original_max_position_embeddings": context,
        "attention_factor": 1.0,
    }


def llama3_factors(base: float, head_dim: int, rule: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return what Llama 3.1's scaling divides each frequency by, [head_dim / 2].

    Wavelengths shorter than original / high_freq_factor stay, those longer than original / low_freq_factor are
    stretched by ``factor``, and the frequencies between are interpolated.
    """
    wavelengths = 2.0 * math.pi * base ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    low, high = rule["low_freq_factor"], rule["high_freq_factor"]
    smooth = (rule["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    factors: np.ndarray[Any, Any] = 1.0 / ((1.0 - smooth) / rule["factor"] + smooth)
    return factors
