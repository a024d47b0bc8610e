"""Which files of a repository or a folder make a model: the few that edged reads, and never a pickle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from edged.checkpoint.model_folder import CONFIG_FILE, TEMPLATE_FOLDER, is_shard
from edged.checkpoint.safetensors_files import INDEX_FILE, SINGLE_FILE
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

SMALL_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "quantize_config.json",
    "quant_config.json",
)
"""Files beside the weights that say what a model is, how its text becomes tokens and how it is generated."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Weights that are not the model's own, or the same again in another layout.
_NOT_THE_MODEL = ("adapter_", "consolidated", "optimizer", "training_", "mtp")


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model, as paths inside its repository.

    Attributes:
        small: Those of :data:`SMALL_FILES` that are there, and named chat templates.
        weights: Safetensors files in the root. With an index, the shards that it names are the model's.
        index: The index of the shards, or empty.
        ggufs: GGUF files, wherever they lie.
    """

    small: tuple[str, ...]
    weights: tuple[str, ...]
    index: str
    ggufs: tuple[str, ...]

    @property
    def single(self) -> str:
        """The one file that holds all weights, whatever its name; empty where there are shards or none."""
        if SINGLE_FILE in self.weights:
            return SINGLE_FILE
        return self.weights[0] if len(self.weights) == 1 and not self.index else ""


def choose_files(names: Iterable[str], where: str) -> ModelFiles:
    """Choose the files of a model.

    Args:
        names: Every file there is, as paths with slashes.
        where: Stands before messages.

    Raises:
        CheckpointError: There are no weights that can be read; the message says what there is instead.
    """
    files = sorted(names)
    small = [name for name in files if name in SMALL_FILES or _is_named_template(name)]
    ggufs = [name for name in files if name.lower().endswith(".gguf")]
    root = [name for name in files if "/" not in name and name.endswith(".safetensors")]
    weights = [name for name in root if not name.startswith(_NOT_THE_MODEL)]
    index = INDEX_FILE if INDEX_FILE in files and SINGLE_FILE not in weights else ""
    if SINGLE_FILE in weights:
        weights = [SINGLE_FILE]
    if not weights and not ggufs:
        raise CheckpointError(f"{where}: {_why_none(files)}")
    if len(weights) > 1 and not index:
        shards = f" and no {INDEX_FILE}" if all(map(is_shard, weights)) else f", none of them {SINGLE_FILE}"
        raise CheckpointError(
            f"{where}: holds {len(weights)} safetensors files{shards}: {', '.join(weights[:4])}"
        )
    if weights and CONFIG_FILE not in small:
        raise CheckpointError(f"{where}: holds weights but no {CONFIG_FILE}")
    return ModelFiles(tuple(small), tuple(weights), index, tuple(ggufs))


def choose_gguf(ggufs: Iterable[str], wanted: str, where: str) -> str:
    """Choose one GGUF file: the only one, or the only one whose name holds ``wanted`` (in any case).

    Raises:
        CheckpointError: None or several match; the message lists them.
    """
    files = list(ggufs)
    exact = [name for name in files if wanted in (name, PurePosixPath(name).name)]
    found = exact or [name for name in files if wanted.lower() in name.lower()]
    if len(found) == 1:
        return found[0]
    if not files:
        raise CheckpointError(f"{where}: holds no GGUF file")
    problem = f"{len(found)} match {wanted!r}" if wanted else "several are there"
    shown = ", ".join((found or files)[:12])
    raise CheckpointError(f"{where}: name one GGUF file, {problem}: {shown}")


def _is_named_template(name: str) -> bool:
    path = PurePosixPath(name)
    return str(path.parent) == TEMPLATE_FOLDER and path.suffix == ".jinja"


def _why_none(files: list[str]) -> str:
    pickles = [name for name in files if name.endswith(_PICKLES)]
    if any(name.startswith("adapter_") for name in files):
        return "holds an adapter, not a model; merge it into its model first"
    if pickles:
        return (
            f"has its weights only as pickles ({', '.join(pickles[:3])}), which can run any program and are never read; "
            "look for a safetensors version, or convert it with transformers' save_pretrained"
        )
    return f"holds neither {SINGLE_FILE} nor {INDEX_FILE} nor a GGUF file"
