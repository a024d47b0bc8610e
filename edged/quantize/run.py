"""Quantizes a model folder into another one, as a whole or not at all, and goes on where a killed run stopped."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from edged import __version__
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
from edged.checkpoint.tokenizer import Tokenizer
from edged.errors import InvalidArgumentError
from edged.models.architecture import Architecture
from edged.models.decoder import Decoder
from edged.quantize.calibration import Calibration, cut_sequences
from edged.quantize.checks import check_length, check_words
from edged.quantize.gptq import quantize_weight
from edged.quantize.gptq_files import module_specs, module_tensors, quantization_config
from edged.quantize.operators import CalibrationOperators
from edged.quantize.source import Source
from edged.quantize.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy as np

    from edged.quantize.recipe import Recipe
    from edged.quantize.state import Results

    Progress = Callable[[str, int, int], None]

SEQUENCES, LENGTH = 128, 512
"""How much calibration is used where nothing else is asked for."""


def prepare_calibration(
    source: Path,
    documents: list[str],
    *,
    count: int = SEQUENCES,
    length: int = LENGTH,
    trial: bool = False,
) -> Calibration:
    """Cut documents into sequences for a model.

    Raises:
        CheckpointError: The model's configuration or tokenizer is refused.
        InvalidArgumentError: Too little text, or sequences longer than the model has positions.
    """
    architecture = Architecture.read(source)
    check_length(architecture, length)
    tokenizer = Tokenizer.load(source)
    tokenizer.check_embedding(architecture.vocabulary)
    least = max(architecture.hidden, architecture.q_width, architecture.intermediate)
    return cut_sequences(documents, tokenizer, count=count, length=length, least=least, trial=trial)


@torch.inference_mode()
def quantize(
    source: Path,
    destination: Path,
    recipe: Recipe,
    calibration: Calibration | None = None,
    *,
    dtype: str = "",
    device: str = "cpu",
    progress: Progress | None = None,
    overwrite: bool = False,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write the GPTQ checkpoint ``destination`` from a dense model folder.

    Args:
        source: The model folder.
        destination: The folder to make. It must not exist or be empty, unless ``overwrite``.
        recipe: How.
        calibration: What the model is run on; every method but ``rtn`` needs it.
        dtype: Type of what stays wide (embedding, LM head, norms, biases); empty: as it is.
        device: ``cpu`` or ``cuda``.
        progress: Called with what is being done, how much of it is done, and how much there is.
        overwrite: Replace a model folder that edged made.
        finish: Called with the complete folder before it takes its place; what it raises ends the work.

    Raises:
        CheckpointError: The model is refused, or holds NaN or infinity; the destination is taken; the disk is too small.
        InvalidArgumentError: The recipe does not fit the model.
    """
    source, destination = absolute(source), absolute(destination)
    if recipe.calibrated and calibration is None:
        raise InvalidArgumentError(f"{recipe.method} needs calibration text", field="calibration")
    check_words(
        source,
        destination,
        recipe,
        dtype=dtype,
        device=device,
        length=None if calibration is None else calibration.sequences.shape[1],
    )
    chosen = torch.device(device)
    report = progress or _silent
    with WeightFiles.open(source) as files:
        dense = Source(files, Architecture.read(source), dtype)
        recipe.check(dense.architecture)
        request = _request(source, files, recipe, calibration, dtype)
        if State.finish_published(destination, request):
            return
        check_destination(destination, overwrite=overwrite)
        dense.check_wide(recipe.covers)
        specs = _specs(dense, recipe)
        result_bytes = sum(spec.nbytes for spec in specs)
        with State.open(
            destination, request, _state_bytes(dense, recipe, calibration), result_bytes
        ) as state:
            total = sum(recipe.covers(spec) for spec in dense.specs)

            def done(name: str, count: int) -> None:
                del name
                report("quantizing", count, total)

            report("quantizing", 0, total)
            if calibration is None or not recipe.calibrated:
                _round_all(dense, recipe, state, chosen, done)
            else:
                operators = CalibrationOperators(
                    dense, recipe, calibration.sequences, state=state, device=chosen, done=done
                )
                decoder: Decoder[Any] = Decoder(dense.architecture, {spec.name: spec for spec in dense.specs})
                decoder.forward(operators)
            config = normalized_config(source)
            config["quantization_config"] = quantization_config(recipe)
            if dtype:
                config.update(dict.fromkeys({"torch_dtype", *({"dtype"} & {*config})}, dtype))
            with new_folder(destination, result_bytes) as folder:
                copy_small_files(source, folder)
                write_json(folder / CONFIG_FILE, config)
                _write_weights(folder / SINGLE_FILE, specs, _content(dense, recipe, state), report)
                if finish is not None:
                    finish(folder)
                state.note_published(folder, request)
                publish(folder, destination)
            state.remove()


def _round_all(
    dense: Source, recipe: Recipe, state: State, device: torch.device, done: Callable[[str, int], None]
) -> None:
    """Each weight by itself, a stage each."""
    finished = state.stages
    for index, spec in enumerate(spec for spec in dense.specs if recipe.covers(spec)):
        if index >= finished:
            weight = quantize_weight(dense.matrix(spec).to(device), None, recipe, spec.name)
            results: Results = {}
            for source in spec.sources:
                results |= module_tensors(source, weight)
            state.commit(index, results)
        done(spec.name, index + 1)


def _write_weights(
    path: Path,
    specs: list[TensorSpec],
    content: Iterator[tuple[str, np.ndarray[Any, Any]]],
    report: Progress,
) -> None:
    total = sum(spec.nbytes for spec in specs)
    written = 0
    with SafetensorsWriter(path, specs) as writer:
        for name, array in content:
            writer.write(name, array)
            written += array.nbytes
            report("weights", written, total)


def _specs(dense: Source, recipe: Recipe) -> list[TensorSpec]:
    """Every tensor of the new checkpoint."""
    specs: list[TensorSpec] = []
    for spec in dense.specs:
        for part in spec.sources:
            if recipe.covers(spec):
                specs += module_specs(
                    part.module, part.shape[0], spec.shape[1], recipe.group_of(spec.shape[1])
                )
            else:
                specs.append(TensorSpec(part.name, dense.kind(part.name), part.shape))
    return specs


def _content(dense: Source, recipe: Recipe, state: State) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Every tensor, in pieces: 4-bit modules from the stages' results, the others as they are or were changed."""
    for files in state.results():
        dense.restore(files)
        for name in files.names():
            if name not in dense.files:  # a changed vector is written with those that were not
                yield name, files.read_array(name)
    for spec in dense.specs:
        if not recipe.covers(spec):
            for part in spec.sources:
                for piece in dense.pieces(part.name):
                    yield part.name, piece


def _state_bytes(dense: Source, recipe: Recipe, calibration: Calibration | None) -> int:
    """What the state folder holds at most."""
    packed = sum(
        spec.nbytes
        for each in dense.specs
        if recipe.covers(each)
        for part in each.sources
        for spec in module_specs(part.module, part.shape[0], each.shape[1], recipe.group_of(each.shape[1]))
    )
    if calibration is None or not recipe.calibrated:
        return packed
    return packed + 8 * calibration.sequences.size * dense.architecture.hidden


def _request(
    source: Path, files: WeightFiles, recipe: Recipe, calibration: Calibration | None, dtype: str
) -> dict[str, Any]:
    """All that decides the results; files are known by their sizes and times."""
    weights = sorted({files.info(name).file for name in files.names()})
    known = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in weights]
    config = json.dumps(normalized_config(source), sort_keys=True)
    return {
        "edged": __version__,
        "weights": known,
        "config": hashlib.sha256(config.encode()).hexdigest(),
        "recipe": asdict(recipe),
        "calibration": None if calibration is None or not recipe.calibrated else calibration.digest,
        "dtype": dtype,
    }


def _silent(_what: str, _done: int, _total: int) -> None:
    pass
