"""What a model's own files say about sampling, for requests that are silent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.checkpoint.json_file import read_optional_json_object
from edged.decoding.sampling import Sampling, resolve_sampling
from edged.errors import CheckpointError, InvalidArgumentError

if TYPE_CHECKING:
    from pathlib import Path

_NUMBER = (int, float)
_KINDS: dict[str, tuple[type, ...]] = {
    "temperature": _NUMBER,
    "top_k": (int,),
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "typical_p": _NUMBER,
    "repetition_penalty": _NUMBER,
}


def read_sampling_defaults(folder: Path, vocabulary: int) -> Sampling:
    """Sampling defaults of ``generation_config.json``.

    ``do_sample`` false or absent means greedy, as in transformers; true without a temperature means 1. A ``top_k``
    beyond the vocabulary allows every token.

    Args:
        folder: The model folder; it need not have the file.
        vocabulary: Token ids of the model.

    Raises:
        CheckpointError: The file is damaged, or a value has a wrong type or range.
    """
    path = folder / "generation_config.json"
    values = read_optional_json_object(path)
    for key, kind in _KINDS.items():
        value = values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise CheckpointError(f"{path}: {key} is {value!r}; it must be a number")
    temperature = values.get("temperature")
    if not values.get("do_sample"):
        temperature = 0.0
    elif temperature is None:
        temperature = 1.0
    try:
        return resolve_sampling(
            temperature=temperature,
            top_k=min(values.get("top_k") or 0, vocabulary),
            top_p=values.get("top_p"),
            min_p=values.get("min_p"),
            typical_p=values.get("typical_p"),
            repetition_penalty=values.get("repetition_penalty"),
            seed=0,
            vocabulary=vocabulary,
        )
    except InvalidArgumentError as error:
        raise CheckpointError(f"{path}: {error.message}") from error
