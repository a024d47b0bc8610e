"""How a GGUF file says that its rotary embedding is scaled, in the words of a Hugging Face configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from edged.errors import CheckpointError

if TYPE_CHECKING:
    from edged.checkpoint.gguf_file import GgufFile

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that become part of the configuration instead of being copied."""


def key_of(file: GgufFile, key: str) -> str:
    """A metadata key of the file's architecture: ``llama.context_length``."""
    return f"{file.metadata['general.architecture']}.{key}"


def exact_decimal(value: float) -> float:
    """Return the shortest decimal that is this float32: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def rope_scaling(file: GgufFile, base: float, head_dim: int, context: int) -> dict[str, Any] | None:
    """Say how the rotary embedding is scaled, as ``rope_scaling`` of a Hugging Face configuration; None: not at all.

    Args:
        file: The GGUF file.
        base: ``rope_theta``.
        head_dim: Elements of a head.
        context: Longest sequence that the file says.

    Raises:
        CheckpointError: A scaling that is not supported, or factors that are none.
    """
    if "rope_factors_long.weight" in file.tensors:
        return _longrope(file, head_dim, context)
    if "rope_freqs.weight" in file.tensors:
        return _frequency_factors(file, base, head_dim, context)
    kind = file.get(key_of(file, "rope.scaling.type"), "none")
    factor = file.get(key_of(file, "rope.scaling.factor"), file.get(key_of(file, "rope.scale_linear"), 1.0))
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return {"rope_type": "linear", "factor": exact_decimal(factor)} if factor != 1.0 else None
    if kind == "yarn":
        return _yarn(file, factor, context)
    if kind != "none":
        raise CheckpointError(f"{file.path}: {key_of(file, 'rope.scaling.type')} {kind!r} is not supported")
    return None


def _yarn(file: GgufFile, factor: float, context: int) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": exact_decimal(factor),
        "original_max_position_embeddings": file.get(
            key_of(file, "rope.scaling.original_context_length"), context
        ),
    }
    attention = file.get(
        key_of(file, "rope.scaling.yarn_attn_factor"), file.get(key_of(file, "rope.scaling.attn_factor"), 1.0)
    )
    if attention != 1.0:  # llama.cpp multiplies it with YaRN's own; Hugging Face takes the product
        scaling["attention_factor"] = exact_decimal(attention) * (0.1 * math.log(factor) + 1.0)
    for key in ("beta_fast", "beta_slow"):
        value = file.find(key_of(file, f"rope.scaling.yarn_{key}"), float)
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
        "original_max_position_embeddings": file.get(
            key_of(file, "rope.scaling.original_context_length"), context
        ),
        "attention_factor": exact_decimal(file.get(key_of(file, "rope.scaling.attn_factor"), 1.0)),
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
