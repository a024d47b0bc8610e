"""Folders of small models whose every tensor is drawn from one normal distribution, norms and biases too."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

from edged.models.architecture import Architecture
from edged.models.weights import weight_specs

if TYPE_CHECKING:
    from pathlib import Path


def write_random(folder: Path, config: dict[str, Any], deviation: float = 1.0) -> Path:
    """Writes a model; ``deviation`` is that of a matrix's products with inputs of deviation 1."""
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(11)
    tensors = {
        source.name: np.float32(
            deviation * random.standard_normal(source.shape) / max(1, source.shape[-1]) ** 0.5
        )
        for spec in weight_specs(Architecture.from_config(config))
        for source in spec.sources
    }
    save_file(tensors, folder / "model.safetensors")
    return folder
