"""Every check of a request. A refusal names the field, the value and its limit, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.decoding.stops import Stops
from edged.errors import InvalidArgumentError
from edged.server.chat import chat_bytes
from edged.server.errors import clip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.config import LimitsConfig
    from edged.v1 import control_pb2, inference_pb2, types_pb2

PRIORITY_LIMIT = 100
SESSION_LIMIT = 128
INTERVALS = (0.1, 3600.0)
_SHOWN = 60


def check_text(text: str) -> None:
    """Refuse an empty prompt.

    Raises:
        InvalidArgumentError: It is.
    """
    if not text:
        raise InvalidArgumentError("text is empty; give a prompt of at least one character", field="text")


def check_token_ids(ids: Sequence[int], vocabulary: int, field: str) -> None:
    """Refuse ids that the model has no token for.

    Raises:
        InvalidArgumentError: One is ``vocabulary`` or larger.
    """
    if ids and max(ids) >= vocabulary:
        index = next(index for index, token_id in enumerate(ids) if token_id >= vocabulary)
        raise InvalidArgumentError(
            f"{field}[{index}] is {ids[index]}, and the model's ids go from 0 to {vocabulary - 1}; make the ids with the "
            "model's own tokenizer (Tokenize)",
            field=f"{field}[{index}]",
        )


def prompt_bytes(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> int:
    """UTF-8 bytes of a prompt's text, tools and template arguments included; 0 for token ids."""
    if request.WhichOneof("prompt") == "text":
        return len(request.text.encode())
    return chat_bytes(request.chat)


def check_prompt_size(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
    *,
    prompt_size: int,
    context_length: int,
    longest_token: int,
) -> None:
    """Refuse text that is far beyond the context before seconds and memory are spent on tokenizing it.

    Raises:
        InvalidArgumentError: It has more bytes than the configuration allows, or more than twice what the context could
            hold if every token were the vocabulary's longest (normalization may shorten a text, hence twice), or its
            chat has more messages than the context has tokens.
    """
    if len(request.chat.messages) > context_length:
        raise InvalidArgumentError(
            f"chat.messages has {len(request.chat.messages)} messages, and the context holds {context_length} tokens; "
            "leave out the oldest messages",
            field="chat.messages",
        )
    kind = request.WhichOneof("prompt") or ""
    size = prompt_bytes(request)
    if size > prompt_size:
        raise InvalidArgumentError(
            f"{kind} has {size} bytes, and a prompt may have {prompt_size} (limits.prompt_size); shorten it, send token "
            "ids, or raise the limit in the configuration",
            field=kind,
        )
    most = context_length * longest_token
    if size > 2 * most:
        raise InvalidArgumentError(
            f"{kind} has {size} bytes, and the context of {context_length} tokens could not hold more than {most}, however "
            "they are cut; shorten the prompt or raise context_length in the configuration",
            field=kind,
        )


def check_token_count(ids: Sequence[int], context_length: int, field: str) -> None:
    """Refuse more ids than a sequence may hold.

    Raises:
        InvalidArgumentError: There are more than ``context_length``.
    """
    if len(ids) > context_length:
        raise InvalidArgumentError(
            f"{field} has {len(ids)} ids, and a sequence holds at most {context_length} (context_length); send them in "
            "pieces",
            field=field,
        )


def check_prompt_length(tokens: int, context_length: int, field: str) -> None:
    """Refuse a prompt that leaves no room for one token of answer.

    Raises:
        InvalidArgumentError: It is empty or too long.
    """
    if tokens == 0:
        raise InvalidArgumentError(
            f"{field} makes a prompt of no tokens; give at least one token", field=field
        )
    if tokens >= context_length:
        raise InvalidArgumentError(
            f"{field} makes a prompt of {tokens} tokens, and the context holds {context_length} tokens of prompt and "
            f"answer together; shorten the prompt to at most {context_length - 1} tokens or raise context_length in the "
            "configuration",
            field=field,
        )


def check_priority(priority: int) -> None:
    """Refuse a priority outside its range.

    Raises:
        InvalidArgumentError: It is.
    """
    if not -PRIORITY_LIMIT <= priority <= PRIORITY_LIMIT:
        raise InvalidArgumentError(
            f"priority is {priority}; give a number from -{PRIORITY_LIMIT} to {PRIORITY_LIMIT}",
            field="priority",
        )


def check_session(session: str) -> None:
    """Refuse a session's name that is too long or cannot be shown.

    Raises:
        InvalidArgumentError: It is.
    """
    if len(session) > SESSION_LIMIT or not session.isprintable():
        raise InvalidArgumentError(
            f"session is {clip(session, _SHOWN)!r}; give at most {SESSION_LIMIT} printable characters",
            field="session",
        )


def check_interval(request: control_pb2.WatchStatusRequest) -> float:
    """Seconds between two responses of a watch.

    Raises:
        InvalidArgumentError: Outside its range.
    """
    if not request.HasField("interval_seconds"):
        return 1.0
    interval = request.interval_seconds
    if not INTERVALS[0] <= interval <= INTERVALS[1]:  # false for NaN as well
        raise InvalidArgumentError(
            f"interval_seconds is {interval}; give a number from {INTERVALS[0]} to {INTERVALS[1]}",
            field="interval_seconds",
        )
    return interval


def resolve_stops(
    stops: types_pb2.Stops,
    *,
    limits: LimitsConfig,
    prompt_tokens: int,
    context_length: int,
    vocabulary: int,
    eos_token_ids: tuple[int, ...],
) -> Stops:
    """Check when the answer shall end and fill in what the request leaves out.

    Raises:
        InvalidArgumentError: A stop or ``max_tokens`` is outside its range.
    """
    strings, token_ids = _stop_strings(stops, limits), _stop_token_ids(stops, limits, vocabulary)
    room = context_length - prompt_tokens
    max_tokens = stops.max_tokens if stops.HasField("max_tokens") else room
    if max_tokens < 1:
        raise InvalidArgumentError(
            "stops.max_tokens is 0; ask for at least 1 token, or leave the field out for all that the context leaves",
            field="stops.max_tokens",
        )
    if max_tokens > room:
        raise InvalidArgumentError(
            f"stops.max_tokens is {max_tokens}, and a prompt of {prompt_tokens} tokens leaves {room} of the context's "
            f"{context_length}; ask for at most {room}, shorten the prompt, or raise context_length in the configuration",
            field="stops.max_tokens",
        )
    if stops.min_tokens > max_tokens:
        raise InvalidArgumentError(
            f"stops.min_tokens is {stops.min_tokens}, and at most {max_tokens} tokens are generated; ask for fewer",
            field="stops.min_tokens",
        )
    eos = () if stops.ignore_eos else eos_token_ids
    return Stops(
        max_tokens=max_tokens,
        strings=strings,
        token_ids=tuple(dict.fromkeys((*eos, *token_ids))),
        eos_token_ids=eos,
        min_tokens=stops.min_tokens,
    )


def _stop_strings(stops: types_pb2.Stops, limits: LimitsConfig) -> tuple[str, ...]:
    if len(stops.strings) > limits.stop_strings:
        raise InvalidArgumentError(
            f"stops.strings has {len(stops.strings)} strings, and at most {limits.stop_strings} are allowed; send fewer "
            "or raise limits.stop_strings in the configuration",
            field="stops.strings",
        )
    for index, string in enumerate(stops.strings):
        size = len(string.encode())
        if not string:
            raise InvalidArgumentError(
                f"stops.strings[{index}] is empty; leave it out", field=f"stops.strings[{index}]"
            )
        if size > limits.stop_bytes:
            raise InvalidArgumentError(
                f"stops.strings[{index}] has {size} bytes, and at most {limits.stop_bytes} are allowed; shorten it or "
                "raise limits.stop_bytes in the configuration",
                field=f"stops.strings[{index}]",
            )
    return tuple(dict.fromkeys(stops.strings))


def _stop_token_ids(stops: types_pb2.Stops, limits: LimitsConfig, vocabulary: int) -> tuple[int, ...]:
    if len(stops.token_ids) > limits.stop_token_ids:
        raise InvalidArgumentError(
            f"stops.token_ids has {len(stops.token_ids)} ids, and at most {limits.stop_token_ids} are allowed; send fewer "
            "or raise limits.stop_token_ids in the configuration",
            field="stops.token_ids",
        )
    check_token_ids(stops.token_ids, vocabulary, "stops.token_ids")
    return tuple(dict.fromkeys(stops.token_ids))
