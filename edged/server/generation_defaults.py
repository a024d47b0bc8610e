"""What a model's own files say about generation: sampling defaults and end-of-sequence tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from edged.decoding.sampling import Sampling, resolve_sampling
from edged.errors import CheckpointError, InvalidArgumentError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults of one model.

    Attributes:
        sampling: Used where a request is silent. ``do_sample`` false or absent means greedy, as in transformers.
        eos_token_ids: Tokens that end an answer, in the order of the file.
        vocabulary: Number of token ids that the model has logits for.
    """

    sampling: Sampling
    eos_token_ids: tuple[int, ...]
    vocabulary: int

    @classmethod
    def load(cls, folder: Path) -> GenerationDefaults:
        """Read ``config.json`` and, if there is one, ``generation_config.json`` of a model folder.

        Raises:
            CheckpointError: A file is missing or damaged, or a value is outside its range.
        """
        model = _read_object(folder / "config.json")
        path = folder / "generation_config.json"
        generation = _read_object(path) if path.exists() else {}
        vocabulary = model.get("vocab_size")
        if not _is_count(vocabulary) or vocabulary == 0:
            raise CheckpointError(
                f"{folder / 'config.json'}: vocab_size is {vocabulary!r}; it must be a whole number above 0"
            )
        eos = generation.get("eos_token_id", model.get("eos_token_id"))
        return cls(
            sampling=_sampling(generation, vocabulary, path),
            eos_token_ids=_eos_token_ids(eos, vocabulary, folder),
            vocabulary=vocabulary,
        )


def _sampling(generation: dict[str, Any], vocabulary: int, path: Path) -> Sampling:
    samples = generation.get("do_sample") or False
    values = {key: generation.get(key) for key in ("temperature", "top_k", "top_p")}
    for key, value in values.items():
        wanted = int if key == "top_k" else (int, float)
        if value is not None and (isinstance(value, bool) or not isinstance(value, wanted)):
            raise CheckpointError(f"{path}: {key} is {value!r}; it must be a number")
    try:
        return resolve_sampling(
            temperature=(1.0 if values["temperature"] is None else values["temperature"]) if samples else 0.0,
            top_k=min(values["top_k"] or 0, vocabulary),
            top_p=values["top_p"],
            seed=0,
            vocabulary=vocabulary,
        )
    except InvalidArgumentError as error:
        raise CheckpointError(f"{path}: {error.message}") from error


def _eos_token_ids(value: object, vocabulary: int, folder: Path) -> tuple[int, ...]:
    ids = tuple(value) if isinstance(value, list) else (() if value is None else (value,))
    for token_id in ids:
        if not _is_count(token_id) or token_id >= vocabulary:
            raise CheckpointError(
                f"{folder}: eos_token_id holds {token_id!r}; it must be a token id from 0 to {vocabulary - 1}"
            )
    return ids


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; import the model again with edgectl import"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); import the model again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__} where an object is needed")
    return value
