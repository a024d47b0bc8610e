"""Reading the chat of a request: what its messages, tools and template arguments are, checked before any template runs.

Tools and arguments come as JSON text, because templates print them: a ``google.protobuf.Struct`` would turn 5 into 5.0
and forget the order of keys.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from edged.errors import InvalidArgumentError
from edged.server.errors import clip

if TYPE_CHECKING:
    from edged.v1 import types_pb2

ROLES = ("system", "user", "assistant", "tool")
MOST_TOOLS = 1024
_SHOWN = 60
# What the templates in use expect of arguments with these names; a wrong type is silently taken for another value there.
_ARGUMENT_TYPES: dict[str, tuple[type, str]] = {
    "enable_thinking": (bool, "true or false"),
    "thinking": (bool, "true or false"),
    "clear_thinking": (bool, "true or false"),
    "preserve_thinking": (bool, "true or false"),
    "tools_in_user_message": (bool, "true or false"),
    "thinking_budget": (int, "a whole number"),
    "reasoning_effort": (str, "a text"),
    "date_string": (str, "a text"),
    "builtin_tools": (list, "a list"),
    "xml_tools": (list, "a list"),
    "python_tools": (list, "a list"),
}


@dataclass(frozen=True)
class ChatPrompt:
    """A chat as a template takes it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    enable_thinking: bool | None = None
    continue_final_message: bool = False
    template: str = ""


def chat_bytes(chat: types_pb2.Chat) -> int:
    """UTF-8 bytes of everything in a chat that its template may write."""
    size = len(chat.template_arguments.encode()) + sum(len(tool.encode()) for tool in chat.tools)
    for message in chat.messages:
        size += len(message.role) + len(message.content.encode()) + len(message.name.encode())
        size += len(message.reasoning.encode()) + len(message.tool_call_id.encode())
        size += sum(
            len(call.id.encode()) + len(call.name.encode()) + len(call.arguments.encode())
            for call in message.tool_calls
        )
    return size


def read_chat(chat: types_pb2.Chat) -> ChatPrompt:
    """Check a chat and take what its template needs.

    Raises:
        InvalidArgumentError: No message, an unknown role, a field beside a role that has none, nothing to go on with,
            tools or arguments that are no JSON objects; ``field`` names it.
    """
    if not chat.messages:
        raise InvalidArgumentError("chat.messages is empty; give at least one message", field="chat.messages")
    messages = [
        _read_message(message, f"chat.messages[{index}]") for index, message in enumerate(chat.messages)
    ]
    if chat.continue_final_message and chat.messages[-1].role != "assistant":
        raise InvalidArgumentError(
            f"chat.continue_final_message needs a last message of role assistant, and the last one is of role "
            f"{chat.messages[-1].role}; add the text to go on with, or leave the field out",
            field="chat.continue_final_message",
        )
    return ChatPrompt(
        messages=messages,
        tools=read_tools(chat),
        arguments=_read_arguments(chat),
        enable_thinking=chat.enable_thinking if chat.HasField("enable_thinking") else None,
        continue_final_message=chat.continue_final_message,
        template=chat.template,
    )


def read_tools(chat: types_pb2.Chat) -> list[dict[str, Any]] | None:
    """The tools of a chat, or None where it has none.

    Raises:
        InvalidArgumentError: One is no JSON object, has no name, or its parameters are no object.
    """
    if len(chat.tools) > MOST_TOOLS:
        raise InvalidArgumentError(
            f"chat.tools has {len(chat.tools)} tools, and at most {MOST_TOOLS} are allowed",
            field="chat.tools",
        )
    tools = []
    names: dict[str, int] = {}
    for index, text in enumerate(chat.tools):
        where = f"chat.tools[{index}]"
        tool = read_json_object(text, where)
        function = tool.get("function", tool)
        path = f"{where}.function" if "function" in tool else where
        if not isinstance(function, dict):
            raise _refusal(path, function, 'give an object: {"name": …, "description": …, "parameters": …}')
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise _refusal(f"{path}.name", name, "give the tool's name as a text")
        if not isinstance(function.get("description", ""), str):
            raise _refusal(f"{path}.description", function["description"], "give a text")
        if not isinstance(function.get("parameters", {}), dict):
            raise _refusal(
                f"{path}.parameters",
                function["parameters"],
                "give the JSON schema of an object, or leave it out",
            )
        if names.setdefault(name, index) != index:
            raise InvalidArgumentError(
                f"{path}.name is {clip(name, _SHOWN)!r}, as that of chat.tools[{names[name]}]; names must differ",
                field=f"{path}.name",
            )
        tools.append(tool)
    return tools or None


def read_json_object(text: str, where: str) -> dict[str, Any]:
    """Parse the JSON text of an object.

    Raises:
        InvalidArgumentError: It is none, has a key twice in one object, or is JSON that UTF-8 or a number cannot hold;
            ``field`` is ``where``.
    """
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidArgumentError(f"{where} is nested too deeply; make it flatter", field=where) from None
    except UnicodeEncodeError:
        raise InvalidArgumentError(
            f"{where} spells half a surrogate pair (\\ud800 to \\udfff), which is no character", field=where
        ) from None
    except ValueError as error:
        raise InvalidArgumentError(
            f"{where} is no JSON: {error}; give the JSON text of an object", field=where
        ) from None
    if not isinstance(value, dict):
        raise _refusal(where, value, "give the JSON text of an object")
    return value


def _read_message(message: types_pb2.ChatMessage, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise InvalidArgumentError(
            f"{where}.role is {clip(message.role, _SHOWN)!r}; use one of {', '.join(ROLES)}",
            field=f"{where}.role",
        )
    for name, role in (("tool_calls", "assistant"), ("reasoning", "assistant"), ("tool_call_id", "tool")):
        given = message.HasField(name) if name == "reasoning" else bool(getattr(message, name))
        if given and message.role != role:
            raise InvalidArgumentError(
                f"{where}.{name} stands beside role {message.role}; only messages of role {role} have it",
                field=f"{where}.{name}",
            )
    content = message.content if message.HasField("content") or not message.tool_calls else None
    result: dict[str, Any] = {"role": message.role, "content": content}
    if message.name:
        result["name"] = message.name
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    if message.HasField("reasoning"):
        result["reasoning_content"] = message.reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            _read_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    return result


def _read_call(call: types_pb2.ToolCall, where: str) -> dict[str, Any]:
    if not call.name:
        raise InvalidArgumentError(f"{where}.name is empty; give the tool's name", field=f"{where}.name")
    arguments = read_json_object(call.arguments or "{}", f"{where}.arguments")
    named = {"id": call.id} if call.id else {}
    return {**named, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _read_arguments(chat: types_pb2.Chat) -> dict[str, Any]:
    if not chat.template_arguments:
        return {}
    where = "chat.template_arguments"
    arguments = read_json_object(chat.template_arguments, where)
    for name, (kind, wanted) in _ARGUMENT_TYPES.items():
        value = arguments.get(name)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise _refusal(f"{where}.{name}", value, f"give {wanted}")
    given = arguments.get("enable_thinking")
    if given is not None and chat.HasField("enable_thinking") and given != chat.enable_thinking:
        raise InvalidArgumentError(
            f"{where}.enable_thinking is {given}, and chat.enable_thinking is {chat.enable_thinking}; give one of them",
            field=f"{where}.enable_thinking",
        )
    return arguments


def _refusal(where: str, value: object, remedy: str) -> InvalidArgumentError:
    shown = "missing" if value is None else clip(json.dumps(value, ensure_ascii=False), _SHOWN)
    return InvalidArgumentError(f"{where} is {shown}; {remedy}", field=where)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:_SHOWN]} is too large a number")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in which nothing is lost: of two equal keys a reader would keep the last."""
    value = dict(pairs)
    if len(value) < len(pairs):
        left = set(value)
        twice = next(name for name, _ in pairs if name not in left or left.remove(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {clip(twice, 100)!r} comes twice in one object")
    return value
