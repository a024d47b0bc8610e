"""A model folder as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.checkpoint.safetensors_files import WeightFiles
from edged.models.architecture import Architecture
from edged.models.checkpoint import CheckpointPlan

if TYPE_CHECKING:
    from pathlib import Path


def check_folder(folder: Path) -> None:
    """Hold the weight files' headers to the architecture; no weight is read.

    Raises:
        CheckpointError: A file is missing or damaged, or tensors are missing, unknown, of another shape or element type.
    """
    architecture = Architecture.read(folder)
    with WeightFiles.open(folder) as files:
        CheckpointPlan.of(architecture, files)
