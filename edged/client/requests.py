"""Builds request messages from plain Python values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, Union

from google.protobuf.descriptor import FieldDescriptor

from edged.errors import InvalidArgumentError
from edged.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from google.protobuf.message import Message

Prompt = Union[str, "Sequence[int]", "Sequence[Mapping[str, str]]"]
"""Plain text, token ids, or the messages of a chat (``{"role": …, "content": …}``)."""


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of ``generate``; what is left out or None takes the model's or the API's default.

    Their meaning, unit and range stand in ``protos/edged/v1/types.proto``. ``stop`` is one string or several.
    """

    model: str
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    max_tokens: int | None
    stop: str | Iterable[str]
    stop_token_ids: Iterable[int]
    ignore_eos: bool
    keep_special_tokens: bool
    priority: int
    continue_final_message: bool


_SAMPLING = ("temperature", "top_k", "top_p", "seed")


def generate_request(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """The request of one generation.

    Raises:
        InvalidArgumentError: A value that the message cannot hold; the daemon checks the rest.
        TypeError: A keyword that ``generate`` does not have.
    """
    unknown = sorted(set(options) - set(GenerateOptions.__annotations__))
    if unknown:
        raise TypeError(
            f"generate has no argument {unknown[0]!r}; it has {sorted(GenerateOptions.__annotations__)}"
        )
    request = inference_pb2.GenerateRequest()
    _put_prompt(request, prompt, continue_final_message=options.get("continue_final_message", False))
    _set(request, "model", options.get("model"))
    _set(request, "priority", options.get("priority"))
    _set(request, "keep_special_tokens", options.get("keep_special_tokens"))
    for name in _SAMPLING:
        _set(request.sampling, name, options.get(name))
    _set(request.stops, "max_tokens", options.get("max_tokens"))
    _set(request.stops, "ignore_eos", options.get("ignore_eos"))
    stop = options.get("stop", ())
    _extend(request.stops, "strings", (stop,) if isinstance(stop, str) else stop)
    _extend(request.stops, "token_ids", options.get("stop_token_ids", ()))
    return request


def tokenize_request(prompt: Prompt, *, model: str, no_special_tokens: bool) -> inference_pb2.TokenizeRequest:
    """The request that turns text or a chat into token ids.

    Raises:
        InvalidArgumentError: A value that the message cannot hold.
    """
    request = inference_pb2.TokenizeRequest()
    _put_prompt(request, prompt)
    _set(request, "model", model)
    _set(request, "no_special_tokens", no_special_tokens)
    return request


def detokenize_request(
    token_ids: Iterable[int], *, model: str, keep_special_tokens: bool
) -> inference_pb2.DetokenizeRequest:
    """The request that turns token ids into text.

    Raises:
        InvalidArgumentError: A value that the message cannot hold.
    """
    request = inference_pb2.DetokenizeRequest()
    _extend(request, "token_ids", token_ids)
    _set(request, "model", model)
    _set(request, "keep_special_tokens", keep_special_tokens)
    return request


def _put_prompt(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
    prompt: Prompt,
    *,
    continue_final_message: bool = False,
) -> None:
    if isinstance(prompt, str):
        _set(request, "text", prompt)
        return
    items: list[Any] = list(prompt)
    if items and not isinstance(items[0], int):
        request.chat.continue_final_message = continue_final_message
        for item in items:
            message = request.chat.messages.add()
            for name in ("role", "content", "name"):
                _set(message, name, item.get(name))
            unknown = sorted(set(item) - {"role", "content", "name"})
            if unknown:
                raise InvalidArgumentError(
                    f"a chat message has the key {unknown[0]!r}; it may have role, content and name",
                    field="chat",
                )
    elif isinstance(request, inference_pb2.GenerateRequest):
        request.token_ids.SetInParent()
        _extend(request.token_ids, "ids", items)
    else:
        raise InvalidArgumentError("Tokenize takes text or a chat, not token ids", field="prompt")


_WHOLE_NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
"""What a field of each whole type can hold; the daemon checks the rest."""


def _set(message: Message, name: str, value: object) -> None:
    """Set a field; None leaves it out."""
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        limits = _WHOLE_NUMBERS.get(message.DESCRIPTOR.fields_by_name[name].cpp_type)
        why = "give a whole number from {} to {}".format(*limits) if limits else str(error)
        raise InvalidArgumentError(f"{name} is {value!r}: {why}", field=name) from error


def _extend(message: Message, name: str, values: Iterable[object]) -> None:
    """Fill a repeated field."""
    try:
        getattr(message, name).extend(values)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name} cannot be sent: {error}", field=name) from error
