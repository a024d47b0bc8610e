"""Packs a fake-quantized checkpoint at 2 bits a weight, exactly, or refuses it (BitCPM4: {-1, 0, +1} times a scale)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from edged.checkpoint.folder_import import copy_small_files, normalized_config
from edged.checkpoint.model_folder import (
    CONFIG_FILE,
    absolute,
    check_destination,
    new_folder,
    publish,
    write_json,
)
from edged.checkpoint.safetensors_files import SINGLE_FILE, WeightFiles
from edged.checkpoint.safetensors_header import TensorSpec
from edged.checkpoint.safetensors_writer import SafetensorsWriter
from edged.checkpoint.ternary import WORD, not_ternary, ternary_form
from edged.errors import CheckpointError, InvalidArgumentError
from edged.models.architecture import Architecture
from edged.models.weights import EMBEDDING, HEAD
from edged.quantize.source import DTYPES, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from edged.models.weights import WeightSpec

    Progress = Callable[[str, int, int], None]

ROW = 0
GROUPS = (ROW, 256, 128, 64, 32)
"""Groups that are looked for, the largest first; 0 is a row."""


def pack_ternary(
    source: Path,
    destination: Path,
    *,
    dtype: str = "",
    progress: Progress | None = None,
    overwrite: bool = False,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write a folder whose linears are ternary in 2 bits, with exactly the numbers of a dense one.

    The group is the largest of :data:`GROUPS` with which every linear of the layers is ternary. Embedding, LM head, norms
    and biases stay wide.

    Args:
        source: The model folder.
        destination: The folder to make. It must not exist or be empty, unless ``overwrite``.
        dtype: Type of what stays wide; empty: as it is.
        progress: Called with what is being done, how much of it is done, and how much there is.
        overwrite: Replace a model folder that edged made.
        finish: Called with the complete folder before it takes its place; what it raises ends the work.

    Raises:
        CheckpointError: The weights are not ternary, with the share of groups that are not; the model is refused, or holds
            NaN or infinity; the destination is taken; the disk is too small. Nothing was written.
        InvalidArgumentError: An unknown ``dtype``.
    """
    source, destination = absolute(source), absolute(destination)
    if dtype and dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}", field="dtype")
    if source.resolve() == destination.resolve():
        raise CheckpointError(f"{source}: is the destination too; choose another destination")
    check_destination(destination, overwrite=overwrite)
    report = progress or _silent
    with WeightFiles.open(source) as files:
        dense = Source(files, Architecture.read(source), dtype)
        dense.check_wide(is_packed)
        group = find_group(dense, report)
        specs = list(_specs(dense, group))
        total = sum(spec.nbytes for spec in specs)
        config = normalized_config(source)
        config["quantization_config"] = {
            "quant_method": "ternary",
            "bits": 2,
            "group_size": group or -1,
            "lm_head": False,
        }
        if dtype:
            config.update(dict.fromkeys({"torch_dtype", *({"dtype"} & {*config})}, dtype))
        with new_folder(destination, total) as folder:
            copy_small_files(source, folder)
            write_json(folder / CONFIG_FILE, config)
            written = 0
            with SafetensorsWriter(folder / SINGLE_FILE, specs) as writer:
                for name, array in _content(dense, group):
                    writer.write(name, array)
                    written += array.nbytes
                    report("weights", written, total)
            if finish is not None:
                finish(folder)
            publish(folder, destination)


def find_group(dense: Source, report: Progress) -> int:
    """The largest group with which every linear is ternary; 0 is a row.

    Raises:
        CheckpointError: There is none; says for each group what share of them is not, and where the first is.
    """
    linears = [spec for spec in dense.specs if is_packed(spec)]
    for spec in linears:
        if spec.shape[1] % WORD:
            raise CheckpointError(
                f"{dense.files.folder}: {spec.name} has {spec.shape[1]} inputs; ternary linears have multiples of {WORD}"
            )
    possible = [size for size in GROUPS if not size or all(spec.shape[1] % size == 0 for spec in linears)]
    wrong, count = dict.fromkeys(possible, 0), dict.fromkeys(possible, 0)
    first: dict[int, str] = {}
    for index, spec in enumerate(linears):
        weight = dense.matrix(spec).numpy()
        for size in possible:
            found = not_ternary(weight, size or spec.shape[1])
            wrong[size] += int(found.sum())
            count[size] += found.size
            if found.any() and size not in first:
                row, place = map(int, np.argwhere(found)[0])
                module = next(each.module for each in reversed(spec.sources) if each.start <= row)
                first[size] = f"{module}, group {place}"
        report("looking", index + 1, len(linears))
    exact = [size for size in possible if not wrong[size]]
    if exact:
        return exact[0]
    shares = ", ".join(
        f"{100 * wrong[size] / count[size]:.3g} % of {f'groups of {size}' if size else 'rows'}"
        for size in possible
    )
    raise CheckpointError(
        f"{dense.files.folder}: is not ternary: {shares} are not -1, 0 and +1 times one number that float16 has (the first "
        f"with the smallest: {first[possible[-1]]}); quantize to 4 bits instead"
    )


def is_packed(spec: WeightSpec) -> bool:
    """Whether a weight is a linear of a layer."""
    return len(spec.shape) == 2 and spec.name not in (EMBEDDING, HEAD)


def module_specs(module: str, outputs: int, inputs: int, group: int) -> list[TensorSpec]:
    """The tensors that a module becomes."""
    return [
        TensorSpec(f"{module}.qweight", "I32", (outputs, inputs // WORD)),
        TensorSpec(f"{module}.scales", "F16", (outputs, inputs // group)),
    ]


def _specs(dense: Source, group: int) -> Iterator[TensorSpec]:
    for spec in dense.specs:
        for part in spec.sources:
            if is_packed(spec):
                outputs, inputs = part.shape
                yield from module_specs(part.module, outputs, inputs, group or inputs)
            else:
                yield TensorSpec(part.name, dense.kind(part.name), part.shape)


def _content(dense: Source, group: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    for spec in dense.specs:
        if not is_packed(spec):
            for part in spec.sources:
                for piece in dense.pieces(part.name):
                    yield part.name, piece
            continue
        words, scales = ternary_form(dense.matrix(spec).numpy(), group or spec.shape[1])
        for part in spec.sources:
            rows = slice(part.start, part.start + part.shape[0])
            yield f"{part.module}.qweight", words[rows].view(np.int32)
            yield f"{part.module}.scales", scales[rows]


def _silent(_what: str, _done: int, _total: int) -> None:
    pass
