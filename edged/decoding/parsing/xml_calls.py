"""Calls written as tags: ``<function name="f"><param name="p">v</param></function>``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from edged.decoding.parsing.calls import make_call, read_json

if TYPE_CHECKING:
    from edged.decoding.parsing.calls import Call, Tools

_OPENING = re.compile(r'\s*name\s*=\s*"([^"<>]+)"\s*>')
_PARAMETER = re.compile(
    r'\s*<param\s+name\s*=\s*"([^"<>]+)"\s*>'
    r"(?:\s*<!\[CDATA\[(?P<verbatim>.*?)\]\]>\s*|(?P<text>[^<]*))"
    r"</param>",
    re.DOTALL,
)
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'", "&amp;": "&"}
_ENTITY = re.compile("|".join(_ENTITIES))


def read_function(body: str, tools: Tools) -> list[Call] | None:
    """The call of one function; ``body`` is what stands between ``<function `` and ``</function>``."""
    opening = _OPENING.match(body)
    if opening is None:
        return None
    name = tools.name(opening[1])
    schemas = tools.properties(name)
    arguments: dict[str, Any] = {}
    place = opening.end()
    while (parameter := _PARAMETER.match(body, place)) is not None:
        place = parameter.end()
        verbatim = parameter["verbatim"]
        text = _plain(parameter["text"]) if verbatim is None else verbatim
        argument = tools.argument(name, parameter[1])
        try:
            arguments[argument] = read_value(text, schemas.get(argument))
        except ValueError:
            return None
    if body[place:].strip():
        return None
    call = make_call(name, arguments)
    return None if call is None else [call]


def read_value(text: str, schema: object) -> Any:  # noqa: ANN401 - any JSON
    """The value that a tag's text stands for, by the argument's schema; without one, JSON where it is JSON.

    Raises:
        ValueError: The schema allows no text, and it is no JSON.
    """
    types = schema.get("type") if isinstance(schema, dict) else None
    allowed = [types] if isinstance(types, str) else types if isinstance(types, list) else []
    if allowed == ["string"]:
        return text
    if isinstance(schema, dict) and text in schema.get("enum", ()):
        return text
    stripped = text.strip()
    if stripped in ("True", "False", "None"):
        stripped = {"True": "true", "False": "false", "None": "null"}[stripped]
    try:
        value = read_json(stripped)
    except ValueError:
        if allowed and "string" not in allowed:
            raise
        return text
    return text if "string" in allowed and isinstance(value, str) else value


def _plain(text: str) -> str:
    return _ENTITY.sub(lambda match: _ENTITIES[match[0]], text)
