"""Turns a GGUF file into a model folder: configuration, weights, tokenizer, generation defaults.

The folder is built beside its destination under a temporary name and takes its place when it is complete and on the
disk. Whatever ends the import before that, nothing is left but the destination as it was; after a power cut or a
SIGKILL the temporary folder is removed by the next import to the same place.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edged.checkpoint.gguf_file import GgufFile, can_dequantize
from edged.checkpoint.gguf_llama import TensorSource, exact_decimal, head_order, llama_config, llama_tensors
from edged.checkpoint.gguf_tokenizer import GgufTokenizer, build_tokenizer
from edged.checkpoint.safetensors_files import SINGLE_FILE
from edged.checkpoint.safetensors_header import TensorSpec
from edged.checkpoint.safetensors_writer import SafetensorsWriter, bfloat16_bits, fsync_folder
from edged.errors import CheckpointError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Progress = Callable[[str, int, int], None]

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Element types of the weights that an import can write, and their names in safetensors."""

_ARCHITECTURES = {"llama": (llama_config, llama_tensors)}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_LOCK = ".lock"
_FILES = frozenset(
    {"config.json", "generation_config.json", SINGLE_FILE, "tokenizer.json", "tokenizer_config.json"}
)
_SPARE_BYTES = 64 << 20  # tokenizer and file system's own needs, on top of the weights


def import_gguf(
    source: Path,
    destination: Path,
    *,
    dtype: str = "float32",
    progress: Progress | None = None,
    overwrite: bool = False,
) -> None:
    """Write the model folder ``destination`` from a GGUF file.

    Args:
        source: The GGUF file; its architecture and tensor types must be supported.
        destination: The folder to make. It must not exist or be empty, unless ``overwrite``.
        dtype: Element type of the weights: float32, float16 or bfloat16.
        progress: Called with what is being done ("tokenizer", "weights"), bytes done and bytes in all.
        overwrite: Replace a model folder that an earlier import made; any other folder is refused all the same.

    Raises:
        CheckpointError: The file is damaged or holds what is not supported (named), the destination is taken, or
            the disk is too small. Nothing was written.
        InvalidArgumentError: Unknown ``dtype``.
    """
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}", field="dtype")
    source, destination = Path(source), Path(os.path.abspath(destination))  # noqa: PTH100 - keeps symbolic links
    report = progress or _silent
    with GgufFile(source) as file:
        config, tensors = _plan(file)
        report("tokenizer", 0, 1)
        tokenizer = build_tokenizer(file)
        if len(tokenizer.tokens) != config["vocab_size"]:
            raise CheckpointError(
                f"{source}: has {len(tokenizer.tokens)} tokens, but token_embd.weight has {config['vocab_size']} rows"
            )
        report("tokenizer", 1, 1)
        _check_destination(destination, overwrite=overwrite)
        specs = [TensorSpec(name, DTYPES[dtype], item.shape) for name, item in tensors.items()]
        with _temporary_folder(destination, sum(spec.nbytes for spec in specs)) as folder:
            _write_weights(file, tensors, specs, folder / SINGLE_FILE, report)
            _write_json(folder / "config.json", _model_config(config, tokenizer, dtype))
            _write_json(folder / "generation_config.json", _generation_config(file, tokenizer))
            _write_json(folder / "tokenizer_config.json", tokenizer.config)
            tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
            _publish(folder, destination)


def _silent(_what: str, _done: int, _total: int) -> None:
    pass


def _plan(file: GgufFile) -> tuple[dict[str, Any], dict[str, TensorSource]]:
    """Decide everything that can refuse the file before anything is written."""
    architecture = file.get("general.architecture", "")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: the architecture general.architecture = {architecture!r} is not supported; "
            f"supported: {', '.join(_ARCHITECTURES)}"
        )
    if file.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{file.path}: is one part of {file.get('split.count', 1)}; merge the parts first"
        )
    refused = sorted(
        {tensor.type.name for tensor in file.tensors.values() if not can_dequantize(tensor.type)}
    )
    if refused:
        raise CheckpointError(f"{file.path}: tensor types that are not supported: {', '.join(refused)}")
    make_config, make_tensors = _ARCHITECTURES[architecture]
    config = make_config(file)
    return config, make_tensors(file, config)


def _model_config(config: dict[str, Any], tokenizer: GgufTokenizer, dtype: str) -> dict[str, Any]:
    ids = dict(tokenizer.token_ids)
    if tokenizer.eos_token_ids:
        ids["eos_token_id"] = tokenizer.eos_token_ids[0]
    return {**config, **ids, "torch_dtype": dtype}


def _generation_config(file: GgufFile, tokenizer: GgufTokenizer) -> dict[str, Any]:
    config: dict[str, Any] = dict(tokenizer.token_ids)
    if tokenizer.eos_token_ids:
        config["eos_token_id"] = tokenizer.eos_token_ids
    for key, name in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            config[name] = exact_decimal(value) if isinstance(value, float) else value
    if config.get("temperature", 0) > 0:
        config["do_sample"] = True
    return config


def _write_weights(
    file: GgufFile,
    tensors: dict[str, TensorSource],
    specs: list[TensorSpec],
    path: Path,
    report: Progress,
) -> None:
    total = sum(spec.nbytes for spec in specs)
    done = 0
    report("weights", 0, total)
    with SafetensorsWriter(path, specs) as writer:
        for spec in specs:
            for part in _converted(file, tensors[spec.name], spec):
                writer.write(spec.name, part)
                done += part.nbytes
                report("weights", done, total)


def _converted(file: GgufFile, item: TensorSource, spec: TensorSpec) -> Iterator[np.ndarray[Any, Any]]:
    order = None
    if item.heads and len(item.shape) == 2:
        order = head_order(item.shape[0], item.heads)
    for values in file.read_rows(item.tensor, order):
        if item.heads and len(item.shape) == 1:  # a bias: one row, whose elements are permuted
            values = values[..., head_order(item.shape[0], item.heads)]  # noqa: PLW2901
        yield _cast(values, spec, file)


def _cast(values: np.ndarray[Any, Any], spec: TensorSpec, file: GgufFile) -> np.ndarray[Any, Any]:
    if not np.isfinite(values).all():
        raise CheckpointError(f"{file.path}: tensor {spec.name!r} holds NaN or infinity; the file is damaged")
    if spec.dtype == "BF16":
        return bfloat16_bits(values)
    if spec.dtype == "F16":
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if not np.isfinite(half).all():
            raise CheckpointError(
                f"{file.path}: tensor {spec.name!r} exceeds the range of float16; import with dtype bfloat16 or float32"
            )
        return half
    return values


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False) + "\n", "utf-8")


def _check_destination(destination: Path, *, overwrite: bool) -> None:
    if not os.path.lexists(destination):
        return
    if not destination.is_dir():
        raise CheckpointError(f"{destination}: exists and is no folder; choose another destination")
    present = sorted(entry.name for entry in destination.iterdir())
    if present and not overwrite:
        raise CheckpointError(
            f"{destination}: is not empty; choose another destination or allow overwriting it"
        )
    foreign = [name for name in present if name not in _FILES]
    if foreign:
        raise CheckpointError(
            f"{destination}: holds {foreign[0]!r}, which no import wrote; it is not overwritten, remove it yourself"
        )


@contextlib.contextmanager
def _temporary_folder(destination: Path, weight_bytes: int) -> Iterator[Path]:
    """Make a folder beside ``destination`` that is gone when the block ends, unless it was renamed."""
    parent = destination.parent
    made = _make_parents(parent)
    folder = parent / f".{destination.name}.{secrets.token_hex(4)}.importing"
    try:
        _remove_stale(destination)
        free = shutil.disk_usage(parent).free
        if free < weight_bytes + _SPARE_BYTES:
            raise CheckpointError(
                f"{parent}: the model needs {_mebibytes(weight_bytes + _SPARE_BYTES)}, {_mebibytes(free)} are free"
            )
        folder.mkdir()
        with (folder / _LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    except OSError as error:
        raise CheckpointError(f"{destination}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for path in reversed(made):
            with contextlib.suppress(OSError):  # not empty: it holds the model
                path.rmdir()


def _make_parents(parent: Path) -> list[Path]:
    missing = []
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    missing.reverse()
    try:
        parent = missing[-1] if missing else parent
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{parent}: cannot be made: {error.strerror}") from error
    return missing


def _remove_stale(destination: Path) -> None:
    """Remove what an import that was killed left: its lock is free."""
    for folder in destination.parent.glob(f".{glob.escape(destination.name)}.*.importing"):
        with contextlib.suppress(OSError), (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, destination: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    (folder / _LOCK).unlink()
    fsync_folder(folder)
    if destination.is_dir() and any(destination.iterdir()):
        # A folder cannot be renamed onto one that is not empty; the old one steps aside first.
        old = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.replaced")
        destination.rename(old)
        try:
            folder.rename(destination)
        except BaseException:
            old.rename(destination)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        folder.rename(destination)
    fsync_folder(destination.parent)


def _mebibytes(count: int) -> str:
    return f"{count / (1 << 20):.0f} MiB"
