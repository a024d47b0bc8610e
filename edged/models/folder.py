"""A model folder as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.checkpoint.safetensors_files import WeightFiles
from edged.models.architecture import Architecture
from edged.models.weights import check_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


def check_folder(folder: Path) -> None:
    """Hold the weight files' headers to the architecture; no weight is read.

    Raises:
        CheckpointError: A file is missing or damaged, or tensors are missing, unknown or of another shape.
    """
    architecture = Architecture.read(folder)
    with WeightFiles.open(folder) as files:
        check_checkpoint(architecture, {name: files.info(name).shape for name in files.names()})
