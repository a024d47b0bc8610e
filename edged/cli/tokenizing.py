"""``edgectl tokenize``: the token ids of a text or a chat, as the daemon would make them."""

import json
import sys
from typing import Annotated

import typer

from edged.cli.connection import connect
from edged.cli.options import (
    AddressOption,
    ModelOption,
    SystemOption,
    TemplateArgOption,
    ThinkOption,
    ToolsOption,
    chat_options,
    read_prompt,
)


def command(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text; - reads standard input.")],
    *,
    address: AddressOption = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", "-c", help="Take the text as one user message of a chat.", show_default=False),
    ] = False,
    system: SystemOption = None,
    tools: ToolsOption = None,
    template_arg: TemplateArgOption = [],  # noqa: B006 - Typer's way to say that it may be given several times; never changed
    think: ThinkOption = None,
    model: ModelOption = "",
    no_special_tokens: Annotated[
        bool, typer.Option("--no-special-tokens", help="Add nothing at the start (BOS).", show_default=False)
    ] = False,
    count: Annotated[
        bool, typer.Option("--count", help="Print only how many there are.", show_default=False)
    ] = False,
    pieces: Annotated[
        bool,
        typer.Option("--pieces", help="Print one line a token: its id and its text.", show_default=False),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: token_ids, count.", show_default=False)
    ] = False,
) -> None:
    """Print the token ids of a text, separated by spaces. --system, --tools, --template-arg and --think imply --chat."""
    content = read_prompt(text)
    options = chat_options(tools, template_arg, think)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": content})
    with connect(address) as client:
        prompt = messages if chat or system is not None or options else content
        token_ids = client.tokenize(
            prompt, model=model, no_special_tokens=no_special_tokens, timeout=60.0, **options
        )
        if as_json:
            sys.stdout.write(json.dumps({"token_ids": list(token_ids), "count": len(token_ids)}) + "\n")
        elif count:
            sys.stdout.write(f"{len(token_ids)}\n")
        elif pieces:
            for token_id in token_ids:
                piece = client.detokenize([token_id], model=model, keep_special_tokens=True, timeout=60.0)
                sys.stdout.write(f"{token_id}\t{json.dumps(piece, ensure_ascii=False)}\n")
        else:
            sys.stdout.write(" ".join(map(str, token_ids)) + "\n")
