"""Builds the chat of a request from the dictionaries that people write: OpenAI's form of messages, calls and tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from edged.client.fields import set_field
from edged.errors import InvalidArgumentError

if TYPE_CHECKING:
    from edged.v1 import types_pb2


class ChatOptions(TypedDict, total=False):
    """Keyword arguments of a chat; what is left out or None takes the model's or the API's default.

    ``tools`` are dictionaries in OpenAI's form, or their JSON text. Their meaning stands in
    ``protos/edged/v1/types.proto``.
    """

    tools: Iterable[Mapping[str, Any] | str] | None
    template_arguments: Mapping[str, Any] | None
    enable_thinking: bool | None
    template: str | None
    continue_final_message: bool


_MESSAGE_KEYS = ("role", "content", "name", "tool_call_id")
_REASONING_KEYS = ("reasoning", "reasoning_content", "thinking")
CHAT_OPTIONS = tuple(ChatOptions.__annotations__)


def put_chat(chat: types_pb2.Chat, messages: Iterable[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
    """Fill the chat of a request.

    Raises:
        InvalidArgumentError: A message has an unknown key, or a value that the request cannot hold.
    """
    for index, message in enumerate(messages):
        _put_message(chat.messages.add(), message, f"messages[{index}]")
    for index, tool in enumerate(options.get("tools") or ()):
        chat.tools.append(_json(tool, f"tools[{index}]"))
    arguments = options.get("template_arguments")
    if arguments is not None:
        set_field(chat, "template_arguments", _json(arguments, "template_arguments"))
    for name in ("enable_thinking", "template", "continue_final_message"):
        set_field(chat, name, options.get(name))


def _put_message(message: types_pb2.ChatMessage, given: Mapping[str, Any], where: str) -> None:
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(
            f"{where} is {str(given)[:60]!r}; give a dictionary with role and content", field="chat"
        )
    unknown = sorted(set(given) - {*_MESSAGE_KEYS, *_REASONING_KEYS, "tool_calls"})
    if unknown:
        raise InvalidArgumentError(
            f"{where} has the key {unknown[0]!r}; a message may have {', '.join(_MESSAGE_KEYS)}, tool_calls and "
            "reasoning",
            field="chat",
        )
    for name in _MESSAGE_KEYS:
        set_field(message, name, given.get(name))
    set_field(
        message,
        "reasoning",
        next((given[key] for key in _REASONING_KEYS if given.get(key) is not None), None),
    )
    for number, call in enumerate(given.get("tool_calls") or ()):
        _put_call(message.tool_calls.add(), call, f"{where}.tool_calls[{number}]")


def _put_call(call: types_pb2.ToolCall, given: Any, where: str) -> None:  # noqa: ANN401 - what the caller has
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(f"{where} is {str(given)[:60]!r}; give a dictionary", field="chat")
    function = given.get("function", given)
    if not isinstance(function, Mapping):
        raise InvalidArgumentError(
            f"{where}.function is {str(function)[:60]!r}; give a dictionary with name and arguments",
            field="chat",
        )
    set_field(call, "id", given.get("id"))
    set_field(call, "name", function.get("name"))
    arguments = function.get("arguments")
    if arguments is not None:
        set_field(call, "arguments", _json(arguments, f"{where}.arguments"))


def _json(value: Any, where: str) -> str:  # noqa: ANN401 - what the caller has
    """The JSON text of a dictionary; a text is taken as one already.

    Raises:
        InvalidArgumentError: It is neither, or holds what JSON cannot.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(
            f"{where} is {str(value)[:60]!r}; give a dictionary or its JSON text",
            field=where.partition("[")[0],
        )
    try:
        return json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{where} is no JSON: {error}", field=where.partition("[")[0]) from None
