"""Turns a GGUF file into a model folder: configuration, weights, tokenizer, generation defaults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edged.checkpoint.gguf_file import GgufFile, can_dequantize
from edged.checkpoint.gguf_llama import TensorSource, family_of, head_order, model_config, model_tensors
from edged.checkpoint.gguf_packed import packed_arrays, packed_modules, packed_specs, quantization_config
from edged.checkpoint.gguf_rope import exact_decimal
from edged.checkpoint.gguf_ternary import TYPES as TERNARY_TYPES
from edged.checkpoint.gguf_ternary import ternary_arrays, ternary_config, ternary_modules, ternary_specs
from edged.checkpoint.gguf_tokenizer import GgufTokenizer, build_tokenizer
from edged.checkpoint.model_folder import absolute, check_destination, new_folder, publish, write_json
from edged.checkpoint.safetensors_files import SINGLE_FILE
from edged.checkpoint.safetensors_header import TensorSpec
from edged.checkpoint.safetensors_writer import SafetensorsWriter, bfloat16_bits
from edged.errors import CheckpointError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Progress = Callable[[str, int, int], None]

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Element types of the weights that an import can write, and their names in safetensors."""

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def import_gguf(
    source: Path,
    destination: Path,
    *,
    dtype: str = "float32",
    keep_4bit: bool = False,
    keep_ternary: bool = False,
    progress: Progress | None = None,
    overwrite: bool = False,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write the model folder ``destination`` from a GGUF file.

    Args:
        source: The GGUF file; its architecture and tensor types must be supported.
        destination: The folder to make. It must not exist or be empty, unless ``overwrite``.
        dtype: Element type of the weights: float32, float16 or bfloat16.
        keep_4bit: Leave linears of type Q4_0 in 4 bits, as a GPTQ checkpoint; ``dtype`` is that of the others.
        keep_ternary: Leave linears of types TQ1_0 and TQ2_0 ternary, in 2 bits; ``dtype`` is that of the others.
        progress: Called with what is being done ("tokenizer", "weights"), bytes done and bytes in all.
        overwrite: Replace a model folder that an earlier import made; any other folder is refused all the same.
        finish: Called with the complete folder before it takes its place; what it raises ends the import.

    Raises:
        CheckpointError: The file is damaged or holds what is not supported (named), the destination is taken, or
            the disk is too small. Nothing was written.
        InvalidArgumentError: Unknown ``dtype``, or both of what can be kept: a folder has one kind of packed linears.
    """
    if keep_4bit and keep_ternary:
        raise InvalidArgumentError(
            "a model folder has linears in 4 bits or ternary ones, not both; keep one kind",
            field="keep_ternary",
        )
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}", field="dtype")
    source, destination = Path(source), absolute(destination)
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
        check_destination(destination, overwrite=overwrite)
        packed: tuple[str, ...] = ()
        if keep_ternary:
            packed = ternary_modules(tensors)
            if not packed:
                raise CheckpointError(
                    f"{source}: holds no linears of type TQ1_0 or TQ2_0 that could stay ternary"
                )
            config["quantization_config"] = ternary_config(tensors, packed)
        elif keep_4bit:
            packed = packed_modules(tensors)
            if not packed:
                raise CheckpointError(f"{source}: holds no linears of type Q4_0 that could stay in 4 bits")
            config["quantization_config"] = quantization_config(tensors, packed)
        specs_of = ternary_specs if keep_ternary else packed_specs
        specs = {
            name: specs_of(name.removesuffix(".weight"), item.shape)
            if name.removesuffix(".weight") in packed
            else [TensorSpec(name, DTYPES[dtype], item.shape)]
            for name, item in tensors.items()
        }
        total = sum(spec.nbytes for each in specs.values() for spec in each)
        with new_folder(destination, total) as folder:
            _write_weights(file, tensors, specs, folder / SINGLE_FILE, report)
            write_json(folder / "config.json", _model_config(config, tokenizer, dtype))
            write_json(folder / "generation_config.json", _generation_config(file, tokenizer))
            write_json(folder / "tokenizer_config.json", tokenizer.config)
            tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
            if finish is not None:
                finish(folder)
            publish(folder, destination)


def _silent(_what: str, _done: int, _total: int) -> None:
    pass


def _plan(file: GgufFile) -> tuple[dict[str, Any], dict[str, TensorSource]]:
    """Decide everything that can refuse the file before anything is written."""
    family_of(file)
    if file.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{file.path}: is one part of {file.get('split.count', 1)}; merge the parts first"
        )
    refused = sorted(
        {tensor.type.name for tensor in file.tensors.values() if not can_dequantize(tensor.type)}
    )
    if refused:
        raise CheckpointError(f"{file.path}: tensor types that are not supported: {', '.join(refused)}")
    config = model_config(file)
    return config, model_tensors(file, config)


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
    specs: dict[str, list[TensorSpec]],
    path: Path,
    report: Progress,
) -> None:
    """Write every tensor; ``specs`` says what each becomes."""
    everything = [spec for each in specs.values() for spec in each]
    total = sum(spec.nbytes for spec in everything)
    done = 0
    report("weights", 0, total)
    with SafetensorsWriter(path, everything) as writer:
        for name, each in specs.items():
            for written, part in _converted(file, name, tensors[name], each):
                writer.write(written, part)
                done += part.nbytes
                report("weights", done, total)


def _converted(
    file: GgufFile, name: str, item: TensorSource, specs: list[TensorSpec]
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """What a tensor becomes, in pieces, each with the name of the tensor that it continues."""
    order = None
    if item.heads and len(item.shape) == 2:
        order = head_order(item.shape[0], item.heads)
    if len(specs) > 1:
        arrays = ternary_arrays if item.tensor.type in TERNARY_TYPES else packed_arrays
        yield from arrays(file, name.removesuffix(".weight"), item, order)
        return
    for values in file.read_rows(item.tensor, order):
        if item.heads and len(item.shape) == 1:  # a bias: one row, whose elements are permuted
            values = values[..., head_order(item.shape[0], item.heads)]  # noqa: PLW2901
        yield name, _cast(values, specs[0], file)


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
