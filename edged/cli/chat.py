"""``edgectl chat``: a conversation at the terminal, kept until ``/reset``."""

import contextlib
import sys
from typing import cast

from edged.cli.connection import connect, take_patiently, wait_until_serving
from edged.cli.generate import describe_finish
from edged.cli.options import (
    AddressOption,
    MaxTokensOption,
    ModelOption,
    SeedOption,
    SessionOption,
    StopOption,
    SystemOption,
    TemperatureOption,
    TemplateArgOption,
    ThinkOption,
    TimeoutOption,
    TopKOption,
    TopPOption,
    WaitOption,
    chat_options,
    unescape,
)
from edged.cli.terminal import note, say_error, write_beside, write_text
from edged.client import Client, Finished, Generation
from edged.client.attempts import Attempts
from edged.client.requests import GenerateOptions
from edged.errors import EdgedError, UnreachableError

_HELP = (
    "/reset      forget the conversation\n"
    "/system X   set the system message to X and forget the conversation; without X remove it\n"
    "/retry      answer the last message again\n"
    "/think      let the model think before it answers; /no_think: not; both keep the conversation\n"
    "/stats      show or hide counts and speed after each answer\n"
    "/exit       leave; so does Ctrl-D\n"
    "Ctrl-C stops an answer. A line that ends with \\ goes on in the next one."
)


def command(
    *,
    address: AddressOption = None,
    system: SystemOption = None,
    template_arg: TemplateArgOption = [],  # noqa: B006 - Typer's way to say that it may be given several times; never changed
    think: ThinkOption = None,
    model: ModelOption = "",
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    stop: StopOption = [],  # noqa: B006 - Typer's way to say that it may be given several times; never changed
    session: SessionOption = "",
    wait: WaitOption = None,
    timeout: TimeoutOption = None,
) -> None:
    """Talk with the model; /help shows what can be typed.

    Without a terminal each line of standard input is one message.
    """
    options: GenerateOptions = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": [unescape(item) for item in stop],
        "session": session,
    }
    options.update(cast("GenerateOptions", chat_options(None, template_arg, think)))
    with connect(address) as client:
        wait_until_serving(client, wait)
        # A daemon that is not there is told of before the first message is typed.
        client.status()
        Conversation(client, options, system=system, timeout=timeout, wait=wait).run()


class Conversation:
    """The messages so far, and what the lines typed do to them.

    Args:
        client: Of the daemon.
        options: Of every request.
        system: The system message.
        timeout: Seconds that each answer has.
        wait: Seconds that a message waits for a daemon that starts again; None: it is refused then.
    """

    def __init__(
        self,
        client: Client,
        options: GenerateOptions,
        *,
        system: str | None,
        timeout: float | None,
        wait: float | None,
    ) -> None:
        self.messages: list[dict[str, str]] = []
        self._client = client
        self._options = options
        self._system = system
        self._timeout = timeout
        self._wait = wait
        self._stats = False
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        """Take lines until ``/exit`` or the end of the input.

        Raises:
            EdgedError: Without a terminal, the first request that was refused.
        """
        if self._interactive:
            # Importing it gives input() line editing and the history of this session.
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401, PLC0415
            note("/help shows the commands; Ctrl-C stops an answer; Ctrl-D leaves")
        while True:
            try:
                line = self._read()
            except EOFError:
                if self._interactive:
                    sys.stdout.write("\n")
                return
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                sys.stdout.write("\n")
                note("/exit or Ctrl-D leaves")
                continue
            if not line.strip():
                continue
            if line.strip() in ("/exit", "/quit", "exit", "quit"):
                return
            if line.startswith("/"):
                self._obey(line)
            else:
                self._say(line)

    def _read(self) -> str:
        """One message; several lines when all but the last end with a backslash."""
        lines = [self._line("> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(". "))
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        line = input(prompt) if self._interactive else sys.stdin.readline()
        if not self._interactive and not line:
            raise EOFError
        return line.rstrip("\n")

    def _obey(self, line: str) -> None:
        name, _, rest = line.strip().partition(" ")
        if name == "/help":
            sys.stdout.write(_HELP + "\n")
        elif name == "/reset":
            self.messages.clear()
            note("the conversation is forgotten")
        elif name == "/system":
            self._system = rest.strip() or None
            self.messages.clear()
            note(
                "the system message is "
                + ("set" if self._system else "removed")
                + ", the conversation forgotten"
            )
        elif name in ("/think", "/no_think", "/no-think"):
            self._options["enable_thinking"] = name == "/think"
            note("the model is asked " + ("to think" if name == "/think" else "not to think"))
        elif name == "/stats":
            self._stats = not self._stats
            note("counts are " + ("shown" if self._stats else "hidden"))
        elif name == "/retry":
            self._retry()
        else:
            say_error(f"there is no {name}; /help shows the commands (put a space before it to send it)")

    def _retry(self) -> None:
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        if self.messages:
            self._say(self.messages.pop()["content"])
        else:
            say_error("there is no message to answer again")

    def _say(self, text: str) -> None:
        """Send a message and show the answer; both are kept unless the daemon refused."""
        # What the terminal could not decode arrives as lone surrogates, which no message can hold.
        text = text.encode(errors="replace").decode()
        self.messages.append({"role": "user", "content": text})
        opening: list[dict[str, str]] = [{"role": "system", "content": self._system}] if self._system else []
        pieces: list[str] = []
        try:
            self._answer([*opening, *self.messages], pieces)
        except KeyboardInterrupt:
            write_text("\n")
            if not self._interactive:
                raise
            note("stopped; what was said so far is kept")
        except EdgedError as error:
            if pieces:
                write_text("\n")
            self.messages.pop()
            if not self._interactive:
                raise
            say_error(error.message)
            if not isinstance(error, UnreachableError) and self.messages:
                note("the message was not kept; /reset forgets the conversation")
            return
        self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _answer(self, messages: list[dict[str, str]], pieces: list[str]) -> None:
        attempts = Attempts(self._timeout, patient=self._wait is not None, patience=self._wait)

        def start() -> Generation:
            return self._client.generate(messages, timeout=attempts.left(), **self._options)

        take_patiently(self._client, start, lambda one: self._take(one, pieces), attempts, self._wait)

    def _take(self, generation: Generation, pieces: list[str]) -> None:
        """Write an answer as it comes, and keep its text."""
        thinking = False
        try:
            for event in generation:
                if getattr(event, "reasoning", ""):
                    write_beside(getattr(event, "reasoning", ""))
                    thinking = True
                text = getattr(event, "text", "")
                if text:
                    if thinking:
                        write_beside("\n")
                        thinking = False
                    pieces.append(text)
                    write_text(text)
                if isinstance(event, Finished):
                    write_text("\n")
                    if self._stats:
                        note(describe_finish(event))
        finally:
            generation.cancel()  # Ctrl-C may come while text is written, outside of the iterator
