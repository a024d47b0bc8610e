"""``edgectl draft``: draft models for speculative decoding."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from edged.cli.exit_codes import ExitCode
from edged.cli.options import ThreadsOption
from edged.cli.progress import ProgressBars
from edged.cli.terminal import note, say_error
from edged.errors import EdgedError, InvalidArgumentError
from edged.units import format_size
from edged.whole_file import write_whole

_ACTIONS = ("train", "rank")


def command(
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="train (a draft) or rank (tokens, for a token map).")
    ],
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The model's folder.")],
    destination: Annotated[
        Path, typer.Argument(metavar="DEST", help="The draft's folder, or the map's file, to make.")
    ],
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
    batch: Annotated[
        int, typer.Option("--batch", metavar="N", help="Sequences of a training step.", min=1)
    ] = 8,
    levels: Annotated[
        int, typer.Option("--levels", metavar="N", help="Levels of a tree that are trained.", min=1, max=6)
    ] = 3,
    chat_share: Annotated[
        float,
        typer.Option(
            "--chat-share",
            metavar="X",
            help="Part of the pieces that are put as requests in the model's chat template, where it has one.",
        ),
    ] = 0.5,
    start: Annotated[
        Path | None,
        typer.Option(
            "--start",
            metavar="DRAFT",
            help="A draft of this model, trained before, to begin with.",
            show_default="a new one",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="cpu or cuda, as torch names it.")
    ] = "cpu",
    size: Annotated[
        int,
        typer.Option(
            "--size", metavar="N", help="rank: tokens of the map.", show_default="a quarter of all", min=0
        ),
    ] = 0,
    threads: ThreadsOption = 0,
) -> int:
    """Make a draft for speculative decoding (EAGLE).

    train: learns from a model's own continuations of text, on the CPU or a GPU. It is resumable: what was stopped goes on when the same
    command is given again. The daemon uses it with speculation: {method: eagle, draft: DEST}.

    rank: writes the most frequent tokens of the text, from which alone drafts are then taken (token_map: DEST), so that a
    draft's head is smaller.
    """
    if action not in _ACTIONS:
        raise typer.BadParameter(f"{action!r} is not {' or '.join(_ACTIONS)}", param_hint="'ACTION'")
    if not text:
        raise typer.BadParameter("give text that the model goes on from", param_hint="'--text'")
    model, destination = model.expanduser(), destination.expanduser()
    if action == "rank":
        return _rank(model, destination, text, size)
    # These import torch, which takes seconds; nothing above needs it.
    from edged.quantize.calibration import read_documents  # noqa: PLC0415
    from edged.speculation.training import DraftTrainer, acceptance_length  # noqa: PLC0415
    from edged.speculation.training_plan import TrainingPlan  # noqa: PLC0415

    try:
        plan = TrainingPlan(
            sequences=sequences,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            passes=passes,
            rate=rate,
            batch=batch,
            levels=levels,
            chat_share=chat_share,
            seed=seed,
        )
        documents = [each for file in text for each in read_documents(file)]
        with ProgressBars(f"training a draft of {model.name}") as bars:
            trainer = DraftTrainer(
                model,
                destination,
                documents,
                plan,
                progress=bars.report,
                say=note,
                start=start,
                device=device,
                threads=threads,
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


def _rank(model: Path, destination: Path, text: list[Path], size: int) -> int:
    from edged.checkpoint.tokenizer import Tokenizer  # noqa: PLC0415 - numpy and tokenizers take a while, too
    from edged.models.architecture import Architecture  # noqa: PLC0415
    from edged.quantize.calibration import read_documents  # noqa: PLC0415
    from edged.speculation.token_rank import rank_tokens  # noqa: PLC0415

    try:
        vocabulary = Architecture.read(model).vocabulary
        documents = (each for file in text for each in read_documents(file))
        ids, share = rank_tokens(
            documents, Tokenizer.load(model), vocabulary=vocabulary, size=size or max(1, vocabulary // 4)
        )
        write_whole(destination, json.dumps(ids) + "\n")
    except InvalidArgumentError as error:
        say_error(error.message)
        return ExitCode.USAGE if error.field == "size" else ExitCode.FILE
    except OSError as error:
        say_error(f"{destination}: cannot be written: {error.strerror}")
        return ExitCode.FILE
    except EdgedError as error:
        say_error(error.message)
        return ExitCode.FILE
    sys.stdout.write(
        f"wrote {destination}: {len(ids)} of {vocabulary} tokens, which are {share:.1%} of the text's\n"
    )
    return ExitCode.DONE
