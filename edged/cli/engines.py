"""``edgectl engines``: the engines of the cache."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from edged.cli.exit_codes import ExitCode
from edged.cli.terminal import console, say_error
from edged.engine.entries import Entry
from edged.engine.store import EngineStore, default_folder
from edged.errors import EdgedError
from edged.units import format_size, parse_size

_ACTIONS = ("list", "verify", "prune")


def command(
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="list, verify (read and hash every plan) or prune.")
    ] = "list",
    *,
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache",
            metavar="FOLDER",
            help="Where engines are kept.",
            show_default="$EDGED_CACHE/engines, else ~/.cache/edged/engines",
        ),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(
            "--limit", metavar="SIZE", help="prune: come down to this, such as 1GiB.", show_default="4GiB"
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="prune: remove every engine, also those that passed their check.",
            show_default=False,
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", show_default=False)
    ] = False,
) -> int:
    """List, verify or prune the TensorRT engines of the cache.

    prune removes damaged engines, what killed builds left and, above the limit, the least recently used engines; of
    each model and GPU the last engine that passed its check stays, unless --all is given. verify exits with 1 when an
    engine is damaged.
    """
    if action not in _ACTIONS:
        raise typer.BadParameter(f"{action!r} is not one of {', '.join(_ACTIONS)}", param_hint="'ACTION'")
    if action != "prune" and (limit is not None or everything):
        raise typer.BadParameter("goes with prune", param_hint="'--limit' / '--all'")
    try:
        size = None if limit is None else parse_size(limit)
    except ValueError as error:
        raise typer.BadParameter(f"{limit!r} is no size; write {error}", param_hint="'--limit'") from None
    store = EngineStore(default_folder() if cache is None else cache.expanduser())
    try:
        if action == "verify":
            return _verify(store, as_json=as_json)
        if action == "prune":
            removed = store.prune(size, everything=everything)
            _show(store, removed, "removed", as_json=as_json)
        else:
            _show(store, store.entries(), "engines", as_json=as_json)
    except EdgedError as error:
        say_error(error.message)
        return ExitCode.NO
    return ExitCode.DONE


def _verify(store: EngineStore, *, as_json: bool) -> int:
    results = store.verify()
    damaged = [(entry, fault) for entry, fault in results if fault]
    if as_json:
        engines = [{**_fields(entry), "fault": fault} for entry, fault in results]
        sys.stdout.write(json.dumps({"cache": str(store.folder), "engines": engines}, indent=2) + "\n")
    else:
        for entry, fault in results:
            sys.stdout.write(f"{entry.folder.name}  {fault or 'sound'}\n")
        sys.stdout.write(f"{_count(results)} in {store.folder}, {len(damaged)} damaged\n")
        if damaged:
            sys.stdout.write("damaged engines are never loaded; `edgectl engines prune` removes them\n")
    return ExitCode.NO if damaged else ExitCode.DONE


def _show(store: EngineStore, entries: list[Entry], what: str, *, as_json: bool) -> None:
    total = sum(entry.nbytes for entry in entries)
    if as_json:
        content = {
            "cache": str(store.folder),
            what: [_fields(entry) for entry in entries],
            "bytes": total,
        }
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
        return
    if entries:
        table = Table(box=None, pad_edge=False)
        for name in ("engine", "model", "for", "dtype", "built with", "state", "size", "used"):
            table.add_column(name, justify="right" if name == "size" else "left", no_wrap=True)
        for entry in entries:
            table.add_row(*_row(entry))
        console().print(table)
    verb = "removed from" if what == "removed" else "in"
    sys.stdout.write(f"{_count(entries)} {verb} {store.folder}, {format_size(total)}\n")


def _count(engines: Sequence[object]) -> str:
    return f"{len(engines)} engine{'' if len(engines) == 1 else 's'}"


def _row(entry: Entry) -> tuple[str, ...]:
    manifest = entry.manifest
    known = ("?", "?", "?", "?")
    if manifest is not None:
        dtype = f"{manifest.key.dtype}, stripped" if manifest.refitted else manifest.key.dtype
        known = (manifest.label, manifest.key.targets, dtype, manifest.key.tensorrt)
    return (entry.folder.name, *known, entry.state, format_size(entry.nbytes), _day(entry.used))


def _fields(entry: Entry) -> dict[str, object]:
    manifest = entry.manifest
    return {
        "engine": entry.folder.name,
        "state": entry.state,
        "bytes": entry.nbytes,
        "used": entry.used,
        "label": None if manifest is None else manifest.label,
        "key": None if manifest is None else manifest.key.to_json(),
        "refitted": None if manifest is None else manifest.refitted,
        "activation_bytes": None if manifest is None else dict(manifest.activation_bytes),
        "fault": entry.fault,
    }


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
