"""``edgectl draft``: draft models for speculative decoding."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from edged.cli.exit_codes import ExitCode
from edged.cli.progress import ProgressBars
from edged.cli.terminal import note, say_error
from edged.errors import EdgedError, InvalidArgumentError
from edged.units import format_size

_ACTIONS = ("train",)


def command(
    action: Annotated[str, typer.Argument(metavar="ACTION", help="train: make a draft for a model.")],
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The model's folder.")],
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="The draft's folder, to make.")],
    *,
    text: Annotated[
        list[Path],
        typer.Option(
            "--text",
            "-t",
            metavar="FILE",
            help='Text like the model\'s work, in UTF-8; .jsonl: an object with "text" a line. Several times.',
        ),
    ] = [],  # noqa: B006 - Typer's way to say that it may be given several times; never changed
    sequences: Annotated[
        int,
        typer.Option("--sequences", metavar="N", help="Most pieces of text that are gone on from.", min=1),
    ] = 512,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", metavar="N", help="Tokens of each piece.", min=1)
    ] = 64,
    answer_tokens: Annotated[
        int, typer.Option("--answer-tokens", metavar="N", help="Tokens that the model adds to it.", min=1)
    ] = 128,
    passes: Annotated[int, typer.Option("--passes", metavar="N", help="Passes over all of them.", min=1)] = 8,
    rate: Annotated[float, typer.Option("--rate", metavar="X", help="Largest learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of everything random.", min=0)] = 0,
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", help="CPU threads.", show_default="every core", min=0)
    ] = 0,
) -> int:
    """Train a draft for speculative decoding (EAGLE) on a model's own continuations of text.

    It runs on the CPU and is resumable: what was stopped goes on when the same command is given again. The daemon uses it with
    speculation: {method: eagle, draft: DEST}.
    """
    if action not in _ACTIONS:
        raise typer.BadParameter(f"{action!r} is not {' or '.join(_ACTIONS)}", param_hint="'ACTION'")
    if not text:
        raise typer.BadParameter("give text that the model goes on from", param_hint="'--text'")
    model, destination = model.expanduser(), destination.expanduser()
    # These import torch, which takes seconds; nothing above needs it.
    from edged.quantize.calibration import read_documents  # noqa: PLC0415
    from edged.speculation.training import DraftTrainer, TrainingPlan, acceptance_length  # noqa: PLC0415

    try:
        plan = TrainingPlan(
            sequences=sequences,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            passes=passes,
            rate=rate,
            seed=seed,
        )
        documents = [each for file in text for each in read_documents(file)]
        with ProgressBars(f"training a draft of {model.name}") as bars:
            trainer = DraftTrainer(
                model, destination, documents, plan, progress=bars.report, say=note, threads=threads
            )
            accepted = trainer.run()
    except InvalidArgumentError as error:
        say_error(error.message)
        return ExitCode.FILE if error.field in ("calibration", "text") else ExitCode.USAGE
    except EdgedError as error:
        say_error(error.message)
        return ExitCode.FILE
    size = sum(file.stat().st_size for file in destination.iterdir())
    shown = ", ".join(f"{share:.0%}" for share in accepted)
    sys.stdout.write(
        f"wrote {destination}: {format_size(size)}; on text it never saw its likeliest token is right {shown} of the time by "
        f"depth, {acceptance_length(accepted):.2f} tokens a step\n"
    )
    return ExitCode.DONE
