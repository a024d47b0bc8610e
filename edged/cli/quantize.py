"""``edgectl quantize``: a 4-bit or ternary model folder from a dense one."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from edged.cli.exit_codes import ExitCode
from edged.cli.options import ThreadsOption
from edged.cli.progress import ProgressBars
from edged.cli.terminal import note, say_error
from edged.errors import EdgedError, InvalidArgumentError

_TERNARY = "ternary-pack"
_METHODS = ("rtn", "gptq", "p-gptq", "awq-gptq", _TERNARY)
_ROW = "row"
_DIGITS = 10
"""A group of as many digits is wider than any linear; int() itself refuses some thousands."""
_CALIBRATION = "calibration"
_OPTIONS = {
    "sequence_length": "--sequence-length",
    "act_order": "--act-order",
    "skip_first": "--skip-first",
    "head": "--lm-head",
}


_FOR_ACTIVATIONS = (
    "calibration",
    "lines",
    "sequences",
    "length",
    "act_order",
    "damping",
    "skip_first",
)
_FOR_FOUR_BITS = (*_FOR_ACTIVATIONS, "group", "symmetric", "head", "device", "threads")
_IDLE = {
    "rtn": (_FOR_ACTIVATIONS, "which rounds each weight by itself"),
    _TERNARY: (_FOR_FOUR_BITS, "which finds everything in the weights"),
}
"""Options that a method does not look at, by their parameters, and why."""


def command(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A model folder that is not quantized.")],
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="The folder to make.")],
    *,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            "-m",
            metavar="METHOD",
            help=f"One of {', '.join(_METHODS)}.",
        ),
    ] = "gptq",
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            "-c",
            metavar="FILE",
            help='Text like the model\'s work, in UTF-8; .jsonl: an object with "text" a line.',
            show_default="a small built-in text, for trying only",
        ),
    ] = None,
    lines: Annotated[
        bool,
        typer.Option("--lines", help="Each line of the calibration text is a document.", show_default=False),
    ] = False,
    sequences: Annotated[
        int, typer.Option("--sequences", metavar="N", help="Most sequences to calibrate with.", min=1)
    ] = 128,
    length: Annotated[
        int, typer.Option("--sequence-length", metavar="N", help="Tokens of each.", min=8)
    ] = 512,
    group: Annotated[
        str,
        typer.Option(
            "--group",
            "-g",
            metavar="N",
            help=f"Input channels that share a scale: 128, 64, 32, or {_ROW} (or 0) for all. Ternary: found in the weights.",
            show_default="128",
        ),
    ] = "",
    symmetric: Annotated[
        bool, typer.Option("--sym/--asym", help="Zero point 8, or one for each group.")
    ] = True,
    act_order: Annotated[
        str,
        typer.Option(
            "--act-order",
            metavar="ORDER",
            help="Channels by falling activation with consecutive groups (static), with groups that follow "
            "(free: desc_act, slower to run), or as they come (none).",
        ),
    ] = "static",
    damping: Annotated[
        float, typer.Option("--damping", metavar="X", help="Added to the Hessian, in parts of its mean.")
    ] = 0.01,
    skip_first: Annotated[
        int | None,
        typer.Option(
            "--skip-first",
            metavar="N",
            help="Positions of each sequence that the Hessian leaves out.",
            show_default="4 with p-gptq, else 0",
            min=0,
        ),
    ] = None,
    head: Annotated[
        str,
        typer.Option("--lm-head", metavar="keep|quantize", help="What becomes of the LM head."),
    ] = "keep",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            "-d",
            metavar="DTYPE",
            help="Type of what stays wide (embedding, LM head, norms): float32, bfloat16 or float16.",
            show_default="as it is",
        ),
    ] = "",
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu or cuda.")] = "cpu",
    threads: ThreadsOption = 0,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace a model folder that edged made before.", show_default=False
        ),
    ] = False,
) -> int:
    """Write a quantized model folder.

    The four methods for 4 bits write a GPTQ checkpoint, which edged and transformers' ecosystem read. The embedding
    always stays wide, and so does the LM head unless --lm-head quantize says otherwise. ternary-pack packs a model whose
    linears are {-1, 0, +1} times a scale a group (BitCPM4) at 2 bits, exactly, or refuses it.

    What was stopped goes on when the same command is given again; DEST is there as a whole or not at all.
    """
    if method not in _METHODS:
        raise typer.BadParameter(f"{method!r} is not one of {', '.join(_METHODS)}", param_hint="'--method'")
    if head not in ("keep", "quantize"):
        raise typer.BadParameter(f"{head!r} is not keep or quantize", param_hint="'--lm-head'")
    if group and group != _ROW and not (group.isdecimal() and len(group) < _DIGITS):
        raise typer.BadParameter(f"{group!r} is no whole number, nor {_ROW}", param_hint="'--group'")
    _refuse_idle_options(context, method)
    source, destination = source.expanduser(), destination.expanduser()
    try:
        if method == _TERNARY:
            _pack_ternary(source, destination, dtype=dtype, overwrite=overwrite)
        else:
            recipe = {
                "method": method,
                "group": 0 if group == _ROW else int(group or 128),
                "symmetric": symmetric,
                "act_order": act_order,
                "damping": damping,
                "skip_first": skip_first,
                "head": head == "quantize",
            }
            text = (calibration, lines, sequences, length)
            options = {"dtype": dtype, "device": device, "overwrite": overwrite}
            _quantize(source, destination, recipe, text, threads=threads, options=options)
    except InvalidArgumentError as error:
        if error.field == _CALIBRATION:
            say_error(error.message)
            return ExitCode.FILE
        option = _OPTIONS.get(error.field, f"--{error.field}") if error.field else None
        raise typer.BadParameter(error.message, param_hint=option and f"'{option}'") from None
    except EdgedError as error:
        say_error(error.message.replace("allow overwriting it", "give --overwrite"))
        return ExitCode.FILE
    _say_written(destination)
    return ExitCode.DONE


def _refuse_idle_options(context: typer.Context, method: str) -> None:
    """Refuses what was given and would change nothing: it was meant to.

    Raises:
        typer.BadParameter: Names the first such option.
    """
    idle, why = _IDLE.get(method, ((), ""))
    for parameter in context.command.params:
        # (Compared by name: typer brings click's enumeration under a path of its own in some versions.)
        given = context.get_parameter_source(parameter.name or "")
        if parameter.name in idle and given is not None and given.name == "COMMANDLINE":
            flags = "/".join(
                max(names, key=len) for names in (parameter.opts, parameter.secondary_opts) if names
            )
            raise typer.BadParameter(
                f"it does not apply to --method {method}, {why}; leave it out", param_hint=f"'{flags}'"
            )


def _quantize(
    source: Path,
    destination: Path,
    recipe: dict[str, Any],
    text: tuple[Path | None, bool, int, int],
    *,
    threads: int,
    options: dict[str, Any],
) -> None:
    # torch takes seconds to import; nothing above needs it.
    import torch  # noqa: PLC0415

    from edged.quantize.calibration import read_documents, trial_documents  # noqa: PLC0415
    from edged.quantize.checks import check_request  # noqa: PLC0415
    from edged.quantize.recipe import Recipe  # noqa: PLC0415
    from edged.quantize.run import prepare_calibration, quantize  # noqa: PLC0415

    if threads:
        torch.set_num_threads(threads)
    file, lines, sequences, length = text
    chosen = Recipe(**recipe)
    check_request(source, destination, chosen, length=length, **options)
    calibration = None
    if chosen.calibrated:
        if file is None:
            note(
                "calibrating with a few pages of built-in text: enough to try a method, not for a model to use"
            )
        documents = trial_documents() if file is None else read_documents(file, lines=lines)
        calibration = prepare_calibration(
            source, documents, count=sequences, length=length, trial=file is None
        )
        del documents
    with ProgressBars(f"quantizing {source.name} to {destination} with {chosen.method}") as bars:
        quantize(
            source,
            destination,
            chosen,
            calibration,
            progress=bars.report,
            finish=_finish(source, chosen.method, bars),
            **options,
        )


def _pack_ternary(source: Path, destination: Path, *, dtype: str, overwrite: bool) -> None:
    from edged.quantize.ternary_pack import pack_ternary  # noqa: PLC0415 - as above

    with ProgressBars(f"packing {source.name} to {destination}") as bars:
        pack_ternary(
            source,
            destination,
            dtype=dtype,
            progress=bars.report,
            overwrite=overwrite,
            finish=_finish(source, _TERNARY, bars),
        )


def _finish(source: Path, method: str, bars: ProgressBars) -> Any:  # noqa: ANN401 - a function of the folder
    from edged.checkpoint.folder_record import record_folder  # noqa: PLC0415 - as above
    from edged.cli.model_facts import check_model  # noqa: PLC0415

    origin = {"kind": "quantized", "path": str(source.absolute()), "method": method}

    def finish(folder: Path) -> None:
        check_model(folder)
        record_folder(folder, origin, bars.report)

    return finish


def _say_written(destination: Path) -> None:
    from edged.cli.model_facts import describe_weights  # noqa: PLC0415 - as above
    from edged.units import format_size  # noqa: PLC0415

    size = sum(file.stat().st_size for file in destination.rglob("*") if file.is_file())
    sys.stdout.write(
        f"wrote {destination}: {format_size(size)}, weights in {describe_weights(destination)}\n"
    )
