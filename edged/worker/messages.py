"""Messages between the daemon and the engine process, as frozen structs that msgspec checks on arrival.

Daemon to engine: :class:`Configure` first, then :class:`Submit`, :class:`Cancel`, :class:`Drain`, :class:`Shutdown`.
Engine to daemon: :class:`Loading`, :class:`Ready`, :class:`Started`, :class:`Tokens`, :class:`Finished`, :class:`Failed`,
:class:`Report`, :class:`Heartbeat`. Tensors never cross but for the vector of an embedding.
"""

from __future__ import annotations

import msgspec

from edged.config import Config  # noqa: TC001 - msgspec resolves the annotation
from edged.decoding.constraints.base import Grammar  # noqa: TC001 - msgspec resolves the annotation
from edged.decoding.pooling import Embedding  # noqa: TC001 - msgspec resolves the annotation
from edged.decoding.sampling import Sampling
from edged.decoding.stops import Stops
from edged.worker.measures import Percentiles, StepBucket

__all__ = [
    "Answered",
    "Cancel",
    "Configure",
    "Drain",
    "DropSession",
    "EngineFailed",
    "Failed",
    "Finished",
    "Heartbeat",
    "LedgerRow",
    "ListSessions",
    "LoadModel",
    "Loading",
    "Message",
    "ModelReport",
    "Ready",
    "Report",
    "Sampling",
    "SessionReport",
    "Shutdown",
    "Started",
    "Stops",
    "Submit",
    "Timings",
    "ToDaemon",
    "ToEngine",
    "TokenLogprobs",
    "Tokens",
    "UnloadModel",
]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base: the class name travels as the tag."""


class Configure(Message, frozen=True):
    """What to load; the first message and sent once."""

    config: Config
    load: tuple[str, ...] | None = None
    """Names of the models to load; None: all of them."""


class LoadModel(Message, frozen=True):
    """Load a model of the configuration beside the others; answered by :class:`Answered`."""

    query: int
    model: str


class UnloadModel(Message, frozen=True):
    """Give a model's memory back; what still runs on it ends. Answered by :class:`Answered`."""

    query: int
    model: str


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
    kept_token_ids: tuple[int, ...] = ()
    """Special tokens that stay in the text all the same, because the daemon looks for them there."""
    speculation: bool = True
    """Whether draft tokens may be verified, where the model has them."""
    grammar: Grammar | None = None
    """The form of the answer."""
    tenant: str = ""
    """Whose cached pages and sessions it may see: the identity of a client that authenticates."""
    session: str = ""
    """Conversation whose pages stay pinned after it."""
    embedding: Embedding | None = None
    """The vector that is wanted instead of an answer; then sampling and stops mean nothing."""
    arrived: float | None = None
    """When the daemon had it, in seconds of ``time.monotonic()``: what it waited there counts as waiting. None: it comes now."""


class Cancel(Message, frozen=True):
    """Stop a request; its pages are free at the next step."""

    request_id: str
    reason: str = "cancelled"


class ListSessions(Message, frozen=True):
    """Ask what sessions there are; answered by :class:`Answered`."""

    query: int
    model: str


class DropSession(Message, frozen=True):
    """Let a session's pages go; answered by :class:`Answered`."""

    query: int
    model: str
    tenant: str
    name: str


class SessionReport(msgspec.Struct, frozen=True):
    """One session."""

    tenant: str
    name: str
    pages: int
    requests: int
    idle_seconds: float


class Answered(Message, frozen=True):
    """The answer to a query of the daemon."""

    query: int
    sessions: tuple[SessionReport, ...] = ()
    found: bool = True
    code: int = 0
    """A value of :class:`edged.errors.Code` where it could not be done; ``message`` says why."""
    message: str = ""


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
    """``loading``, ``ready``, ``unloading`` or ``unloaded``."""
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
    cached_tokens: int = 0
    """Prompt tokens that were found in the cache and not computed, since the engine started."""
    pages_cached: int = 0
    """Free pages whose content the cache knows."""
    pages_pinned: int = 0
    """Pages that sessions keep."""
    sessions: int = 0
    suspended: int = 0
    """Requests among those waiting that ran before and lie in host memory."""
    suspensions: int = 0
    """Times that a request was suspended, since the engine started."""
    host_pages: int = 0
    host_pages_free: int = 0
    retry_seconds: float = 1.0
    """When a place in a full queue is likely to be free."""
    prompt_rate: float = 0.0
    """Prompt tokens computed a second, lately."""
    generated_rate: float = 0.0
    """Tokens generated a second, lately."""
    first_token: Percentiles = Percentiles()
    """From a request's arrival to its first token."""
    between_messages: Percentiles = Percentiles()
    """Between two messages with tokens of one request (ITL)."""
    per_token: Percentiles = Percentiles()
    """Mean time of a token after the first, of each answer that finished (TPOT)."""
    queue_time: Percentiles = Percentiles()
    """From a request's arrival to its start."""
    speculation: str = "off"
    """Where draft tokens come from."""
    drafted_tokens: int = 0
    """Draft tokens that were verified, since the engine started."""
    accepted_tokens: int = 0
    """Those of them that were the ones drawn."""
    step_times: tuple[StepBucket, ...] = ()
    """Steps by their size."""


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
    """``stop_token``, ``stop_string``, ``length`` or ``end_of_sequence``; ``embedding``."""
    text: str
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int = 0
    matched_stop: str = ""
    matched_token_id: int | None = None
    timings: Timings = Timings()
    drafted_tokens: int = 0
    """Draft tokens that were verified."""
    accepted_tokens: int = 0
    """Those of them that were the ones drawn."""
    embedding: bytes = b""
    """The vector, little-endian fp32."""


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


ToEngine = (
    Configure | Submit | Cancel | LoadModel | UnloadModel | ListSessions | DropSession | Drain | Shutdown
)
ToDaemon = (
    Loading | Ready | Started | Tokens | Finished | Failed | EngineFailed | Report | Heartbeat | Answered
)
