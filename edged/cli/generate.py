"""``edgectl generate``: one prompt, its text as it comes."""

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from edged.cli.connection import connect, wait_until_serving
from edged.cli.options import (
    AddressOption,
    MaxTokensOption,
    ModelOption,
    PriorityOption,
    SeedOption,
    SessionOption,
    StopOption,
    SystemOption,
    TemperatureOption,
    TemplateArgOption,
    ThinkOption,
    TimeoutOption,
    ToolsOption,
    TopKOption,
    TopPOption,
    WaitOption,
    chat_options,
    read_prompt,
    unescape,
)
from edged.cli.terminal import note, write_text
from edged.client import Answer, Finished, Generation
from edged.client.events import AnswerBuilder
from edged.errors import EdgedError, UnavailableError, UnreachableError


def command(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to go on from; - reads standard input.")
    ],
    *,
    address: AddressOption = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", "-c", help="Send the prompt as one user message of a chat.", show_default=False
        ),
    ] = False,
    system: SystemOption = None,
    tools: ToolsOption = None,
    template_arg: TemplateArgOption = [],  # noqa: B006 - Typer's way to say that it may be given several times; never changed
    think: ThinkOption = None,
    model: ModelOption = "",
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    stop: StopOption = [],  # noqa: B006 - Typer's way to say that it may be given several times; never changed
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's own end of text.", show_default=False)
    ] = False,
    session: SessionOption = "",
    priority: PriorityOption = 0,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object at the end: text, token_ids, finish_reason, usage, timings.",
            show_default=False,
        ),
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print counts and speed on standard error.", show_default=False)
    ] = False,
    wait: WaitOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Generate text from a prompt and stream it.

    The output ends with a newline; --json has the exact text. --system, --tools, --template-arg and --think imply
    --chat.
    """
    text = read_prompt(prompt)
    options = chat_options(tools, template_arg, think)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    with connect(address) as client:
        wait_until_serving(client, wait)
        generation = client.generate(
            messages if chat or system is not None or options else text,
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=[unescape(item) for item in stop],
            ignore_eos=ignore_eos,
            session=session,
            priority=priority,
            timeout=timeout,
            **options,
        )
        try:
            answer = collect(generation, show=not as_json)
        except UnavailableError as error:
            if wait is None and error.retry_seconds is not None and not isinstance(error, UnreachableError):
                raise with_hint(error, "--wait 60s waits until it serves") from error
            raise
    if as_json:
        sys.stdout.write(json.dumps(answer_object(answer), ensure_ascii=False, indent=2) + "\n")
    elif not answer.text.endswith("\n"):
        write_text("\n")
    if stats:
        note(describe_finish(answer.finished))


def with_hint(error: EdgedError, hint: str) -> EdgedError:
    """The same error with a further remedy in its message."""
    return type(error)(f"{error.message}; {hint}", field=error.field, retry_seconds=error.retry_seconds)


def collect(generation: Generation, *, show: bool) -> Answer:
    """Take every event of a generation; write its text as it comes when ``show``.

    Raises:
        EdgedError: The daemon refused or ended the request. A line that was begun is ended first.
    """
    builder = AnswerBuilder()
    last = "\n"
    try:
        for event in generation:
            builder.add(event)
            text = getattr(event, "text", "")
            if show and text:
                write_text(text)
                last = text[-1]
    except (EdgedError, KeyboardInterrupt):
        if last != "\n":
            write_text("\n")
        raise
    finally:
        generation.cancel()  # Ctrl-C may come while text is written, outside of the iterator
    return builder.build()


def answer_object(answer: Answer) -> dict[str, Any]:
    """What ``--json`` prints."""
    finished = answer.finished
    matched: str | int | None = finished.matched_stop or finished.matched_token_id
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": finished.reason,
        "matched": matched,
        "usage": asdict(finished.usage),
        "timings": asdict(finished.timings),
        "model": answer.started.model,
        "request_id": answer.started.request_id,
        "sampling": {
            "temperature": answer.started.temperature,
            "top_k": answer.started.top_k,
            "top_p": answer.started.top_p,
            "seed": answer.started.seed,
        },
        "max_tokens": answer.started.max_tokens,
    }


def describe_finish(finished: Finished) -> str:
    """One line: counts, speed and why it ended."""
    usage, timings = finished.usage, finished.timings
    first = timings.queue_seconds + timings.prefill_seconds
    parts = [
        f"{usage.prompt_tokens} prompt tokens, {usage.generated_tokens} generated",
        f"first after {first:.2f} s",
    ]
    if timings.decode_seconds > 0 and usage.generated_tokens > 1:
        parts.append(f"{(usage.generated_tokens - 1) / timings.decode_seconds:.1f} tokens/s")
    parts.append(f"ended by {finished.reason.replace('_', ' ')}")
    return "[" + "; ".join(parts) + "]"
