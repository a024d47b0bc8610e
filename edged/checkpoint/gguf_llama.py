"""GGUF files of the Llama family: metadata as a Hugging Face configuration, tensors under their names there.

What the architectures differ in was read in llama.cpp: its converter (which permutes the rows of q and k for ``llama`` and
``minicpm``, whose graphs rotate neighbours, and leaves them for ``qwen2`` and ``qwen3``) and its loader.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edged.checkpoint.gguf_rope import ROPE_TENSORS, exact_decimal, key_of, rope_scaling
from edged.checkpoint.name_list import listed
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
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_MLP = ("ffn_gate", "ffn_up", "ffn_down")
# What would change the model's mathematics and is not part of these models at Hugging Face.
_UNSUPPORTED = {
    "expert_count": 0,
    "attention.sliding_window": 0,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.alpha": 0.0,
}
_SCALES = {"embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0}
_MOST_LAYERS = 1024
_MINICPM_BASE = 256  # dim_model_base of every MiniCPM; files from before the key say nothing


@dataclass(frozen=True)
class GgufFamily:
    """What a GGUF architecture is at Hugging Face."""

    model_type: str
    class_name: str
    permuted: bool = False
    """q and k have their rows in the order of llama.cpp's own rotary embedding."""
    qk_norm: bool = False
    qkv_bias: bool = False
    """Biases on q, k and v alone, which the configuration does not mention."""
    mup: bool = False


FAMILIES = {
    "llama": GgufFamily("llama", "LlamaForCausalLM", permuted=True),
    "minicpm": GgufFamily("minicpm", "MiniCPMForCausalLM", permuted=True, mup=True),
    "qwen2": GgufFamily("qwen2", "Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": GgufFamily("qwen3", "Qwen3ForCausalLM", qk_norm=True),
}
"""The architectures that are read, by the name in ``general.architecture``."""


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


def family_of(file: GgufFile) -> GgufFamily:
    """The family of a file.

    Raises:
        CheckpointError: Its architecture is not supported.
    """
    name = file.get("general.architecture", "")
    if name not in FAMILIES:
        raise CheckpointError(
            f"{file.path}: the architecture general.architecture = {name!r} is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def model_config(file: GgufFile) -> dict[str, Any]:
    """Return ``config.json`` for a GGUF file (token ids are added by the tokenizer).

    Raises:
        CheckpointError: The architecture is not supported; a key is missing, contradicts another, or asks for what the
            model has not at Hugging Face.
    """
    family = family_of(file)
    for key, neutral in {**_UNSUPPORTED, **({} if family.mup else _SCALES)}.items():
        value = file.get(key_of(file, key), neutral)
        if value != neutral:
            raise CheckpointError(f"{file.path}: {key_of(file, key)} = {value} is not supported")
    hidden = _required(file, "embedding_length")
    heads = _per_layer(file, "attention.head_count")
    kv_heads = _per_layer(file, "attention.head_count_kv", heads)
    head_dim = file.get(key_of(file, "attention.key_length"), hidden // heads if heads else 0)
    if min(hidden, heads, kv_heads, head_dim) < 1 or heads % kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{file.path}: {heads} query heads and {kv_heads} key/value heads of {head_dim} dimensions do not fit"
        )
    for key in ("attention.value_length", "rope.dimension_count"):
        value = file.get(key_of(file, key), head_dim)
        if value != head_dim:
            raise CheckpointError(
                f"{file.path}: {key_of(file, key)} = {value} is not supported; heads have {head_dim}"
            )
    eps = file.find(key_of(file, "attention.layer_norm_rms_epsilon"), float)
    if eps is None:
        raise CheckpointError(f"{file.path}: {key_of(file, 'attention.layer_norm_rms_epsilon')} is missing")
    context = _required(file, "context_length")
    base = exact_decimal(file.get(key_of(file, "rope.freq_base"), 10000.0))
    biased = _MLP, _ATTENTION[:3] if family.qkv_bias else _ATTENTION
    mlp_bias, attention_bias = (
        any(f"blk.0.{each}.bias" in file.tensors for each in names) for names in biased
    )
    layers = _required(file, "block_count")
    if layers > _MOST_LAYERS:
        raise CheckpointError(
            f"{file.path}: {key_of(file, 'block_count')} is {layers}; at most {_MOST_LAYERS} layers are read"
        )
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": _vocabulary_rows(file),
        "hidden_size": hidden,
        "intermediate_size": _per_layer(file, "feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": exact_decimal(eps),
        "rope_theta": base,
        "rope_scaling": rope_scaling(file, base, head_dim, context),
        "attention_bias": attention_bias and not family.qkv_bias,
        "mlp_bias": mlp_bias,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **(_mup(file, hidden, layers) if family.mup else {}),
    }
    _check_positive(file, config)
    _check_positive(file, config["rope_scaling"] or {})
    return config


def model_tensors(file: GgufFile, config: dict[str, Any]) -> dict[str, TensorSource]:
    """Map each tensor of the model to its source.

    Raises:
        CheckpointError: Tensors are missing, left over or of the wrong shape; all of them are listed.
    """
    family = family_of(file)
    expected = _expected(config, family)
    names = _gguf_names(config)
    missing = [gguf for gguf, name in names.items() if name in expected and gguf not in file.tensors]
    unknown = [name for name in file.tensors if names.get(name) not in expected and name not in ROPE_TENSORS]
    wrong = [
        f"{gguf} is {list(file.tensors[gguf].shape)} instead of {list(expected[name])}"
        for gguf, name in names.items()
        if name in expected and gguf in file.tensors and file.tensors[gguf].shape != expected[name]
    ]
    if missing or unknown or wrong:
        raise CheckpointError(
            f"{file.path}: {_listing('missing tensors', missing)}{_listing('tensors without a place', unknown)}"
            f"{_listing('tensors of other shapes', wrong)}the file does not fit its own metadata"
        )
    sources: dict[str, TensorSource] = {}
    for gguf, name in names.items():
        if name not in expected:
            continue
        heads = 0
        if family.permuted and ".attn_q." in gguf:
            heads = config["num_attention_heads"]
        elif family.permuted and ".attn_k." in gguf:
            heads = config["num_key_value_heads"]
        sources[name] = TensorSource(file.tensors[gguf], expected[name], heads)
    return sources


def _mup(file: GgufFile, hidden: int, layers: int) -> dict[str, float]:
    """MiniCPM's three scales, which llama.cpp stores as they are applied; MiniCPM's own where the file says nothing."""
    embedding = exact_decimal(file.get(key_of(file, "embedding_scale"), 12.0))
    depth = _decimal(file.get(key_of(file, "residual_scale"), 1.4 / layers**0.5), 1 / layers**0.5)
    # Older llama.cpp reads a missing key upside down; what the model was trained with is meant.
    divisor = file.get(key_of(file, "logit_scale"), hidden / _MINICPM_BASE)
    if not (math.isfinite(divisor) and divisor > 0):
        raise CheckpointError(f"{file.path}: {key_of(file, 'logit_scale')} is {divisor}; it must be positive")
    base = hidden / divisor
    return {
        "scale_emb": embedding,
        "scale_depth": depth,
        "dim_model_base": round(base) if math.isclose(base, round(base), rel_tol=1e-6) else base,
    }


def _decimal(product: float, factor: float) -> float:
    """The shortest decimal that gives this float32 when multiplied by ``factor``."""
    exact = product / factor
    if not math.isfinite(exact):
        return exact
    decimals = (round(exact, places) for places in range(1, 12))
    return next((each for each in decimals if np.float32(each * factor) == np.float32(product)), exact)


def _check_positive(file: GgufFile, values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, float) and not (math.isfinite(value) and value > 0):
            raise CheckpointError(f"{file.path}: {key} would be {value}; it must be a positive number")


def _listing(what: str, names: list[str]) -> str:
    return f"{what}: {listed(names)}; " if names else ""


def _required(file: GgufFile, key: str) -> int:
    value = file.find(key_of(file, key), int)
    if value is None or value < 1:
        raise CheckpointError(f"{file.path}: {key_of(file, key)} is {value}; a positive number is needed")
    return value


def _per_layer(file: GgufFile, key: str, default: int | None = None) -> int:
    """Read a number that newer files may give for each layer; all layers must agree."""
    value = file.metadata.get(key_of(file, key))
    if isinstance(value, list):
        if not value or any(each != value[0] for each in value) or type(value[0]) is not int:
            raise CheckpointError(
                f"{file.path}: {key_of(file, key)} differs between layers, which is not supported"
            )
        return int(value[0])
    if value is None and default is not None:
        return default
    return _required(file, key)


def _vocabulary_rows(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing or no matrix")
    rows = embedding.shape[0]
    stated = file.get(key_of(file, "vocab_size"), rows)
    if stated != rows:
        raise CheckpointError(
            f"{file.path}: {key_of(file, 'vocab_size')} is {stated}, but token_embd.weight has {rows} rows"
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


def _expected(config: dict[str, Any], family: GgufFamily) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a Hugging Face model of this configuration has, with their shapes."""
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
        if family.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config["head_dim"],)
            shapes[prefix + "self_attn.k_norm.weight"] = (config["head_dim"],)
        for name, shape in matrices.items():
            shapes[f"{prefix}{name}.weight"] = shape
            is_attention = name.startswith("self_attn")
            if config["attention_bias" if is_attention else "mlp_bias"] or (
                family.qkv_bias and is_attention and not name.endswith("o_proj")
            ):
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes
