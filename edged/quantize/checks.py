"""What a quantization is refused for before it reads a calibration text: all that costs nothing to find."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edged.checkpoint.model_folder import absolute, check_destination
from edged.checkpoint.safetensors_files import WeightFiles
from edged.errors import CheckpointError, InvalidArgumentError
from edged.models.architecture import Architecture
from edged.quantize.source import DTYPES, Source
from edged.quantize.state import State

if TYPE_CHECKING:
    from pathlib import Path

    from edged.quantize.recipe import Recipe

DEVICES = ("cpu", "cuda")


def check_request(
    source: Path,
    destination: Path,
    recipe: Recipe,
    *,
    dtype: str,
    device: str,
    overwrite: bool,
    length: int,
) -> None:
    """Refuse what :func:`edged.quantize.run.quantize` would, as far as options and headers show it.

    Args:
        source: The model folder.
        destination: The folder to make.
        recipe: How.
        dtype: Type of what stays wide.
        device: Where it is computed.
        overwrite: Replace a model folder that edged made.
        length: Tokens of a calibration sequence.

    Raises:
        CheckpointError: The model is refused, or the destination is taken.
        InvalidArgumentError: An option is none, or does not fit the model.
    """
    source, destination = absolute(source), absolute(destination)
    check_words(source, destination, recipe, dtype=dtype, device=device, length=length)
    with WeightFiles.open(source) as files:
        architecture = Architecture.read(source)
        Source(files, architecture, dtype)
        recipe.check(architecture)
    if recipe.calibrated:
        check_length(architecture, length)
    if not State.published_before(destination):  # by this very command, perhaps, which was killed after that
        check_destination(destination, overwrite=overwrite)


def check_words(
    source: Path,
    destination: Path,
    recipe: Recipe,
    *,
    dtype: str,
    device: str,
    length: int | None,
) -> None:
    """Refuse options that no model has, or that contradict each other.

    Raises:
        CheckpointError: The source is the destination too.
        InvalidArgumentError: An option is none.
    """
    if dtype and dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}", field="dtype")
    if device not in DEVICES:
        raise InvalidArgumentError(f"device {device!r} is not one of {', '.join(DEVICES)}", field="device")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidArgumentError("device cuda: torch finds no CUDA device here", field="device")
    if recipe.calibrated and length is not None and recipe.skipped >= length:
        raise InvalidArgumentError(
            f"skip_first {recipe.skipped} leaves nothing of sequences of {length} tokens", field="skip_first"
        )
    if source.resolve() == destination.resolve():
        raise CheckpointError(f"{source}: is the destination too; choose another destination")


def check_length(architecture: Architecture, length: int) -> None:
    """Refuse sequences that are longer than the model has positions.

    Raises:
        InvalidArgumentError: They are; with both numbers.
    """
    if length > architecture.max_position:
        raise InvalidArgumentError(
            f"sequences of {length} tokens: the model has {architecture.max_position} positions",
            field="sequence_length",
        )
