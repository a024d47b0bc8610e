"""A schema that says exactly what llguidance knows only nearly."""

from __future__ import annotations

from typing import Any

from edged.decoding.constraints.schema_keywords import COUNTS, EXCLUSIVE, LISTS, MAPS, ONE
from edged.decoding.constraints.schema_patterns import rust_pattern

# A year is not 0000, and the 29th of February comes in leap years.
_REAL_DAYS = (
    "^(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})-",
    (
        "^(?:[0-9]{4}-(?:0[13-9]|1[0-2])-|[0-9]{4}-02-(?:[01]|2[0-8])"
        "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
    ),
)

# The sixtieth second comes at the end of a day in UTC alone.
_REAL_SECONDS = "[0-9]{2}:[0-9]{2}:[0-5]"
_LONGEST_NAME = 253
"""Of a host."""
_EXACT_FORMATS = {
    "date": _REAL_DAYS,
    "date-time": (*_REAL_DAYS, f"^[-0-9]*[Tt]{_REAL_SECONDS}"),
    "time": (f"^{_REAL_SECONDS}",),
}

_DIGITS = 15
"""Of which double precision tells numbers apart."""
_MOST_DIGITS = 9
"""Behind the point, that llguidance counts with."""


def exact(schema: Any) -> Any:  # noqa: ANN401
    """The same schema, which says of formats, patterns and excluded numbers what they mean.

    Args:
        schema: One that has passed the check.
    """
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in COUNTS:
            result[key] = int(value)
        elif key == "pattern":
            result[key] = rust_pattern(value)
        elif key == "patternProperties":
            result[key] = {rust_pattern(name): exact(each) for name, each in value.items()}
        elif key in MAPS:
            result[key] = {name: exact(each) for name, each in value.items()}
        elif key in LISTS or (key == "items" and isinstance(value, list)):
            result[key] = [exact(each) for each in value]
        else:
            result[key] = exact(value) if key in ONE else value
    _add_meanings(schema, result)
    return result


def _add_meanings(schema: dict[str, Any], result: dict[str, Any]) -> None:
    """Add to a schema what its formats and excluded numbers mean."""
    if schema.get("format") == "hostname":
        result["maxLength"] = min(_LONGEST_NAME, result.get("maxLength", _LONGEST_NAME))
    excluded = [schema[key] for key in EXCLUSIVE if key in schema]
    if excluded and "multipleOf" not in schema:
        result["multipleOf"] = max(map(_step, excluded))
    patterns = _EXACT_FORMATS.get(schema.get("format", ""), ())
    if patterns:
        result["allOf"] = [*result.get("allOf", ()), *({"pattern": pattern} for pattern in patterns)]


def _step(excluded: float) -> float:
    """What numbers beside an excluded one are multiples of, so that none of them is read as it (``1.00000000000000001``)."""
    digits = _DIGITS - len(str(int(abs(excluded))))
    return 10.0 ** -min(digits, _MOST_DIGITS) if digits > 0 else 1
