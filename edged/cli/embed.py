"""``edgectl embed``: the vectors of texts."""

import json
import sys
from typing import Annotated, Optional

import typer

from edged.cli.connection import connect
from edged.cli.options import AddressOption, ModelOption

_AT_ONCE = 64
"""Inputs of one call."""


def command(
    texts: Annotated[
        list[str], typer.Argument(metavar="TEXT...", help="The texts; - reads standard input, a text a line.")
    ],
    *,
    address: AddressOption = None,
    model: ModelOption = "",
    pooling: Annotated[
        str,
        typer.Option(metavar="last|mean", help="Instead of what the configuration says.", show_default=False),
    ] = "",
    no_normalize: Annotated[
        bool, typer.Option("--no-normalize", help="Leave vectors as long as they are.", show_default=False)
    ] = False,
    timeout: Annotated[
        Optional[float], typer.Option(metavar="SECONDS", help="Give up after so long.", show_default=False)  # noqa: UP045 - Typer reads it on 3.10
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: embeddings.", show_default=False)
    ] = False,
) -> None:
    """Print the vector of each text, a line of JSON each. The model must serve embeddings (models[].embeddings)."""
    given = [line for text in texts for line in (_lines_of_stdin() if text == "-" else [text])]
    vectors: list[tuple[float, ...]] = []
    with connect(address) as client:
        for first in range(0, max(len(given), 1), _AT_ONCE):  # of none, too: the daemon says what it takes
            some = given[first : first + _AT_ONCE]
            vectors += client.embed(
                some, model=model, pooling=pooling, normalize=not no_normalize, timeout=timeout
            )
            if not as_json:
                for vector in vectors[first:]:
                    sys.stdout.write(json.dumps(vector) + "\n")
    if as_json:
        sys.stdout.write(json.dumps({"embeddings": vectors}) + "\n")


def _lines_of_stdin() -> list[str]:
    """As files have them: splitlines() would cut at characters that a text may hold, such as U+2028."""
    return [line.removesuffix("\n") for line in sys.stdin]
