"""What a generation yields, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edged.v1 import inference_pb2

if TYPE_CHECKING:
    from edged.v1 import types_pb2

_REASONS = {
    inference_pb2.FINISH_REASON_END_OF_SEQUENCE: "end_of_sequence",
    inference_pb2.FINISH_REASON_STOP_STRING: "stop_string",
    inference_pb2.FINISH_REASON_STOP_TOKEN: "stop_token",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_CONSTRAINT: "constraint",
}


@dataclass(frozen=True)
class Started:
    """The request has its pages. Everything that was left open is settled here."""

    request_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(frozen=True)
class Logprob:
    """A token and the natural logarithm of its probability; ``text`` may be a part of a character."""

    token_id: int
    logprob: float
    text: bytes = b""


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely a token was to the model itself, and the likeliest ones in its place."""

    logprob: float
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool: its name, and its arguments as the JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Chunk:
    """Text that became final, and the tokens of one step, whose text may come later."""

    text: str
    token_ids: tuple[int, ...]
    step_seconds: float
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token, where they were asked for."""
    reasoning: str = ""
    """What the model thought, which is not in ``text``."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls that are complete with this chunk."""
    index: int = 0
    """Which of several answers it is a piece of."""


@dataclass(frozen=True)
class Usage:
    """Token counts."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    drafted_tokens: int = 0
    """Draft tokens that were verified."""
    accepted_tokens: int = 0
    """Those of them that were the ones drawn."""


@dataclass(frozen=True)
class Timings:
    """Where the time went, in seconds."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    steps: int


@dataclass(frozen=True)
class Finished:
    """The answer is complete; ``text`` is its last piece.

    ``reason`` is ``end_of_sequence``, ``stop_string``, ``stop_token``, ``length`` or ``constraint`` (the answer has the
    form that was asked for, and nothing could follow).
    """

    reason: str
    text: str
    matched_stop: str
    matched_token_id: int | None
    usage: Usage
    timings: Timings
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    index: int = 0


Event = Started | Chunk | Finished


@dataclass(frozen=True)
class Answer:
    """A whole generation in one piece."""

    started: Started
    text: str
    token_ids: tuple[int, ...]
    finished: Finished
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class _Parts:
    """What has come of one answer."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.tool_calls: list[ToolCall] = []
        self.finished: Finished | None = None


class AnswerBuilder:
    """Puts the events of one generation together."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._answers: dict[int, _Parts] = {}

    def add(self, event: Event) -> None:
        """Take the next event."""
        if isinstance(event, Started):
            self._started = event
            return
        parts = self._answers.setdefault(event.index, _Parts())
        parts.texts.append(event.text)
        parts.reasoning.append(event.reasoning)
        parts.tool_calls.extend(event.tool_calls)
        if isinstance(event, Chunk):
            parts.token_ids.extend(event.token_ids)
            parts.logprobs.extend(event.logprobs)
        else:
            parts.finished = event

    def build(self) -> Answer:
        """The answer, after its last event; of several, the first."""
        return self.build_all()[0]

    def build_all(self) -> tuple[Answer, ...]:
        """Every answer, after the last event."""
        if self._started is None or not self._answers:
            raise ValueError("the generation has not ended")
        return tuple(self._build(self._started, parts) for _, parts in sorted(self._answers.items()))

    def _build(self, started: Started, parts: _Parts) -> Answer:
        if parts.finished is None:
            raise ValueError("the generation has not ended")
        return Answer(
            started,
            "".join(parts.texts),
            tuple(parts.token_ids),
            parts.finished,
            tuple(parts.logprobs),
            "".join(parts.reasoning),
            tuple(parts.tool_calls),
        )


def read_event(response: inference_pb2.GenerateResponse) -> Event:
    """The event of one response of the stream."""
    kind = response.WhichOneof("event")
    if kind == "chunk":
        chunk = response.chunk
        return Chunk(
            chunk.text,
            tuple(chunk.token_ids),
            chunk.step_seconds,
            tuple(map(_read_logprobs, chunk.logprobs)),
            chunk.reasoning,
            tuple(map(_read_call, chunk.tool_calls)),
            chunk.index,
        )
    if kind == "started":
        return _read_started(response.started)
    return _read_finished(response.finished)


def _read_call(call: types_pb2.ToolCall) -> ToolCall:
    return ToolCall(call.id, call.name, call.arguments)


def _read_logprobs(token: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple(Logprob(each.token_id, each.logprob, each.text) for each in token.top)
    return TokenLogprobs(token.logprob, top)


def _read_started(started: inference_pb2.Started) -> Started:
    return Started(
        request_id=started.request_id,
        model=started.model,
        prompt_tokens=started.prompt_tokens,
        cached_tokens=started.cached_tokens,
        max_tokens=started.max_tokens,
        temperature=started.sampling.temperature,
        top_k=started.sampling.top_k,
        top_p=started.sampling.top_p,
        seed=started.sampling.seed,
    )


def _read_finished(finished: inference_pb2.Finished) -> Finished:
    usage: types_pb2.Usage = finished.usage
    timings: types_pb2.Timings = finished.timings
    return Finished(
        reason=_REASONS.get(finished.reason, "unknown"),
        text=finished.text,
        matched_stop=finished.matched_stop,
        matched_token_id=finished.matched_token_id if finished.HasField("matched_token_id") else None,
        usage=Usage(
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.generated_tokens,
            usage.drafted_tokens,
            usage.accepted_tokens,
        ),
        timings=Timings(
            timings.queue_seconds, timings.prefill_seconds, timings.decode_seconds, timings.steps
        ),
        reasoning=finished.reasoning,
        tool_calls=tuple(map(_read_call, finished.tool_calls)),
        index=finished.index,
    )
