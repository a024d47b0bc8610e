"""``edgectl plan``: the static budget of a configuration, or of a model folder, before anything is loaded."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from edged.cli.exit_codes import ExitCode
from edged.cli.ledger_table import ledger_table
from edged.cli.terminal import say_error, show
from edged.config import Config
from edged.config_reader import ConfigFileError, parse_config, read_config
from edged.memory.buffers import ModelPlan
from edged.memory.fitting import largest_context_length, largest_max_sequences
from edged.memory.ledger import Ledger, compute_ledger
from edged.memory.model_rows import model_bytes
from edged.models.architecture import Architecture
from edged.units import format_size

_NAME = "model"
_MOST_SEQUENCES = 256
"""What the configuration allows."""


def command(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL_FOLDER", help="A model folder, instead of --config.", show_default=False
        ),
    ] = None,
    *,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-f", metavar="FILE", help="A configuration file.", show_default=False),
    ] = None,
    context_length: Annotated[
        int | None,
        typer.Option(
            "--context-length",
            metavar="N",
            help="Tokens of prompt and answer together; the model's most, up to 4096, otherwise.",
            show_default=False,
        ),
    ] = None,
    max_sequences: Annotated[
        int | None,
        typer.Option("--max-sequences", metavar="N", help="Requests that share steps.", show_default="1"),
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            "--prefill-chunk", metavar="N", help="Most prompt tokens in one step.", show_default="512"
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", "-d", metavar="DTYPE", help="float32, bfloat16 or float16.", show_default="float32"
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="cpu or cuda.", show_default="cpu")
    ] = None,
    executor: Annotated[
        str | None,
        typer.Option("--executor", metavar="EXECUTOR", help="auto, torch or tensorrt.", show_default="auto"),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            "-b",
            metavar="SIZE",
            help="What all must fit in, such as 4GiB.",
            show_default="80 % of the memory that is available",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", show_default=False)
    ] = False,
) -> int:
    """Print what a configuration or a model would hold in memory, and whether it fits.

    The exit status is 1 when it does not fit; then the last lines say what would.
    """
    keys = {
        "context_length": context_length,
        "max_sequences": max_sequences,
        "prefill_chunk": prefill_chunk,
        "dtype": dtype,
        "device": device,
        "executor": executor,
    }
    given = {key: value for key, value in keys.items() if value is not None}
    if (config is None) == (folder is None):
        raise typer.BadParameter(
            "give either a model folder or --config FILE", param_hint="'MODEL_FOLDER' / '--config'"
        )
    if config is not None:
        unused = [*given, *(["budget"] if budget is not None else [])]
        if unused:
            option = "--" + unused[0].replace("_", "-")
            raise typer.BadParameter(
                f"{option} goes with a model folder; with --config the file says it", param_hint=f"'{option}'"
            )
        planned = read_config(config.expanduser())
    elif folder is not None:
        planned = _config_of_folder(folder.expanduser(), given, budget)
    return _report(planned, as_json=as_json)


def _config_of_folder(folder: Path, keys: dict[str, Any], budget: str | None) -> Config:
    """The configuration that the options mean, held to the same rules as a file.

    Raises:
        typer.BadParameter: A value that a file could not hold either.
    """
    if folder.suffix in (".yaml", ".yml"):
        raise typer.BadParameter(
            f"{folder} looks like a configuration; write: edgectl plan --config {folder}",
            param_hint="'MODEL_FOLDER'",
        )
    if "context_length" not in keys:
        keys = {**keys, "context_length": min(4096, Architecture.read(folder).max_position)}
    content: dict[str, Any] = {"models": [{"name": _NAME, "path": str(folder.absolute()), **keys}]}
    if budget is not None:
        content["memory"] = {"budget": budget}
    try:
        return parse_config(yaml.safe_dump(content), folder=Path.cwd())
    except ConfigFileError as error:
        fault = error.faults[0]
        option = "--" + fault.path.rpartition(".")[2].replace("_", "-")
        raise typer.BadParameter(f"{fault.problem}; {fault.remedy}", param_hint=f"'{option}'") from None


def _report(config: Config, *, as_json: bool) -> int:
    """Print the ledger; the exit status says whether it fits."""
    ledger = compute_ledger(config)
    rooms = _rooms(config, ledger) if ledger.fits else {}
    if as_json:
        content = {
            "fits": ledger.fits,
            "total_bytes": ledger.total,
            "budget_bytes": ledger.budget,
            "rows": [asdict(row) for row in ledger.rows],
            "advice": ledger.advice,
            "largest": rooms,
        }
        sys.stdout.write(json.dumps(content, ensure_ascii=False, indent=2) + "\n")
    else:
        show(ledger_table(ledger.rows, total=ledger.total, budget=ledger.budget), "")
    if not ledger.fits:
        say_error(
            f"it does not fit: {format_size(ledger.total - ledger.budget)} are missing; {ledger.advice}"
        )
        return ExitCode.NO
    if not as_json:
        show(
            f"It fits, with {format_size(ledger.budget - ledger.total)} to spare.", *_sentences(config, rooms)
        )
    return ExitCode.DONE


def _rooms(config: Config, ledger: Ledger) -> dict[str, dict[str, int | None]]:
    """For each model: the largest context length and number of sequences that the budget has room for.

    Each with everything else as it is planned.
    """
    rooms: dict[str, dict[str, int | None]] = {}
    for model in config.models:
        plan = ModelPlan.of(model, Architecture.of(model))
        room = model_bytes(plan) + ledger.budget - ledger.total
        longest = max(plan.context_length, plan.architecture.max_position)
        rooms[model.name] = {
            "context_length": largest_context_length(replace(plan, context_length=longest), room),
            "max_sequences": largest_max_sequences(replace(plan, max_sequences=_MOST_SEQUENCES), room),
        }
    return rooms


def _sentences(config: Config, rooms: dict[str, dict[str, int | None]]) -> list[str]:
    """What else would fit, a line a model."""
    lines = []
    for model in config.models:
        largest = rooms[model.name]
        subject = f"{model.name}: up to" if len(config.models) > 1 else "The budget has room for up to"
        lines.append(
            f"{subject} context_length {largest['context_length']} with max_sequences {model.max_sequences}, "
            f"or max_sequences {largest['max_sequences']} with context_length {model.context_length}."
        )
    return lines
