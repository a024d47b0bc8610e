"""Keys that a pattern forbids: llguidance forgets a pattern whose values nothing fits, and takes its keys for additional ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edged.decoding.constraints.base import LIMITS, schema_grammar
from edged.decoding.constraints.schema_exact import exact
from edged.decoding.constraints.schema_keywords import DEFINITIONS
from edged.decoding.constraints.schema_reading import refuse
from edged.decoding.constraints.schema_together import companies

if TYPE_CHECKING:
    import llguidance

    from edged.decoding.constraints.schema_places import Places
    from edged.decoding.constraints.schema_together import Holding

_REMEDY = "set additionalProperties to false and name the keys that may come"


def refuse_lost_keys(root: Any, places: Places, tokenizer: llguidance.LLTokenizer) -> None:  # noqa: ANN401 - any JSON
    """Refuse patterns of keys whose values nothing fits, unless no other keys may come.

    Args:
        root: The whole document.
        places: Its schemas.
        tokenizer: Any one.

    Raises:
        InvalidArgumentError: There is one, or it cannot be told.
    """
    if not places.has("patternProperties"):
        return
    for holding in companies(root, places):
        if any(each.schema.get("additionalProperties") is False and not each.chosen for each in holding):
            continue
        for each in holding:
            for pattern in each.schema.get("patternProperties", {}):
                where = f"{places.name(each.schema)}.patternProperties.{pattern[:100]}"
                _check(where, _values(holding, each, pattern), root, tokenizer)


def _values(holding: list[Holding], each: Holding, pattern: str) -> list[Any]:
    """The schemas of the values of such keys where ``each`` holds."""
    return [
        other.schema["patternProperties"][pattern]
        for other in holding
        if other.chosen <= each.chosen and pattern in other.schema.get("patternProperties", {})
    ]


def _check(where: str, values: list[Any], root: dict[str, Any], tokenizer: llguidance.LLTokenizer) -> None:
    import llguidance  # noqa: PLC0415 - the daemon reads schemas' names without it

    if False in values:
        raise refuse(where, f"is false, which cannot be enforced; {_REMEDY}")
    values = [value for value in values if value is not True]
    if not values or (len(values) == 1 and set(values[0]) <= {"type"}):
        return
    if not all(map(_stays_inside, values)):
        raise refuse(where, f"refers to more than the definitions, so that it cannot be checked; {_REMEDY}")
    definitions = {key: exact({key: root[key]})[key] for key in DEFINITIONS if key in root}
    grammar = schema_grammar({**definitions, "allOf": [exact(value) for value in values]})
    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error() and "nsatisfiable" in matcher.get_error():
        raise refuse(where, f"has values that no JSON fits, which cannot be enforced; {_REMEDY}")


def _stays_inside(value: Any) -> bool:  # noqa: ANN401 - any JSON
    """Whether all references of a schema are to the document's definitions."""
    if isinstance(value, list):
        return all(map(_stays_inside, value))
    if not isinstance(value, dict):
        return True
    reference = value.get("$ref", "#/$defs/")
    inside = isinstance(reference, str) and reference.startswith(tuple(f"#/{key}/" for key in DEFINITIONS))
    return inside and all(map(_stays_inside, value.values()))
