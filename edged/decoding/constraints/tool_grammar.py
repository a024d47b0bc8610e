"""Grammars of answers that are tool calls, from the tools' schemas, in the formats of :mod:`edged.decoding.parsing`.

A call that such a grammar lets through is one that the format's parser reads, with arguments that fit the tool's schema.
Arguments that the schema does not name are left out, also where it would allow any.
"""

from __future__ import annotations

import json
import keyword
import re
from typing import TYPE_CHECKING, Any

import msgspec

from edged.decoding.constraints.base import JSON_LAYOUT, literal
from edged.decoding.constraints.schema_check import check_schema
from edged.decoding.constraints.schema_keywords import ANNOTATIONS
from edged.decoding.parsing.calls import Tools
from edged.decoding.parsing.formats import TOOL_FORMATS
from edged.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")
_DEFINITIONS = ("$defs", "definitions")
_SAID_ARGUMENT_BY_ARGUMENT = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    *_DEFINITIONS,
    *ANNOTATIONS,
}
"""Keywords of a tool's parameters that formats can hold to which write each argument on its own."""


class ToolCalls(msgspec.Struct, frozen=True):
    """What an answer of calls may be.

    Attributes:
        format: A name of ``TOOL_FORMATS``.
        tools: JSON texts of the tools that may be called, in OpenAI's form.
        reasoning: What thoughts stand between that may come first; empty for none.
        thinking: The prompt has opened the thoughts.
        special: The marks that are special tokens of the model.
    """

    format: str
    tools: tuple[str, ...]
    reasoning: tuple[str, ...] = ()
    thinking: bool = False
    special: tuple[str, ...] = ()


def tool_grammar(wanted: ToolCalls, enforced: Callable[[Any], Any]) -> str:
    """The grammar in Lark's syntax.

    Args:
        wanted: What the answer may be.
        enforced: Makes of a schema what llguidance takes, or refuses it.

    Raises:
        InvalidArgumentError: A tool's schema cannot be enforced, or its names cannot be written in the format.
    """
    tools = Tools.of([json.loads(tool) for tool in wanted.tools])
    for name, schema in tools.parameters.items():
        kinds = schema.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise _refusal(f"tool {name}", "its parameters are no object")
    writer = _Writer(frozenset(wanted.special), enforced)
    calls = _CALLS[wanted.format](writer, tools)
    thoughts = ""
    if wanted.reasoning:
        thoughts = "thoughts " if wanted.thinking else "thoughts? "
        start, end = wanted.reasoning
        opening = "" if wanted.thinking else f"{writer.mark(start)} "
        writer.rules.append(f"thoughts: {opening}{writer.anything_until(end)} NEWLINES")
        writer.rules.append(r"NEWLINES: /\n{0,2}/")
    return "\n".join([f"start: {thoughts}{calls}", *writer.rules]) + "\n"


class _Writer:
    """Collects rules.

    Args:
        special: Marks that are special tokens.
        enforced: As for :func:`tool_grammar`.
    """

    def __init__(self, special: Collection[str], enforced: Callable[[Any], Any]) -> None:
        self.rules: list[str] = []
        self._enforced = enforced
        self._special = special

    def mark(self, text: str) -> str:
        """A mark: a special token, or its text."""
        return text if text in self._special else literal(text)

    def anything_until(self, mark: str) -> str:
        """Any text up to a mark, and the mark."""
        if mark in self._special:
            self.rules.append(r"ANYTHING: /(?s:.*)/")
            return f"ANYTHING {mark}"
        escaped = re.sub(r"([\\^$.|?*+(){}\[\]/])", r"\\\1", mark)
        self.rules.append(f"thought[lazy]: /(?s:.*){escaped}/")
        return "thought"

    def add(self, body: str) -> str:
        """A rule of its own; its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def value(self, schema: dict[str, Any], where: str) -> str:
        """The rule of JSON that fits a schema.

        Raises:
            InvalidArgumentError: It cannot be enforced.
        """
        try:
            checked = self._enforced(schema)
        except InvalidArgumentError as error:
            raise _refusal(where, error.message) from None
        guided = (
            {**checked, "x-guidance": JSON_LAYOUT}
            if isinstance(checked, dict)
            else {"x-guidance": JSON_LAYOUT}
        )
        return self.add(f"%json {json.dumps(guided, ensure_ascii=False)}")


def _check(schema: dict[str, Any], where: str) -> None:
    try:
        check_schema(schema)
    except InvalidArgumentError as error:
        raise _refusal(where, error.message) from None


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A tool's parameters as an object without other arguments."""
    return {"additionalProperties": False, "properties": {}, **schema, "type": "object"}


def _hermes(writer: _Writer, tools: Tools) -> str:
    start, end = (writer.mark(each) for each in (TOOL_FORMATS["hermes"].start, TOOL_FORMATS["hermes"].end))
    calls = [
        writer.add(
            f"{start} {_opening(name, 'arguments', before=chr(10))} {arguments} {literal('}' + chr(10))} {end}"
        )
        for name, arguments in _whole_arguments(writer, tools)
    ]
    call = writer.add(" | ".join(calls))
    return f'{call} ("\\n" {call})*'


def _llama3(writer: _Writer, tools: Tools) -> str:
    calls = [
        writer.add(f"{_opening(name, 'parameters')} {arguments} {literal('}')}")
        for name, arguments in _whole_arguments(writer, tools)
    ]
    return writer.add(" | ".join(calls))


def _opening(name: str, key: str, before: str = "") -> str:
    return literal(f'{before}{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')


def _whole_arguments(writer: _Writer, tools: Tools) -> Iterator[tuple[str, str]]:
    for name, schema in tools.parameters.items():
        yield name, writer.value(_closed(schema), f"tool {name}")


def _minicpm4(writer: _Writer, tools: Tools) -> str:
    format_ = TOOL_FORMATS["minicpm4"]
    lines = []
    for name, schema in tools.parameters.items():
        written = name.replace("-", "_")
        if not _IDENTIFIER.fullmatch(written):
            raise _unwritable(f"tool {name}", "its name is no name of Python")
        items = []
        for argument, part, required in _arguments(schema, f"tool {name}"):
            spelled = argument.replace("-", "_")
            spelled = f"kw_{spelled}" if keyword.iskeyword(spelled) else spelled
            if not _IDENTIFIER.fullmatch(spelled) or "." in spelled:
                raise _unwritable(f"tool {name}", f"its argument {argument} is no name of Python")
            value = writer.value(part, f"tool {name}, argument {argument}")
            items.append((f"{literal(spelled + '=')} {value}", required))
        arguments = _sequence(writer, items, ", ")
        lines.append(writer.add(f"{literal(written + '(')} {arguments} {literal(')')}"))
    line = writer.add(" | ".join(lines))
    opening, closing = literal("\n```python\n"), literal("\n```\n")
    return (
        f'{writer.mark(format_.start)} {opening} {line} ("\\n" {line})* {closing} {writer.mark(format_.end)}'
    )


def _minicpm5(writer: _Writer, tools: Tools) -> str:
    calls = []
    for name, schema in tools.parameters.items():
        if re.search(r'["<>&\x00-\x1f]', name):
            raise _unwritable(f"tool {name}", "its name holds a character that ends it")
        items = []
        for argument, part, required in _arguments(schema, f"tool {name}"):
            value = _text(writer, part, f"tool {name}, argument {argument}")
            opening = literal(f'<param name="{argument}">')
            items.append((f"{opening} {value} {literal('</param>')}", required))
        arguments = _sequence(writer, items, "")
        opening = literal(f'<function name="{name}">')
        calls.append(writer.add(f"{opening} {arguments} {literal('</function>')}"))
    call = writer.add(" | ".join(calls))
    return f'{call} ("\\n" {call})*'


def _text(writer: _Writer, schema: dict[str, Any], where: str) -> str:
    """The rule of what a tag holds: plain text for a text, else JSON, verbatim where it may hold a tag's characters."""
    _check(schema, where)
    schema = _resolved(schema)
    if "const" in schema and "enum" not in schema:
        schema = {
            **{key: value for key, value in schema.items() if key != "const"},
            "enum": [schema["const"]],
        }
    choices = schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices):
        schema = {"type": "string", **schema}
    if schema.get("type") != "string":
        if "string" in json.dumps(schema.get("type", "string")):
            raise _unwritable(where, "it may be a text and something else; give it one type")
        value = writer.value(schema, where)
        if schema["type"] in ("integer", "number", "boolean", "null"):
            return value
        return writer.add(f"{literal('<![CDATA[')} {value} {literal(']]>')}")
    unknown = sorted(set(schema) & {"pattern", "format", "const", "anyOf", "oneOf", "allOf", "$ref"})
    if unknown:
        raise _unwritable(where, f"{unknown[0]} of a text")
    least = int(schema.get("minLength", 0))
    most = int(schema["maxLength"]) if "maxLength" in schema else ""
    if choices is not None:
        return _one_of(writer, choices, where, least, most)
    return writer.add(rf"/[^<&\x00-\x08\x0b-\x1f]{{{least},{most}}}/")


def _one_of(writer: _Writer, choices: Any, where: str, least: int, most: int | str) -> str:  # noqa: ANN401 - any JSON
    """The rule of an enum of texts, those of them that have the lengths."""
    if not isinstance(choices, list) or not all(
        isinstance(text, str) and not re.search(r"[<&]", text) for text in choices
    ):
        raise _unwritable(where, "its enum holds what is no plain text")
    texts = [text for text in choices if least <= len(text) and (isinstance(most, str) or len(text) <= most)]
    if not texts:
        raise _refusal(where, "its enum allows no text")
    return writer.add(" | ".join(map(literal, texts)))


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that is a reference to a definition, as what it refers to."""
    for _ in range(16):
        match = re.fullmatch(r"#/(\$defs|definitions)/([^/~]+)", str(schema.get("$ref", "")))
        target = schema.get(match[1], {}).get(match[2]) if match else None
        beside = set(schema) - {"$ref", *_DEFINITIONS, *ANNOTATIONS}
        if not isinstance(target, dict) or beside:
            break  # what stands beside a reference holds, too
        schema = {**target, **{key: schema[key] for key in _DEFINITIONS if key in schema}}
    return schema


def _arguments(schema: dict[str, Any], where: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Name, schema and whether it is required, of every argument; definitions go along with each.

    Raises:
        InvalidArgumentError: The schema says more than what each argument is on its own.
    """
    unknown = sorted(set(schema) - _SAID_ARGUMENT_BY_ARGUMENT)
    if unknown:
        raise _unwritable(where, f"{unknown[0][:100]} of its parameters")
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not all(isinstance(each, dict) for each in (properties, *shared.values())):
        raise _refusal(where, "its properties and definitions must be objects of schemas")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _refusal(where, "its required must be a list of texts")
    possible = {name: part for name, part in properties.items() if part is not False}
    missing = [name for name in required if name not in possible]
    if missing:
        raise _refusal(where, f"it requires {missing[0][:100]}, which its properties do not allow")
    if _refers_elsewhere([*possible.values(), *shared.values()]):
        raise _unwritable(where, "a $ref of its parameters that is not to one of its definitions")
    for name, part in possible.items():
        if not isinstance(part, dict | bool):
            raise _refusal(where, f"its argument {name[:100]} must be a schema")
        yield name, {**(part if isinstance(part, dict) else {}), **shared}, name in required


def _refers_elsewhere(value: Any) -> bool:  # noqa: ANN401 - any JSON
    """Whether a reference goes to what does not go along with every argument."""
    if isinstance(value, list):
        return any(map(_refers_elsewhere, value))
    if not isinstance(value, dict):
        return False
    reference = value.get("$ref")
    if isinstance(reference, str) and not reference.startswith(tuple(f"#/{key}/" for key in _DEFINITIONS)):
        return True
    return any(map(_refers_elsewhere, value.values()))


def _sequence(writer: _Writer, items: list[tuple[str, bool]], separator: str) -> str:
    """The rule of items in their order, of which those that are not required may be left out."""
    first = following = writer.add('""')  # nothing is left
    for body, required in reversed(items):
        item = writer.add(body)
        between = f"{literal(separator)} " if separator else ""
        starts = [f"{item} {following}"] + ([] if required else [first])
        goes_on = [f"{between}{item} {following}"] + ([] if required else [following])
        first, following = writer.add(" | ".join(starts)), writer.add(" | ".join(goes_on))
    return first


def _refusal(where: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{where}: {why}", field="tool_choice")


def _unwritable(where: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{where} cannot be enforced in the format of this model: {why}; use tool_choice auto",
        field="tool_choice",
    )


_CALLS = {"hermes": _hermes, "llama3": _llama3, "minicpm4": _minicpm4, "minicpm5": _minicpm5}
