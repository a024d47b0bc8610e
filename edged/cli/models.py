"""``edgectl models``: the models of this machine."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from edged.checkpoint.folder_record import FolderRecord, digest_file
from edged.checkpoint.model_folder import REFERENCE_FILE
from edged.checkpoint.models_folder import (
    ModelEntry,
    find_model,
    list_models,
    models_folder,
    models_folders,
    remove_model,
)
from edged.cli.exit_codes import ExitCode
from edged.cli.progress import ProgressBars
from edged.cli.terminal import say_error, show
from edged.errors import CheckpointError, EdgedError, NotFoundError
from edged.units import format_size

_ACTIONS = ("list", "inspect", "remove", "verify", "reference")


def command(
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help=f"{', '.join(_ACTIONS[:-1])} or {_ACTIONS[-1]}.")
    ] = "list",
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A model's name, or the path of its folder.", show_default=False
        ),
    ] = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="remove: do not ask.", show_default=False)] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", show_default=False)
    ] = False,
) -> int:
    """List, inspect, verify or remove the models of this machine.

    They lie in $EDGED_MODELS where that is set, else in /var/lib/edged/models and ~/.local/share/edged/models.
    inspect shows the architecture and what serving takes at 4K, 32K and 128K of context; verify reads every file and
    holds it to the digests of its import; reference computes the logits that engines are checked with. To fetch a model:
    edgectl pull.
    """
    if action not in _ACTIONS:
        raise typer.BadParameter(f"{action!r} is not one of {', '.join(_ACTIONS)}", param_hint="'ACTION'")
    if (name is None) != (action == "list"):
        problem = "list takes no MODEL; use inspect" if name else f"{action} needs a MODEL"
        raise typer.BadParameter(problem, param_hint="'MODEL'")
    if yes and action != "remove":
        raise typer.BadParameter("goes with remove", param_hint="'--yes'")
    try:
        if name is None:
            return _list(as_json=as_json)
        entry = find_model(name)
        return _act(action, entry, yes=yes, as_json=as_json)
    except NotFoundError as error:
        say_error(error.message)
        return ExitCode.NO
    except EdgedError as error:
        say_error(error.message)
        return ExitCode.FILE


def _act(action: str, entry: ModelEntry, *, yes: bool, as_json: bool) -> int:
    if action == "inspect":
        return _inspect(entry, as_json=as_json)
    if action == "verify":
        return _verify(entry)
    return _reference(entry) if action == "reference" else _remove(entry, yes=yes)


def _list(*, as_json: bool) -> int:
    entries = list_models()
    if as_json:
        models = [{**_summary(entry), "folder": str(entry.folder)} for entry in entries]
        content = {"folders": [str(folder) for folder in models_folders()], "models": models}
        sys.stdout.write(json.dumps(content, ensure_ascii=False, indent=2) + "\n")
        return ExitCode.DONE
    if entries:
        table = Table(box=None, pad_edge=False)
        for column in ("model", "architecture", "parameters", "weights", "size", "from"):
            right = column in ("parameters", "size")
            table.add_column(column, justify="right" if right else "left", no_wrap=True)
        for entry in entries:
            summary = _summary(entry)
            table.add_row(
                entry.name,
                summary.get("architecture", "?"),
                _millions(summary.get("parameters")),
                summary.get("weights", summary.get("fault", "?")),
                format_size(entry.size),
                _source(entry.record),
            )
        show(table, "")
    where = " and ".join(str(folder) for folder in dict.fromkeys(entry.folder.parent for entry in entries))
    count = f"{len(entries)} model{'' if len(entries) == 1 else 's'}"
    sys.stdout.write(f"{count} in {where or models_folder()}\n")
    return ExitCode.DONE


def _summary(entry: ModelEntry) -> dict[str, Any]:
    """What a line of the list says; a folder that is damaged says so instead."""
    # numpy and the tokenizers take a while to import; the check of the command line does not need them.
    from edged.cli.model_facts import describe_weights  # noqa: PLC0415
    from edged.models.architecture import Architecture  # noqa: PLC0415
    from edged.models.weights import parameter_count  # noqa: PLC0415

    summary: dict[str, Any] = {
        "name": entry.name,
        "bytes": entry.size,
        "source": None if entry.record is None else dict(entry.record.source),
    }
    try:
        architecture = Architecture.read(entry.folder)
        summary["architecture"] = architecture.model_type
        summary["parameters"] = parameter_count(architecture)
        summary["weights"] = describe_weights(entry.folder)
    except CheckpointError as error:
        summary["fault"] = error.message.removeprefix(f"{entry.folder}/")
    return summary


def _inspect(entry: ModelEntry, *, as_json: bool) -> int:
    from edged.cli.model_facts import check_model, facts  # noqa: PLC0415 - as above

    check_model(entry.folder)
    content = {
        "name": entry.name,
        "folder": str(entry.folder),
        "bytes": entry.size,
        **facts(entry.folder),
        "reference_logits": (entry.folder / REFERENCE_FILE).exists(),
        "source": None if entry.record is None else dict(entry.record.source),
    }
    if as_json:
        sys.stdout.write(json.dumps(content, ensure_ascii=False, indent=2) + "\n")
        return ExitCode.DONE
    yes = {True: "yes", False: "no"}
    lines = {
        "folder": content["folder"],
        "from": _source(entry.record),
        "architecture": f"{content['architecture']}, {content['layers']} layers of {content['hidden']}, heads "
        f"{content['heads']}, vocabulary {content['vocabulary']}",
        "parameters": f"{content['parameters']:,}",
        "weights": f"{content['weights']}, {format_size(entry.size)} on disk",
        "context": f"trained for {content['max_position']} tokens",
        "chat": f"templates {', '.join(content['templates']) or 'none'}; tools {yes[content['tools']]}; switch for "
        f"thinking {yes[content['thinking']]}",
        "reference": f"logits {'stored' if content['reference_logits'] else 'not stored'}",
    }
    sys.stdout.write(f"{entry.name}\n")
    for key, value in lines.items():
        sys.stdout.write(f"  {key:<13} {value}\n")
    sys.stdout.write("\n")
    table = Table(box=None, pad_edge=False)
    for column in ("context", "weights", "KV", "in all", ""):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for need in content["needs"]:
        table.add_row(*_need_row(need, content["max_position"]))
    show(table, f"One sequence in {content['dtype']} on the CPU; edgectl plan MODEL_FOLDER plans others.")
    return ExitCode.DONE


def _need_row(need: dict[str, Any], max_position: int) -> tuple[str, ...]:
    if "refused" in need:
        return (str(need["context_length"]), "", "", "", need["refused"])
    remark = f"beyond the {max_position} it was trained for" if need["beyond_the_model"] else ""
    sizes = (format_size(need[key]) for key in ("weights", "kv", "total"))
    return (str(need["context_length"]), *sizes, remark)


def _verify(entry: ModelEntry) -> int:
    from edged.cli.model_facts import check_model  # noqa: PLC0415 - as above

    check_model(entry.folder)
    if entry.record is None:
        say_error(f"{entry.folder}: has no digests: edged did not make this folder; its parts fit together")
        return ExitCode.NO
    faults = []
    with ProgressBars(f"verifying {entry.folder}") as bars:
        for number, (file, known) in enumerate(entry.record.files.items()):
            path = entry.folder / file
            if not path.is_file():
                faults.append(f"{file}: is missing")
            elif digest_file(path).sha256 != known.sha256:
                faults.append(f"{file}: is not as it was imported")
            bars.report("files", number + 1, len(entry.record.files))
    for fault in faults:
        say_error(f"{entry.folder}/{fault}")
    if not faults:
        sys.stdout.write(f"{entry.folder}: {len(entry.record.files)} files are as they were imported\n")
    return ExitCode.NO if faults else ExitCode.DONE


def _reference(entry: ModelEntry) -> int:
    from edged.cli.reference import make_reference  # noqa: PLC0415 - as above

    with ProgressBars(f"computing the reference logits of {entry.name}") as bars:
        reason = make_reference(entry.folder, bars.report)
    if reason:
        say_error(f"{entry.folder}: no reference logits: {reason}")
        return ExitCode.NO
    sys.stdout.write(f"wrote {entry.folder / REFERENCE_FILE}\n")
    return ExitCode.DONE


def _remove(entry: ModelEntry, *, yes: bool) -> int:
    if not yes:
        if not sys.stdin.isatty():
            say_error(f"removing {entry.folder} needs a yes: give --yes")
            return ExitCode.NO
        sys.stderr.write(f"Remove {entry.folder} ({format_size(entry.size)})? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            sys.stderr.write("nothing was removed\n")
            return ExitCode.NO
    remove_model(entry)
    sys.stdout.write(f"removed {entry.folder}, {format_size(entry.size)}\n")
    return ExitCode.DONE


def _source(record: FolderRecord | None) -> str:
    if record is None:
        return "?"
    source = record.source
    if source.get("kind") == "hub":
        return f"{source.get('repository')}@{str(source.get('commit'))[:8]}"
    return Path(str(source.get("path", "?"))).name


def _millions(parameters: int | None) -> str:
    if parameters is None:
        return "?"
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M"
