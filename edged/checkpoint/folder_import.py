"""Turns a folder of Hugging Face's form into a model folder: the files that edged reads, in one form.

What differs between tools comes out the same: one file of weights of any name is ``model.safetensors``, the
quantization that AutoGPTQ and AutoAWQ keep in files of their own stands in ``config.json``, a chat template in
``chat_template.json`` becomes ``chat_template.jinja``, and ``tokenizer.model`` gets a ``tokenizer.json`` beside it.
Tensors are not touched; a quantized model stays as it is.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

from edged.checkpoint.json_file import read_json_object, read_optional_json_object
from edged.checkpoint.model_files import ModelFiles, choose_files
from edged.checkpoint.model_folder import (
    CONFIG_FILE,
    TEMPLATE_FOLDER,
    absolute,
    check_destination,
    new_folder,
    publish,
    write_json,
)
from edged.checkpoint.safetensors_files import SINGLE_FILE, read_index
from edged.checkpoint.tokenizer import Tokenizer
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Progress = Callable[[str, int, int], None]

_COPY_BYTES = 8 << 20
# Written anew, or taken up by another file.
_NOT_COPIED = (CONFIG_FILE, "chat_template.json", "quantize_config.json", "quant_config.json")
_QUANTIZERS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
# Names programs that would be run with the model; edged runs none.
_DROPPED_KEYS = ("auto_map", "custom_pipelines")


def import_folder(
    source: Path,
    destination: Path,
    *,
    copy: bool = False,
    progress: Progress | None = None,
    overwrite: bool = False,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write the model folder ``destination`` from a folder of Hugging Face's form.

    Args:
        source: Holds ``config.json``, safetensors files and a tokenizer.
        destination: The folder to make. It must not exist or be empty, unless ``overwrite``.
        copy: Copy the weights also where both folders lie on one file system; otherwise they share them (hard links):
            then nothing may write into the source's files.
        progress: Called with what is being done, bytes done and bytes in all.
        overwrite: Replace a model folder that edged made; any other folder is refused all the same.
        finish: Called with the complete folder before it takes its place; what it raises ends the import.

    Raises:
        CheckpointError: The source is no model, or damaged; the destination is taken; the disk is too small. Nothing
            was written.
    """
    source, destination = absolute(source), absolute(destination)
    _check_apart(source, destination)
    files = choose_files(_names(source), str(source))
    if not files.weights:
        raise CheckpointError(f"{source}: holds GGUF files; give one of them: {', '.join(files.ggufs[:3])}")
    weights = _weights(source, files)
    config = normalized_config(source)
    check_destination(destination, overwrite=overwrite)
    total = sum((source / name).stat().st_size for name in weights)
    with new_folder(destination, total if copy or not _can_link(source, destination.parent) else 0) as folder:
        _take_small_files(source, files, folder)
        write_json(folder / CONFIG_FILE, config)
        if not (folder / "tokenizer.json").exists():
            _convert_tokenizer(folder)
        done = 0
        for name, new_name in weights.items():
            done = _take(
                source / name, folder / new_name, copy=copy, done=done, total=total, progress=progress
            )
        if files.index:
            shutil.copyfile(source / files.index, folder / files.index)
        if finish is not None:
            finish(folder)
        publish(folder, destination)


def copy_small_files(source: Path, folder: Path) -> None:
    """Give ``folder`` everything of a model but its configuration and its weights.

    Raises:
        CheckpointError: The source is no model folder, or its tokenizer is not supported.
    """
    _take_small_files(source, choose_files(_names(source), str(source)), folder)
    if not (folder / "tokenizer.json").exists():
        _convert_tokenizer(folder)


def normalized_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a folder, with the quantization that other files tell of and without names of programs.

    Raises:
        CheckpointError: A file is damaged.
    """
    config = read_json_object(folder / CONFIG_FILE)
    for key in _DROPPED_KEYS:
        config.pop(key, None)
    if config.get("quantization_config") is None:
        for name, method in _QUANTIZERS.items():
            if (folder / name).exists():
                config["quantization_config"] = {"quant_method": method, **read_json_object(folder / name)}
                break
    return config


def _names(source: Path) -> list[str]:
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such folder")
    names = [path.name for path in source.iterdir() if path.is_file()]
    names += [f"{TEMPLATE_FOLDER}/{path.name}" for path in (source / TEMPLATE_FOLDER).glob("*.jinja")]
    return names


def _weights(source: Path, files: ModelFiles) -> dict[str, str]:
    """Each file of weights and its name in the model folder."""
    if files.single:
        return {files.single: SINGLE_FILE}
    shards = sorted(set(read_index(source / files.index).values()))
    missing = [name for name in shards if name not in files.weights]
    if missing:
        raise CheckpointError(f"{source}: the shard {missing[0]} is missing; {files.index} names it")
    return {name: name for name in shards}


def _check_apart(source: Path, destination: Path) -> None:
    real, other = source.resolve(), destination.resolve()
    if real == other:
        raise CheckpointError(f"{source}: is the destination too; a model folder in place needs no import")
    if real in other.parents or other in real.parents:
        raise CheckpointError(
            f"{destination}: source and destination lie in each other; choose another destination"
        )


def _take_small_files(source: Path, files: ModelFiles, folder: Path) -> None:
    for name in files.small:
        if name not in _NOT_COPIED:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)
    template = read_optional_json_object(source / "chat_template.json").get("chat_template")
    if isinstance(template, str) and not (folder / "chat_template.jinja").exists():
        (folder / "chat_template.jinja").write_text(template, "utf-8")


def _convert_tokenizer(folder: Path) -> None:
    Tokenizer.load(folder).save(folder)


def _can_link(source: Path, parent: Path) -> bool:
    while not parent.exists():
        parent = parent.parent
    return source.stat().st_dev == parent.stat().st_dev


def _take(source: Path, target: Path, *, copy: bool, done: int, total: int, progress: Progress | None) -> int:
    """Link or copy one file; return the bytes done so far."""
    real = source.resolve()  # the Hub's cache holds links to its files
    size = real.stat().st_size
    if not copy and _link(real, target):
        if progress is not None:
            progress("weights", done + size, total)
        return done + size
    with real.open("rb") as reader, target.open("xb") as writer:
        while part := reader.read(_COPY_BYTES):
            writer.write(part)
            done += len(part)
            if progress is not None:
                progress("weights", done, total)
    return done


def _link(source: Path, target: Path) -> bool:
    """Share a file; False where the file system or the system does not allow it."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True
