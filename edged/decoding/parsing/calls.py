"""Tool calls and the tools that they name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """One call: the tool's name, and its arguments as the JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Tools:
    """What the chat says of its tools.

    Attributes:
        parameters: JSON schema of each tool's arguments, by its name.
    """

    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: list[dict[str, Any]]) -> Tools:
        """The tools of a chat in OpenAI's form, which have been checked."""
        found = {}
        for tool in tools:
            function = tool.get("function", tool)
            parameters = function.get("parameters")
            found[function["name"]] = parameters if isinstance(parameters, dict) else {}
        return cls(found)

    def name(self, written: str) -> str:
        """The tool that the model means: where names cannot hold a hyphen it writes an underscore."""
        if written in self.parameters:
            return written
        return next((name for name in self.parameters if name.replace("-", "_") == written), written)

    def argument(self, tool: str, written: str) -> str:
        """The argument that the model means, which may be a word of Python (written ``kw_from``) or hold a hyphen."""
        known = self.properties(tool)
        plain = written.removeprefix("kw_")
        for name in known:
            if name in (written, plain) or name.replace("-", "_") in (written, plain):
                return name
        return written

    def properties(self, tool: str) -> dict[str, Any]:
        """Schemas of a tool's arguments."""
        found = self.parameters.get(tool, {}).get("properties")
        return found if isinstance(found, dict) else {}


def make_call(name: object, arguments: object) -> Call | None:
    """A call, or None where the name is no text, or the arguments are no object that JSON and UTF-8 can hold."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
        name.encode()
    except (TypeError, ValueError, RecursionError):
        return None
    return Call(name, text)


def read_json(text: str) -> Any:  # noqa: ANN401 - any JSON
    """Parse JSON.

    Raises:
        ValueError: It is none, or one that is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
