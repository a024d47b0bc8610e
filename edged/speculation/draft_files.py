"""Writes a trained draft's folder, in MiniCPM4's layout, with the token map of what its model writes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from edged.checkpoint.model_folder import new_folder, publish, write_json
from edged.errors import CheckpointError
from edged.models.eagle import Eagle
from edged.speculation.eagle_layer import first_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from edged.models.architecture import Architecture

TOKEN_MAP = "token_map.json"  # noqa: S105 - a file's name
_KEPT_KEYS = frozenset(
    {
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps",
        "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "scale_emb", "scale_depth",
        "dim_model_base",
    }
)  # fmt: skip


def write_draft(
    destination: Path,
    model: Path,
    a: Architecture,
    weights: Mapping[str, torch.Tensor],
    *,
    token_map: Sequence[int],
    notes: Mapping[str, object],
) -> None:
    """Write the folder as a whole; matrices in float16 where that holds them.

    Args:
        destination: The folder, which takes the place of one that is there.
        model: The target's.
        a: The target's hyper-parameters.
        weights: By their names in the layout, fp32 on the CPU.
        token_map: Frequent token ids.
        notes: What ``config.json`` says of the training.

    Raises:
        CheckpointError: The disk has no room, or refuses something; nothing of it is left.
    """
    config = json.loads((model / "config.json").read_text("utf-8"))
    kept = {key: value for key, value in config.items() if key in _KEPT_KEYS}
    mup = a.model_type == "minicpm"
    kept |= {
        "architectures": ["EagleForCausalLM"],
        "model_type": "minicpm" if mup else "llama",
        "num_hidden_layers": 1,
        "head_dim": a.head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "edged": dict(notes),
    }
    if mup:
        kept["mup_denominator"] = a.layers + 1
    kept_weights = {name: _halved(each) for name, each in weights.items()}
    try:
        with new_folder(destination, sum(each.nbytes for each in kept_weights.values())) as part:
            write_json(part / "config.json", kept)
            (part / TOKEN_MAP).write_text(json.dumps(list(token_map)) + "\n", "utf-8")
            save_file(kept_weights, part / "model.safetensors")
            Eagle.read(part, a)  # what the daemon would refuse is not written
            publish(part, destination)
    except SafetensorError as error:  # a full disk, in the library's words
        raise CheckpointError(f"{destination}: cannot be written: {error}") from error


def first_weights_of(folder: Path, a: Architecture) -> dict[str, torch.Tensor]:
    """A trained draft's weights, to train on from, fp32.

    Raises:
        CheckpointError: The folder holds no draft of this target, or none in the layout that is trained.
    """
    Eagle.read(folder, a)
    weights = {name: each.float() for name, each in load_file(folder / "model.safetensors").items()}
    wanted = first_weights(a)
    if {name: each.shape for name, each in weights.items()} != {
        name: each.shape for name, each in wanted.items()
    }:
        raise CheckpointError(
            f"{folder}: has other tensors than a draft that is trained here: begin with one that edgectl draft train has made"
        )
    return weights


def _halved(weight: torch.Tensor) -> torch.Tensor:
    half = weight.to(torch.float16).contiguous()
    return half if bool(half.isfinite().all()) else weight.contiguous()
