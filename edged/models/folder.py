"""A model folder as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.checkpoint.safetensors_files import WeightFiles
from edged.models.architecture import Architecture
from edged.models.checkpoint import CheckpointPlan

if TYPE_CHECKING:
    from pathlib import Path

    from edged.config import RopeScalingConfig


def check_folder(folder: Path, *, rope_scaling: RopeScalingConfig | None = None) -> None:
    """Hold the weight files' headers to the architecture; no weight is read.

    Args:
        folder: The model folder.
        rope_scaling: The configuration's, in the place of the folder's.

    Raises:
        CheckpointError: A file is missing or damaged, or tensors are missing, unknown, of another shape or element type.
    """
    architecture = Architecture.read(folder, rope_scaling=rope_scaling)
    with WeightFiles.open(folder) as files:
        CheckpointPlan.of(architecture, files)
