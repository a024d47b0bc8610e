"""The doctor's checks of a configuration: the file, each model folder, the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.checkpoint.safetensors_files import WeightFiles
from edged.checkpoint.tokenizer import Tokenizer
from edged.cli.checks import FAILURE, OK, WARNING, Finding
from edged.cli.needs import Needs
from edged.cli.service_checks import check_listen, check_places
from edged.config_reader import ConfigFileError, read_config
from edged.errors import EdgedError
from edged.memory.available import available_memory
from edged.memory.ledger import plan_memory
from edged.models.architecture import Architecture
from edged.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from edged.config import Config, ModelConfig


def check_config(path: Path) -> tuple[list[Finding], Needs, Path | None]:
    """What there is to say about a configuration file.

    Returns:
        The findings, what its models need of this machine, and the socket that it names.
    """
    try:
        config = read_config(path)
    except ConfigFileError as error:
        faults = [
            Finding(
                "configuration",
                FAILURE,
                fault.render(str(path)).rsplit(f"; {fault.remedy}", 1)[0],
                fault.remedy,
            )
            for fault in error.faults
        ]
        return faults, Needs(), None
    names = [model.name for model in config.models]
    findings = [Finding("configuration", OK, f"{path}, models: {', '.join(names)}")]
    sound = True
    for model in config.models:
        found = list(_check_model(model))
        sound = sound and all(finding.level != FAILURE for finding in found)
        findings += found
    findings += [*check_listen(config.listen), *check_places(config)]
    if sound:
        findings += _check_budget(config)
    return findings, Needs.of(config.models), config.listen.unix


def _check_model(model: ModelConfig) -> Iterator[Finding]:
    """The folder of one model: its hyper-parameters, weights and tokenizer, without loading the weights."""
    name = f"model {model.name}"
    if not model.path.is_dir():
        if model.path.is_file():
            problem = f"{model.path} is a file, and a model is a folder"
            remedy = f"make one of it and name that: edgectl import {model.path} DEST"
        else:
            problem = f"there is no folder {model.path}"
            remedy = "correct path, or make it: edgectl pull OWNER/NAME DEST, edgectl import SOURCE DEST"
        yield Finding(name, FAILURE, problem, remedy)
        return
    try:
        architecture = Architecture.of(model)
        with WeightFiles.open(model.path) as weights:
            size = weights.nbytes
        tokenizer = Tokenizer.load(model.path)
        tokenizer.check_embedding(architecture.vocabulary)
    except EdgedError as error:
        yield Finding(
            name, FAILURE, error.message, "repair or replace the folder, for example with edgectl import"
        )
        return
    text = f"{architecture.model_type}, {architecture.layers} layers, {format_size(size)} of weights in {model.path}"
    if model.context_length > architecture.max_position:
        yield Finding(
            name,
            WARNING,
            f"context_length {model.context_length} is above the {architecture.max_position} it was trained for",
            f"write context_length: {architecture.max_position}, or expect worse answers beyond it",
        )
    else:
        yield Finding(name, OK, text)


def _check_budget(config: Config) -> Iterator[Finding]:
    try:
        ledger = plan_memory(config)
    except EdgedError as error:
        yield Finding("budget", FAILURE, error.message, "see edgectl plan")
        return
    available = available_memory()
    text = f"{format_size(ledger.total)} of a budget of {format_size(ledger.budget)}"
    if available is not None and ledger.total > available:
        yield Finding(
            "budget",
            WARNING,
            f"{text}, and only {format_size(available)} are available now",
            "stop what uses the memory, or lower context_length or max_sequences",
        )
    else:
        yield Finding("budget", OK, text)
