"""Messages between the daemon and the engine process, as frozen structs that msgspec checks on arrival.

Daemon to engine: :class:`Configure` first, then :class:`Submit`, :class:`Cancel`, :class:`Drain`, :class:`Shutdown`.
Engine to daemon: :class:`Loading`, :class:`Ready`, :class:`Started`, :class:`Tokens`, :class:`Finished`, :class:`Failed`,
:class:`Report`, :class:`Heartbeat`. Tensors never cross.
"""

from __future__ import annotations

import msgspec

from edged.config import Config  # noqa: TC001 - msgspec resolves the annotation
from edged.decoding.sampling import Sampling
from edged.decoding.stops import Stops

__all__ = [
    "Cancel",
    "Configure",
    "Drain",
    "EngineFailed",
    "Failed",
    "Finished",
    "Heartbeat",
    "LedgerRow",
    "Loading",
    "Message",
    "ModelReport",
    "Ready",
    "Report",
    "Sampling",
    "Shutdown",
    "Started",
    "Stops",
    "Submit",
    "Timings",
    "TokenLogprobs",
    "ToDaemon",
    "ToEngine",
    "Tokens",
]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base: the class name travels as the tag."""


class Configure(Message, frozen=True):
    """What to load; the first message and sent once."""

    config: Config


class Submit(Message, frozen=True):
    """Run a request. Token ids have been checked against the vocabulary and the context length."""

    request_id: str
    model: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    stops: Stops
    deadline: float | None = None
    """Seconds of ``time.monotonic()`` (one clock for both processes of one machine)."""
    priority: int = 0
    skip_special_tokens: bool = True


class Cancel(Message, frozen=True):
    """Stop a request; its pages are free at the next step."""

    request_id: str
    reason: str = "cancelled"


class Drain(Message, frozen=True):
    """Finish what was submitted, then exit."""


class Shutdown(Message, frozen=True):
    """Exit now."""


class Loading(Message, frozen=True):
    """Progress of loading one model."""

    model: str
    what: str
    done: int
    total: int


class LedgerRow(msgspec.Struct, frozen=True):
    """One line of the static budget."""

    name: str
    bytes: int
    note: str = ""


class ModelReport(msgspec.Struct, frozen=True):
    """State of one model in the engine."""

    name: str
    state: str
    """``loading``, ``ready`` or ``failed``."""
    executor: str
    device: str
    dtype: str
    context_length: int
    max_sequences: int
    pages: int
    pages_free: int
    running: int
    waiting: int
    prompt_tokens: int = 0
    """Since the engine started."""
    generated_tokens: int = 0
    steps: int = 0
    last_step_seconds: float = 0.0


class Ready(Message, frozen=True):
    """Every model is loaded and its first token came out right."""

    models: tuple[ModelReport, ...]


class Started(Message, frozen=True):
    """The request has its pages and its first step is next."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int = 0
    queue_seconds: float = 0.0


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural log probabilities of one token and of the likeliest ones in its place."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()
    texts: tuple[bytes, ...] = ()
    """What each of ``top_ids`` adds to the text."""


class Tokens(Message, frozen=True):
    """New tokens of one request, and the text that became final with them."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    step_seconds: float = 0.0
    """Device time of the step that gave them."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token, where the request asks for them."""


class Timings(msgspec.Struct, frozen=True):
    """Where the time of a request went, in seconds."""

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    steps: int = 0


class Finished(Message, frozen=True):
    """The request ended well. ``text`` is what was held back and became final."""

    request_id: str
    reason: str
    """``stop_token``, ``stop_string``, ``length`` or ``end_of_sequence``."""
    text: str
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int = 0
    matched_stop: str = ""
    matched_token_id: int | None = None
    timings: Timings = Timings()


class Failed(Message, frozen=True):
    """The request ended badly; ``code`` is a value of :class:`edged.errors.Code`."""

    request_id: str
    code: int
    message: str
    retry_seconds: float | None = None
    field: str = ""


class EngineFailed(Message, frozen=True):
    """The engine cannot go on (a model did not load, a step raised); it exits after this."""

    code: int
    message: str
    fatal: bool = False
    """A new engine would end the same way (a damaged model folder, a budget that does not fit)."""


class Report(Message, frozen=True):
    """Periodic state, sent at most every 250 ms while steps run and once when idle."""

    models: tuple[ModelReport, ...]
    uptime_seconds: float


class Heartbeat(Message, frozen=True):
    """The idle loop has woken and found nothing to do."""


ToEngine = Configure | Submit | Cancel | Drain | Shutdown
ToDaemon = Loading | Ready | Started | Tokens | Finished | Failed | EngineFailed | Report | Heartbeat
