"""Options that several commands share, and what their texts mean."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edged.errors import CheckpointError
from edged.units import parse_duration

if TYPE_CHECKING:
    from edged.client.chat import ChatOptions

_WAIT_HELP = "Wait this long for the daemon to serve, also if it is not there yet; such as 60s or 2min."


def duration(text: str | float) -> float:
    """Seconds of ``60``, ``60s``, ``2min``; a number, which Typer hands over for a default, stays as it is.

    Raises:
        typer.BadParameter: It is none.
    """
    if isinstance(text, float):
        return text
    if re.fullmatch(r"[0-9]{1,9}(?:\.[0-9]{1,9})?", text.strip()):
        return float(text)
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no duration; write {error}") from None


def checked_address(text: str) -> str:
    """The address, which is not empty.

    Raises:
        typer.BadParameter: It is: a variable of a script that was not set must not mean the default daemon.
    """
    if not text:
        raise typer.BadParameter(
            "the address is empty; write unix:PATH or HOST:PORT, or leave --address out",
            param_hint="'--address'",
        )
    return text


AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        "-a",
        envvar="EDGED_ADDRESS",
        metavar="ADDRESS",
        help="Where the daemon is: unix:PATH, a path, or HOST:PORT. Default: the daemon's default unix socket.",
        show_default=False,
    ),
]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        help="Model by its name; the default one otherwise.",
        show_default=False,
    ),
]
ThreadsOption = Annotated[
    int,
    typer.Option("--threads", metavar="N", help="CPU threads.", show_default="every core", min=0, max=1024),
]
WaitOption = Annotated[
    float | None,
    typer.Option("--wait", metavar="DURATION", parser=duration, help=_WAIT_HELP, show_default=False),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="DURATION",
        parser=duration,
        help="Give up after this long, such as 30s; the daemon stops the work.",
        show_default=False,
    ),
]
SystemOption = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="System message that opens the chat.", show_default=False),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        metavar="N",
        help="Most tokens to generate; all that the context leaves otherwise.",
        show_default=False,
    ),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "-t",
        metavar="X",
        help="0 takes the likeliest token; the model's own default otherwise.",
        show_default=False,
    ),
]
TopKOption = Annotated[
    int | None,
    typer.Option("--top-k", metavar="K", help="Draw from the K likeliest tokens.", show_default=False),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        "--top-p", metavar="P", help="Draw from the likeliest tokens that make up P.", show_default=False
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="The same seed gives the same text.", show_default=False),
]
SessionOption = Annotated[
    str,
    typer.Option(
        "--session",
        metavar="NAME",
        help="Keep the pages of this conversation for its next turn; edgectl sessions lists them.",
        show_default=False,
    ),
]
PriorityOption = Annotated[
    int,
    typer.Option(
        "--priority",
        metavar="N",
        help="-100 to 100; higher goes first among waiting requests.",
        show_default="0",
    ),
]
StopOption = Annotated[
    list[str],
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="End the answer before this text; may be given several times. \\n, \\t, \\r and \\\\ are read.",
        show_default=False,
    ),
]

ToolsOption = Annotated[
    Path | None,
    typer.Option(
        "--tools",
        metavar="FILE",
        help="JSON file with the tools that the model may call: a list, or one, in OpenAI's form.",
        show_default=False,
    ),
]
TemplateArgOption = Annotated[
    list[str],
    typer.Option(
        "--template-arg",
        metavar="NAME=VALUE",
        help="Variable of the chat template; VALUE is read as JSON, else as text. May be given several times.",
        show_default=False,
    ),
]
ThinkOption = Annotated[
    bool | None,
    typer.Option(
        "--think/--no-think",
        help="Let the model think before it answers, or not; what its template does otherwise.",
        show_default=False,
    ),
]

_MOST_TOOL_BYTES = 64 << 20
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\"}


def unescape(text: str) -> str:
    r"""Text with ``\n``, ``\t``, ``\r`` and ``\\`` replaced by what they mean."""
    return re.sub(r"\\[ntr\\]", lambda match: _ESCAPES[match[0]], text)


def read_prompt(argument: str) -> str:
    """The prompt: the argument itself, or standard input for ``-``, less one newline at its end.

    Raises:
        typer.BadParameter: It is no UTF-8.
    """
    if argument != "-":
        # Python hands bytes of the command line that are no UTF-8 over as lone surrogates.
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise typer.BadParameter("the text is no UTF-8; convert it, or set a UTF-8 locale")
        return argument
    if sys.stdin.isatty():
        sys.stderr.write("Type the text, then Ctrl-D on a line of its own.\n")
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"standard input is no UTF-8: byte 0x{data[error.start]:02X} at offset {error.start}"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def chat_options(tools: Path | None, template_arg: list[str], think: bool | None) -> ChatOptions:
    """What ``--tools``, ``--template-arg`` and ``--think`` say; empty when none of them was given.

    Raises:
        CheckpointError: The file of the tools cannot be read, or is no JSON list or object.
        typer.BadParameter: An argument is not NAME=VALUE, or stands there twice.
    """
    options: ChatOptions = {}
    if tools is not None:
        options["tools"] = _read_tools(tools.expanduser())
    arguments: dict[str, Any] = {}
    for text in template_arg:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier() or name in arguments:
            problem = "stands there twice" if name in arguments else "is not NAME=VALUE"
            raise typer.BadParameter(f"{text!r} {problem}", param_hint="'--template-arg'")
        try:
            arguments[name] = json.loads(value)
        except (ValueError, RecursionError):
            arguments[name] = value
    if arguments:
        options["template_arguments"] = arguments
    if think is not None:
        options["enable_thinking"] = think
    return options


def _read_tools(path: Path) -> list[dict[str, Any]]:
    try:
        if path.stat().st_size > _MOST_TOOL_BYTES:
            raise CheckpointError(
                f"{path}: larger than {_MOST_TOOL_BYTES >> 20} MiB; no model reads so many tools"
            )
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no JSON: {error}") from None
    tools = content.get("tools", content) if isinstance(content, dict) else content
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise CheckpointError(f"{path}: must hold a list of tools, each an object")
    return tools
