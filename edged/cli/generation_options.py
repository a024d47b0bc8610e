"""Options of ``edgectl generate`` that say how tokens are chosen and which form the answer has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edged.cli.options import unescape
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from edged.client.requests import GenerateOptions

_SAMPLING = "How tokens are chosen"
_FORM = "The answer's form"
_MOST_BYTES = 4 * 2**20

MinPOption = Annotated[
    float | None,
    typer.Option(
        "--min-p",
        metavar="P",
        help="Only tokens at least P times as likely as the likeliest.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
TypicalPOption = Annotated[
    float | None,
    typer.Option(
        "--typical-p",
        metavar="P",
        help="Only the most typical tokens that make up P.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
RepetitionPenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        metavar="X",
        help="Make tokens of prompt and answer less likely; above 1.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
PresencePenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--presence-penalty",
        metavar="X",
        help="Taken off the logits of the answer's tokens.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
FrequencyPenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--frequency-penalty",
        metavar="X",
        help="The same, once for each time.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
PenaltyWindowOption = Annotated[
    int | None,
    typer.Option(
        "--penalty-window",
        metavar="N",
        help="The penalties look at the last N tokens.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
LogitBiasOption = Annotated[
    list[str],
    typer.Option(
        "--logit-bias",
        metavar="ID=X",
        help="Add X to the logit of a token id; -inf forbids it. May be given several times.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
BadWordOption = Annotated[
    list[str],
    typer.Option(
        "--bad-word",
        metavar="TEXT",
        help="A text that must not come; may be given several times.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
MinTokensOption = Annotated[
    int,
    typer.Option(
        "--min-tokens",
        metavar="N",
        help="Do not end before N tokens.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
LogprobsOption = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="N",
        help="With --json: log probabilities of each token and of the N likeliest.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
AnswersOption = Annotated[
    int | None,
    typer.Option(
        "--answers",
        metavar="N",
        help="Make N answers, which share the work on the prompt.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
JsonSchemaOption = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="FILE|JSON",
        help="The answer is JSON that fits this schema.",
        show_default=False,
        rich_help_panel=_FORM,
    ),
]
RegexOption = Annotated[
    str | None,
    typer.Option(
        "--regex",
        metavar="REGEX",
        help="The answer matches this expression.",
        show_default=False,
        rich_help_panel=_FORM,
    ),
]
LarkOption = Annotated[
    Path | None,
    typer.Option(
        "--lark",
        metavar="FILE",
        help="The answer is a sentence of this grammar.",
        show_default=False,
        rich_help_panel=_FORM,
    ),
]
ChoiceOption = Annotated[
    list[str],
    typer.Option(
        "--choice",
        metavar="TEXT",
        help="The answer is one of these; give it several times.",
        show_default=False,
        rich_help_panel=_FORM,
    ),
]
ReadyMadeOption = Annotated[
    str | None,
    typer.Option(
        "--form",
        metavar="NAME",
        help="A ready-made form: json or sql-select.",
        show_default=False,
        rich_help_panel=_FORM,
    ),
]
ToolChoiceOption = Annotated[
    str | None,
    typer.Option(
        "--tool-choice",
        metavar="auto|none|required",
        help="Whether the model calls the tools of --tools.",
        show_default=False,
        rich_help_panel=_FORM,
    ),
]
ToolOption = Annotated[
    str | None,
    typer.Option("--tool", metavar="NAME", help="Call this tool.", show_default=False, rich_help_panel=_FORM),
]
RawOption = Annotated[
    bool,
    typer.Option(
        "--raw",
        help="Leave thoughts and calls in the text, as the model writes them.",
        show_default=False,
        rich_help_panel=_FORM,
    ),
]


def generation_options(**given: Any) -> GenerateOptions:  # noqa: ANN401 - the options above, by their names
    """What the options above say, as the client takes it; those that were not given are left out.

    Raises:
        CheckpointError: A file cannot be read.
        typer.BadParameter: A bias is not ID=X.
    """
    options: dict[str, Any] = {
        name: value for name, value in given.items() if value is not None and value not in ([], 0, False)
    }
    if "logit_bias" in options:
        options["logit_bias"] = dict(map(_bias, options["logit_bias"]))
    if "bad_words" in options:
        options["bad_words"] = [unescape(word) for word in options["bad_words"]]
    if "choice" in options:
        options["choice"] = [unescape(text) for text in options["choice"]]
    if given.get("logprobs") is not None:
        options |= {"logprobs": True, "top_logprobs": given["logprobs"]}
    if "json_schema" in options and not options["json_schema"].lstrip().startswith("{"):
        options["json_schema"] = _read(Path(options["json_schema"]))
    if "lark" in options:
        options["lark"] = _read(options["lark"])
    for name in ("min_p", "presence_penalty", "frequency_penalty", "n"):
        if given.get(name) == 0:  # a value of its own, where the model has another default
            options[name] = given[name]
    return options  # type: ignore[return-value]


def _bias(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"\s*(\d{1,10})\s*=\s*([+-]?(?:inf|\d{1,9}(?:\.\d{0,9})?))\s*", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not ID=X, such as 198=-5", param_hint="'--logit-bias'")
    return int(match[1]), float(match[2])


def _read(path: Path) -> str:
    path = path.expanduser()
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise CheckpointError(f"{path}: larger than {_MOST_BYTES >> 20} MiB")
        return path.read_text("utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise CheckpointError(f"{path}: is no UTF-8") from None


def call_object(call: Any) -> dict[str, Any]:  # noqa: ANN401 - a ToolCall
    """A tool call as it is printed."""
    return {"id": call.id, "name": call.name, "arguments": json.loads(call.arguments)}
