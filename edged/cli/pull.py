"""``edgectl pull``: a model from the Hugging Face Hub."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edged.checkpoint.folder_record import FolderRecord
from edged.checkpoint.model_files import ModelFiles, choose_files, choose_gguf
from edged.checkpoint.model_folder import absolute, check_destination
from edged.checkpoint.models_folder import is_model, models_folder
from edged.checkpoint.safetensors_files import read_index
from edged.cli.exit_codes import ExitCode, exit_code_of
from edged.cli.importing import Imported, import_model, say_imported
from edged.cli.progress import ProgressBars
from edged.cli.terminal import note, say_error
from edged.errors import CheckpointError, EdgedError, InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    from edged.checkpoint.hub_staging import Staging

_DTYPES = ("float32", "bfloat16", "float16")


def command(
    repository: Annotated[
        str, typer.Argument(metavar="REPO[@REV]", help="OWNER/NAME on the hub, and a branch, tag or commit.")
    ],
    destination: Annotated[
        Path | None,
        typer.Argument(
            metavar="DEST",
            help="The folder to make.",
            show_default="NAME in the models folder (see edgectl models --help)",
        ),
    ] = None,
    *,
    file: Annotated[
        str,
        typer.Option(
            "--file",
            metavar="TEXT",
            help="Of several GGUF files the one whose name has this, such as Q4_K_M.",
        ),
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", "-d", metavar="DTYPE", help=f"GGUF: type of the weights: {', '.join(_DTYPES)}."
        ),
    ] = "float32",
    keep_4bit: Annotated[
        bool,
        typer.Option(
            "--keep-4bit",
            help="GGUF: leave Q4_0 linears in 4 bits instead of widening them.",
            show_default=False,
        ),
    ] = False,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline",
            help="Take it from the hub's cache of this machine; ask the hub nothing.",
            show_default=False,
        ),
    ] = False,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference/--no-reference",
            help="Compute reference logits with torch, to check engines with later.",
        ),
    ] = True,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace another model that lies at DEST.", show_default=False),
    ] = False,
) -> int:
    """Fetch a model from the hub and make a model folder of it.

    Only what edged reads is fetched: configuration, tokenizer, chat templates and safetensors, or one GGUF file; never
    pickles. A pull that was cut off goes on where it was when it is given again. Every file is held to the digest that
    the hub has of it. HF_TOKEN is the token for private models, HF_ENDPOINT another hub, HF_HUB_OFFLINE=1 means
    --offline.
    """
    # numpy and the hub's library take a second to import; mistakes on the command line do not need them.
    from edged.checkpoint.hub import parse_repository  # noqa: PLC0415

    if dtype not in _DTYPES:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(_DTYPES)}", param_hint="'--dtype'")
    try:
        name, revision = parse_repository(repository)
    except InvalidArgumentError as error:
        raise typer.BadParameter(error.message, param_hint="'REPO[@REV]'") from None
    target = absolute(destination or models_folder() / name.rpartition("/")[2])
    options = _Options(name, revision, target, file, dtype, keep_4bit, reference, overwrite)
    try:
        return _pull_offline(options) if offline or _is_offline() else _pull(options)
    except EdgedError as error:
        say_error(error.message.replace("allow overwriting it", "give --overwrite"))
        return ExitCode.FILE if isinstance(error, CheckpointError) else exit_code_of(error)


@dataclass(frozen=True)
class _Options:
    """What the command line says."""

    repository: str
    revision: str | None
    destination: Path
    file: str
    dtype: str
    keep_4bit: bool
    reference: bool
    overwrite: bool

    @property
    def where(self) -> str:
        """What messages call the model."""
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


def _pull(options: _Options) -> int:
    from edged.checkpoint.hub import find_model  # noqa: PLC0415 - as above
    from edged.checkpoint.hub_staging import Staging  # noqa: PLC0415 - as above

    model = find_model(options.repository, options.revision)
    if _is_there(options, model.commit):
        return ExitCode.DONE
    files = choose_files([file.name for file in model.files], options.where)
    overwrite = _may_replace(options)
    staging = Staging(options.destination, model)
    with staging, ProgressBars(f"pulling {options.where} to {options.destination}") as bars:
        try:
            gguf = _fetch(options, files, staging, bars)
        except UnavailableError as error:
            raise UnavailableError(
                f"{error.message}; what has come lies in {staging.folder}, the same command goes on from there"
            ) from None
        try:
            imported = _import(
                options,
                staging.path(gguf) if gguf else staging.folder,
                model.commit,
                bars,
                overwrite=overwrite,
            )
        except CheckpointError:
            staging.remove()  # what is refused now will be refused again
            raise
        staging.remove()
    say_imported(options.destination, imported)
    _say_how_to_serve(options)
    return ExitCode.DONE


def _fetch(options: _Options, files: ModelFiles, staging: "Staging", bars: ProgressBars) -> str:
    """Fetch what is needed, the small files first, so that a model that is not supported costs no gigabytes.

    Returns:
        The name of the GGUF file; empty for safetensors.
    """
    from edged.cli.model_facts import check_small_files  # noqa: PLC0415 - as above

    if options.file or not files.weights:
        gguf = choose_gguf(files.ggufs, options.file, options.where)
        staging.fetch([gguf], bars.report)
        return gguf
    staging.fetch([*files.small, *([files.index] if files.index else [])], lambda *_: None)
    try:
        check_small_files(staging.folder)
    except CheckpointError as error:
        staging.remove()
        raise CheckpointError(
            error.message.replace(f"{staging.folder}/", f"{options.where}: ").replace(
                str(staging.folder), options.where
            ),
            field=error.field,
        ) from None
    if files.single:
        staging.fetch([files.single], bars.report)
        return ""
    shards = sorted(set(read_index(staging.path(files.index)).values()))
    missing = [name for name in shards if name not in files.weights]
    if missing:
        raise CheckpointError(f"{options.where}: the shard {missing[0]} is missing; {files.index} names it")
    staging.fetch(shards, bars.report)
    return ""


def _import(options: _Options, source: Path, commit: str, bars: ProgressBars, *, overwrite: bool) -> Imported:
    origin = {"kind": "hub", "repository": options.repository, "commit": commit}
    if source.is_file():
        origin["file"] = source.name
    return import_model(
        source,
        options.destination,
        options={} if source.is_dir() else {"dtype": options.dtype, "keep_4bit": options.keep_4bit},
        overwrite=overwrite,
        origin=origin,
        reference=options.reference,
        bars=bars,
    )


def _pull_offline(options: _Options) -> int:
    from edged.checkpoint.hub import cached_snapshot  # noqa: PLC0415 - as above

    snapshot = cached_snapshot(options.repository, options.revision)
    if _is_there(options, snapshot.name):
        return ExitCode.DONE
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
    files = choose_files(names, str(snapshot))
    source = snapshot
    if options.file or not files.weights:
        source = snapshot / choose_gguf(files.ggufs, options.file, str(snapshot))
    overwrite = _may_replace(options)
    with ProgressBars(f"importing {options.where} from {snapshot} to {options.destination}") as bars:
        imported = _import(options, source, snapshot.name, bars, overwrite=overwrite)
    say_imported(options.destination, imported)
    _say_how_to_serve(options)
    return ExitCode.DONE


def _is_there(options: _Options, commit: str) -> bool:
    """Whether the destination is this model already; then that is said."""
    record = FolderRecord.read(options.destination) if is_model(options.destination) else None
    source = {} if record is None else dict(record.source)
    same_file = options.file.lower() in str(source.get("file", "")).lower()
    if (source.get("repository"), source.get("commit")) != (options.repository, commit) or not same_file:
        return False
    sys.stdout.write(f"{options.destination} is {options.repository} at {commit[:8]} already\n")
    return True


def _may_replace(options: _Options) -> bool:
    """Whether what lies at the destination may be replaced: an older state of the same repository always may.

    Raises:
        CheckpointError: It may not.
    """
    record = FolderRecord.read(options.destination)
    older = record is not None and record.source.get("repository") == options.repository
    overwrite = options.overwrite or older
    check_destination(options.destination, overwrite=overwrite)
    return overwrite


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _say_how_to_serve(options: _Options) -> None:
    note(
        f"to serve it, in the configuration under models: - {{name: {options.destination.name}, path: {options.destination}}}"
    )
