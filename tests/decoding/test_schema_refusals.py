"""Schemas that are refused by name: what a reader would lose, what has no bounds, and what cannot be enforced."""

from __future__ import annotations

import json

import pytest

from edged.decoding.constraints.checker import check
from edged.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"type": "string", "type": "integer"}', '"type" twice'),
        ('{"properties": {"a": {"minimum": 1, "minimum": 2}}}', '"minimum" twice'),
        ('{"minimum": NaN}', "NaN, which is no number"),
        ('{"default": -Infinity}', "-Infinity, which is no number"),
        ('{"maximum": 1e999}', "1e999, which is beyond"),
        (r'{"const": "\ud83d"}', r"\\ud83d, half a surrogate"),
        (r'{"properties": {"\udc00": {}}}', r"\\udc00, half a surrogate"),
    ],
)
def test_what_a_reader_would_lose_is_refused(text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        check("json_schema", text)
    with pytest.raises(InvalidArgumentError, match=message):
        check("lark", f"start: %json {text}")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"properties": {f"p{n}": {} for n in range(4097)}},
            r"\$\.properties has 4097 properties, and at most 4096",
        ),
        ({"prefixItems": [{}] * 16_000}, r"\$ has more than 16000 schemas"),
        ({"properties": {f"p{n}": {} for n in range(28_000)}}, "28000 properties, and at most 4096"),
        ({"type": "object", "properties": {f"p{n}": {} for n in range(600)}}, "500 optional properties"),
        (
            {"allOf": [{"anyOf": [{"minLength": n * m} for n in range(9)]} for m in range(7)]},
            "multiplied out",
        ),
        ({"minLength": 2**31}, r"\$\.minLength is 2147483648, and at most"),
        ({"maxItems": -1}, r"\$\.maxItems is -1"),
        ({"maxLength": 1.5}, r"\$\.maxLength is 1\.5; give a whole number"),
        ({"minItems": True}, r"\$\.minItems is true"),
        ({"minimum": "1"}, r'\$\.minimum is "1"; give a number'),
        ({"multipleOf": 999_983}, r"\$\.multipleOf is 999983, and at most 5000 units"),
        ({"multipleOf": 0.54321}, r"\$\.multipleOf is 0\.54321, and at most 5000 units"),
        ({"multipleOf": 0}, r"\$\.multipleOf is 0; give a number above 0"),
        ({"required": [1]}, r"\$\.required is \[1\]; give a list of texts"),
        ({"pattern": 1}, r"\$\.pattern is 1; give a text"),
        ({"exclusiveMinimum": 2**53, "type": "integer"}, r"\$\.exclusiveMinimum is beyond 2\^53"),
        ({"const": 123456789.12345679}, r"\$\.const holds a number"),
        ({"enum": [{"a": [7e23]}]}, r"\$\.enum holds a number"),
        ({"const": 1e-9}, r"\$\.const holds a number"),
        ({"maximum": -9504.010651430153}, r"\$\.maximum .*more than 15 digits"),
        (
            {"$ref": "#/default", "default": {"mystery": 1}},
            r"\$\.\$ref is '#/default', which leads to no schema",
        ),
        ({"$ref": "#/enum/0", "enum": [{"minLength": 3}]}, "leads to no schema"),
        ({"$ref": "#/properties", "properties": {"type": {"const": "x"}}}, "leads to no schema"),
        ({"patternProperties": {"b": False}}, r"patternProperties\.b is false, which cannot be enforced"),
        (
            {"patternProperties": {"b": {"type": "string", "minLength": 2, "maxLength": 1}}},
            "values that no JSON fits",
        ),
        (
            {
                "allOf": [
                    {"patternProperties": {"b": {"type": "string"}}},
                    {"patternProperties": {"b": {"type": "null"}}},
                ]
            },
            "values that no JSON fits",
        ),
        ({"patternProperties": {r"\d": {}, "[0-9]": {}}}, "two patterns that mean the same"),
        ({"type": "object", "minProperties": 2}, r"\$\.minProperties is 2"),
    ],
)
def test_what_is_beyond_is_refused_by_name(schema, message):
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        check("json_schema", json.dumps(schema))
    assert len(caught.value.message) < 700
