"""Reads the small JSON files of a model folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from edged.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

_MAX_BYTES = 64 << 20


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: The file is missing, larger than 64 MiB, no JSON, or no object.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path}: larger than {_MAX_BYTES >> 20} MiB")
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: this file is missing from the model folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return content


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; a missing file counts as an empty one.

    Raises:
        CheckpointError: The file is larger than 64 MiB, no JSON, or no object.
    """
    return read_json_object(path) if path.exists() else {}
