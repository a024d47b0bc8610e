"""``edgectl generate``: one prompt, its text as it comes."""

import json
import sys
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from edged.cli.connection import connect, take_patiently, wait_until_serving
from edged.cli.generation_options import (
    AnswersOption,
    BadWordOption,
    ChoiceOption,
    FrequencyPenaltyOption,
    JsonSchemaOption,
    LarkOption,
    LogitBiasOption,
    LogprobsOption,
    MinPOption,
    MinTokensOption,
    PenaltyWindowOption,
    PresencePenaltyOption,
    RawOption,
    ReadyMadeOption,
    RegexOption,
    RepetitionPenaltyOption,
    ToolChoiceOption,
    ToolOption,
    TypicalPOption,
    call_object,
    generation_options,
)
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
from edged.cli.terminal import note, write_beside, write_text
from edged.client import Answer, Chunk, Finished, Generation, Started
from edged.client.attempts import Attempts
from edged.client.events import AnswerBuilder, TokenLogprobs
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
    min_p: MinPOption = None,
    typical_p: TypicalPOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    presence_penalty: PresencePenaltyOption = None,
    frequency_penalty: FrequencyPenaltyOption = None,
    penalty_window: PenaltyWindowOption = None,
    logit_bias: LogitBiasOption = [],  # noqa: B006
    bad_word: BadWordOption = [],  # noqa: B006
    min_tokens: MinTokensOption = 0,
    logprobs: LogprobsOption = None,
    answers: AnswersOption = None,
    json_schema: JsonSchemaOption = None,
    regex: RegexOption = None,
    lark: LarkOption = None,
    choice: ChoiceOption = [],  # noqa: B006
    form: ReadyMadeOption = None,
    tool_choice: ToolChoiceOption = None,
    tool: ToolOption = None,
    raw: RawOption = False,
    stop: StopOption = [],  # noqa: B006 - Typer's way to say that it may be given several times; never changed
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's own end of text.", show_default=False)
    ] = False,
    session: SessionOption = "",
    priority: PriorityOption = 0,
    no_speculation: Annotated[
        bool,
        typer.Option(
            "--no-speculation", help="Verify no draft tokens; the text is the same.", show_default=False
        ),
    ] = False,
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
    --chat. What a model thinks goes to standard error, a tool call is a line of JSON.
    """
    text = read_prompt(prompt)
    options = chat_options(tools, template_arg, think)
    choices = generation_options(
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        penalty_window=penalty_window,
        logit_bias=logit_bias,
        bad_words=bad_word,
        min_tokens=min_tokens,
        logprobs=logprobs,
        n=answers,
        json_schema=json_schema,
        regex=regex,
        lark=lark,
        choice=choice,
        ready_made=form,
        tool_choice=tool_choice,
        tool=tool,
        raw=raw,
    )
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    form_options: dict[str, Any] = {**options, **choices}
    with connect(address) as client:
        wait_until_serving(client, wait)
        several = (answers or 1) > 1
        attempts = Attempts(timeout, patient=wait is not None, patience=wait)

        def start() -> Generation:
            return client.generate(
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
                no_speculation=no_speculation,
                timeout=attempts.left(),
                **form_options,
            )

        try:
            show = not as_json and not several
            found = take_patiently(client, start, lambda one: collect(one, show=show), attempts, wait)
        except UnavailableError as error:
            if wait is None and error.retry_seconds is not None and not isinstance(error, UnreachableError):
                raise with_hint(error, "--wait 60s waits until it serves") from error
            raise
    if as_json:
        objects = [answer_object(answer) for answer in found]
        content = {"answers": objects} if several else objects[0]
        sys.stdout.write(json.dumps(content, ensure_ascii=False, indent=2) + "\n")
    elif several:
        show_several(found)
    if stats:
        for answer in found:
            note(describe_finish(answer.finished))


def with_hint(error: EdgedError, hint: str) -> EdgedError:
    """The same error with a further remedy in its message."""
    return type(error)(f"{error.message}; {hint}", field=error.field, retry_seconds=error.retry_seconds)


def collect(generation: Generation, *, show: bool) -> tuple[Answer, ...]:
    """Take every event of a generation; write what comes of it as it comes when ``show``.

    Raises:
        EdgedError: The daemon refused or ended the request. A line that was begun is ended first.
    """
    builder = AnswerBuilder()
    screen = AnswerScreen()
    try:
        for event in generation:
            builder.add(event)
            if show and not isinstance(event, Started):
                screen.add(event)
    except (EdgedError, KeyboardInterrupt):
        screen.end_line()
        raise
    finally:
        generation.cancel()  # Ctrl-C may come while text is written, outside of the iterator
    if show:
        screen.end()
    return builder.build_all()


class AnswerScreen:
    """Writes one answer as it comes: its text, what the model thinks beside it, its calls as lines of JSON."""

    def __init__(self) -> None:
        self._last = ""  # of the text
        self._thinking = False

    def add(self, event: Chunk | Finished) -> None:
        """Write what an event holds."""
        if event.reasoning:
            write_beside(event.reasoning)
            self._thinking = True
        if event.text:
            self._end_thoughts()
            write_text(event.text)
            self._last = event.text[-1]
        for call in event.tool_calls:
            self._end_thoughts()
            self.end_line()
            write_text(json.dumps(call_object(call), ensure_ascii=False) + "\n")
            self._last = "\n"

    def end_line(self) -> None:
        """End a line that was begun."""
        if self._last not in ("", "\n"):
            write_text("\n")
            self._last = "\n"

    def end(self) -> None:
        """The answer is complete; its output ends with a newline."""
        self._end_thoughts()
        if self._last != "\n":
            write_text("\n")

    def _end_thoughts(self) -> None:
        if self._thinking:
            write_beside("\n")
            self._thinking = False


def show_several(answers: tuple[Answer, ...]) -> None:
    """Write answers one after the other, each under its number."""
    for number, answer in enumerate(answers, 1):
        note(f"[answer {number} of {len(answers)}]")
        screen = AnswerScreen()
        screen.add(
            replace(
                answer.finished, text=answer.text, reasoning=answer.reasoning, tool_calls=answer.tool_calls
            )
        )
        screen.end()


def answer_object(answer: Answer) -> dict[str, Any]:
    """What ``--json`` prints."""
    finished = answer.finished
    matched: str | int | None = finished.matched_stop or finished.matched_token_id
    thoughts = {"reasoning": answer.reasoning} if answer.reasoning else {}
    calls = {"tool_calls": [call_object(call) for call in answer.tool_calls]} if answer.tool_calls else {}
    logprobs = {"logprobs": [_logprobs_object(token) for token in answer.logprobs]} if answer.logprobs else {}
    return {
        "text": answer.text,
        **thoughts,
        **calls,
        **logprobs,
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


def _logprobs_object(token: TokenLogprobs) -> dict[str, Any]:
    top = [
        {"token_id": each.token_id, "text": each.text.decode(errors="replace"), "logprob": each.logprob}
        for each in token.top
    ]
    return {"logprob": token.logprob, "top": top}


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
    if usage.drafted_tokens:
        parts.append(f"{usage.accepted_tokens} of {usage.drafted_tokens} drafts accepted")
    parts.append(f"ended by {finished.reason.replace('_', ' ')}")
    return "[" + "; ".join(parts) + "]"
