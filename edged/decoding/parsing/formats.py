"""How models write their calls: where one begins, where it ends, and what it says."""

from __future__ import annotations

import abc
import re
from typing import TYPE_CHECKING, ClassVar

from edged.decoding.parsing.calls import make_call, read_json
from edged.decoding.parsing.python_calls import ends_inside_string, read_python_calls
from edged.decoding.parsing.xml_calls import read_function

if TYPE_CHECKING:
    from edged.decoding.parsing.calls import Call, Tools


class ToolFormat(abc.ABC):
    """One format. Objects hold nothing of an answer.

    Attributes:
        name: As the configuration writes it.
        start: What a call, or a block of calls, begins with.
        end: What it ends with; empty where the end follows from its own syntax.
        bare: Whether a call may also stand at the beginning of an answer without ``start``.
    """

    name: ClassVar[str]
    start: ClassVar[str]
    end: ClassVar[str] = ""
    bare: ClassVar[bool] = False

    @abc.abstractmethod
    def read(self, body: str, tools: Tools) -> list[Call] | None:
        """The calls between ``start`` and ``end``; None where it is malformed."""

    def is_open(self, body: str) -> bool:  # noqa: ARG002 - most formats have none
        """Whether an ``end`` right after ``body`` stands inside a text of the call."""
        return False

    def end_of(self, body: str, searched: int) -> tuple[int, int] | None:
        """Where the call ends that ``body`` begins with, and where the text after it starts; None: not yet.

        Args:
            body: What came after ``start``.
            searched: Characters of it in which no end begins.
        """
        place = body.find(self.end, searched)
        return None if place < 0 else (place, place + len(self.end))


class Hermes(ToolFormat):
    """Qwen3, Hermes: ``<tool_call>{"name": .., "arguments": ..}</tool_call>``."""

    name = "hermes"
    start = "<tool_call>"
    end = "</tool_call>"

    def read(self, body: str, tools: Tools) -> list[Call] | None:  # noqa: ARG002 - it has names and types itself
        """One JSON object."""
        return read_call_object(body)

    def is_open(self, body: str) -> bool:
        """Inside a JSON string."""
        return _ends_inside_json_string(body)


class MiniCPM4(ToolFormat):
    """MiniCPM4, MiniCPM3: a block of Python calls with keyword arguments."""

    name = "minicpm4"
    start = "<|tool_call_start|>"
    end = "<|tool_call_end|>"

    def read(self, body: str, tools: Tools) -> list[Call] | None:
        """Calls, one a line, within a fence or without; they are parsed and never run."""
        return read_python_calls(body, tools)

    def is_open(self, body: str) -> bool:
        """Inside a Python string."""
        return ends_inside_string(body)


class MiniCPM5(ToolFormat):
    """MiniCPM5: ``<function name="f"><param name="p">v</param></function>``."""

    name = "minicpm5"
    start = "<function "
    end = "</function>"

    def read(self, body: str, tools: Tools) -> list[Call] | None:
        """One function and its parameters."""
        return read_function(body, tools)

    def is_open(self, body: str) -> bool:
        """Inside CDATA."""
        return body.rfind("<![CDATA[") > body.rfind("]]>")


class Llama3(ToolFormat):
    """Llama 3.1 and later: an answer that is JSON, ``{"name": .., "parameters": ..}``, also after ``<|python_tag|>``."""

    name = "llama3"
    start = "<|python_tag|>"
    bare = True

    def read(self, body: str, tools: Tools) -> list[Call] | None:
        """One JSON object that names a tool of the chat; any other JSON is an answer of its own right."""
        calls = read_call_object(body)
        return calls if calls and all(call.name in tools.parameters for call in calls) else None

    def end_of(self, body: str, searched: int) -> tuple[int, int] | None:  # noqa: ARG002 - braces are counted from the start
        """After the object's closing brace and what separates it from the next one."""
        begin = len(body) - len(body.lstrip())
        if body[begin : begin + 1] not in ("", "{"):
            return begin, begin  # no object: malformed, and at once
        depth = 0
        for match in _JSON_PARTS.finditer(body, begin):
            if match[0] == "{":
                depth += 1
            elif match[0] == "}":
                depth -= 1
                if depth == 0:
                    return match.end(), match.end()
            elif match[0][0] == '"' and not _is_whole_string(match[0]):
                return None
        return None


_JSON_PARTS = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}]', re.DOTALL)


def _is_whole_string(text: str) -> bool:
    return re.fullmatch(r'"(?:[^"\\]|\\.)*"', text, re.DOTALL) is not None


def _ends_inside_json_string(body: str) -> bool:
    last = ""
    for match in _JSON_PARTS.finditer(body):
        last = match[0]
    return last.startswith('"') and not _is_whole_string(last)


def read_call_object(body: str) -> list[Call] | None:
    """The call of ``{"name": .., "arguments": ..}``; its arguments may be called parameters, or be JSON text."""
    try:
        value = read_json(body.strip())
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ValueError:
            return None
    call = make_call(value.get("name"), {} if arguments is None else arguments)
    return None if call is None else [call]


TOOL_FORMATS: dict[str, ToolFormat] = {
    each.name: each for each in (Hermes(), MiniCPM4(), MiniCPM5(), Llama3())
}
"""By name."""
REASONING_FORMATS: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "thought": ("<|thought_start|>", "<|thought_end|>"),
}
"""What thoughts stand between, by name."""


def guess_tool_format(template: str) -> str:
    """The format that a chat template teaches; empty where none is known."""
    for name, mark in (
        ("minicpm4", "<|tool_call_start|>"),
        ("minicpm5", "<function name="),
        ("llama3", "<|python_tag|>"),
    ):
        if mark in template:
            return name
    if "<tool_call>" in template:
        # <function= is Qwen3-Coder's, <arg_key> GLM's: other syntax between the same tags.
        return "" if "<function=" in template or "<arg_key>" in template else "hermes"
    if '"parameters"' in template and "<|start_header_id|>" in template:
        return "llama3"
    return ""


def guess_reasoning_format(template: str, tokens: frozenset[str]) -> str:
    """The marks of a model's thoughts, from its template or else its added tokens; empty where none are known."""
    for name, (start, end) in REASONING_FORMATS.items():
        if start in template or end in template:
            return name
    for name, (start, end) in REASONING_FORMATS.items():
        if start in tokens and end in tokens:
            return name
    return ""
