"""Keywords of JSON schemas that a library knows only nearly: what comes through fits by jsonschema, and the rest is refused by name."""

from __future__ import annotations

import json
import math
import random

import jsonschema
import llguidance
import pytest
from drawn_answers import drawn, matcher, takes
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.decoding.constraints.checker import check, small_tokenizer
from edged.decoding.constraints.schema_check import read_schema
from edged.errors import InvalidArgumentError


def validator(schema):
    return jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )


def fits(schema, value):
    return validator(schema).is_valid(value)


NAMES = ("a", "b", "é", "x y", "")
LEAVES = (
    0,
    1,
    2,
    -1,
    5,
    1.5,
    "",
    "a",
    "ab",
    "é",
    "日本",
    "😀",
    "a\nb",
    '"',
    "\\",
    True,
    False,
    None,
    "2020-01-01",
)


class Author:
    """Writes random schemas and values.

    Args:
        generator: Decides.
    """

    def __init__(self, generator):
        self._generator = generator

    def _perhaps(self, schema, part, key, *values):
        if self._generator.random() < part:
            value = self._generator.choice(values)
            schema[key] = value() if callable(value) else value

    def _some(self, most, least=0):
        return self._generator.sample(NAMES, self._generator.randint(least, most))

    def value(self, depth=2):
        chance = self._generator.random()
        if depth == 0 or chance < 0.4:
            return self._generator.choice(LEAVES)
        if chance < 0.7:
            return [self.value(depth - 1) for _ in range(self._generator.randint(0, 3))]
        return {name: self.value(depth - 1) for name in self._some(3)}

    def schema(self, depth=2):
        schema, inner = {}, (lambda: self.schema(depth - 1) if depth else self._generator.choice((True, {})))
        several = lambda: [inner() for _ in range(self._generator.randint(1, 3))]  # noqa: E731
        kinds = ("string", "integer", "number", "array", "object", ["string", "null"], ["integer", "array"])
        self._perhaps(schema, 0.8, "type", *kinds)
        given = schema.get("type", ["string", "number", "array", "object"])
        if "string" in given:
            self._perhaps(schema, 0.3, "minLength", 0, 1, 2.0)
            self._perhaps(schema, 0.3, "maxLength", 1, 2, 3)
            self._perhaps(schema, 0.3, "pattern", "^a", "b$|é", r"^\W", r"^.$", r"^[^\d]+$", r"^[\[]")
        if "integer" in given or "number" in given:
            self._perhaps(schema, 0.3, "minimum", 0, -1, 0.5)
            self._perhaps(schema, 0.3, "exclusiveMinimum", 0, 1, -0.5)
            self._perhaps(schema, 0.3, "maximum", 1, 1.5, 5)
            self._perhaps(schema, 0.3, "exclusiveMaximum", 2, 1, 0.25)
        if "array" in given:
            self._perhaps(schema, 0.5, "items", inner)
            self._perhaps(schema, 0.3, "prefixItems", several)
            self._perhaps(schema, 0.3, "minItems", 0, 1, 2)
            self._perhaps(schema, 0.3, "maxItems", 1, 2, 3)
        if "object" in given:
            self._perhaps(schema, 0.6, "properties", lambda: {name: inner() for name in self._some(3)})
            self._perhaps(schema, 0.4, "required", lambda: self._some(2))
            self._perhaps(schema, 0.4, "additionalProperties", False, True, inner)
            self._perhaps(schema, 0.3, "patternProperties", lambda: {"b": inner()}, lambda: {"^x": inner()})
            self._perhaps(schema, 0.2, "minProperties", 0, 1, 2)
            self._perhaps(schema, 0.2, "maxProperties", 1, 2)
        self._perhaps(schema, 0.1, "enum", lambda: [self.value(1) for _ in range(3)])
        if depth:
            self._perhaps(schema, 0.15, "anyOf", several)
            self._perhaps(schema, 0.15, "allOf", several)
            self._perhaps(schema, 0.1, "oneOf", several)
            self._perhaps(schema, 0.1, "$ref", "#/$defs/d", "#/$defs/e")
        return schema


@pytest.mark.one_python
@given(st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_no_keyword_is_silently_left_out(generator):
    author = Author(generator)
    schema = {**author.schema(), "$defs": {"d": author.schema(1), "e": author.schema(0)}}
    try:
        start = matcher(schema)
    except InvalidArgumentError:
        return  # refused by name, before any token
    for value in (*LEAVES, *(author.value() for _ in range(20))):
        # In this order here and below: jsonschema takes a hundred times as long.
        assert not takes(start, json.dumps(value, ensure_ascii=False)) or fits(schema, value), value
    for _ in range(4):
        text = drawn(start, generator)
        assert text is None or fits(schema, json.loads(text)), text


def test_random_schemas_are_mostly_taken():
    taken = 0
    for seed in range(100):
        try:
            matcher(Author(random.Random(seed)).schema())
            taken += 1
        except InvalidArgumentError:
            pass
    assert taken > 40


BOUNDS = (0, 1, -1, 0.5, -0.5, 1.25, 2)
KEYS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


MEETINGS = (
    lambda kind, one, other: {"type": kind, "allOf": [one, other]},
    lambda kind, one, other: {"type": kind, **one, "$ref": "#/$defs/o%20p", "$defs": {"o p": other}},
    lambda kind, one, other: {"type": kind, **one, "anyOf": [other, {"const": 7}]},
    lambda kind, one, other: {
        **one,
        "allOf": [{"$ref": "#x"}],
        "$defs": {"x": {"$anchor": "x", "type": kind, **other}},
    },
)


def check_meetings(kind, combine, bounds_of):
    """Hold two bounds to their meaning together; how many schemas were taken and how many refused."""
    values = [value + step for value in BOUNDS for step in (0, 0.001, -0.001, 0.25, -0.25)]
    texts = {json.dumps(value): value for value in values}
    refused = taken = 0
    for one in KEYS:
        for other in KEYS:
            for first in bounds_of():
                second = BOUNDS[(BOUNDS.index(first) + len(one) * 3 + len(other)) % len(BOUNDS)]
                schema = combine(kind, {one: first}, {other: second})
                try:
                    start = matcher(schema)
                    taken += 1
                except InvalidArgumentError:
                    refused += 1
                    continue
                allowed = validator(schema)
                for text, value in texts.items():
                    assert not takes(start, text) or allowed.is_valid(value), (schema, text)
    return taken, refused


@pytest.mark.one_python
@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize("combine", range(len(MEETINGS)))
def test_bounds_are_kept_wherever_they_meet(kind, combine):
    random_of = random.Random(f"{kind} {combine}")
    taken, refused = check_meetings(kind, MEETINGS[combine], lambda: random_of.sample(BOUNDS, 2))
    assert taken > 5
    assert refused


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize("combine", range(len(MEETINGS)))
def test_all_bounds_are_kept_wherever_they_meet(kind, combine):
    taken, refused = check_meetings(kind, MEETINGS[combine], lambda: BOUNDS)
    assert taken > 20
    assert refused


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (
            {"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]},
            r"\$\.allOf\[0\]\.exclusiveMinimum .*allOf\[1\]",
        ),
        (
            {"exclusiveMaximum": 1, "$ref": "#/$defs/a", "$defs": {"a": {"minimum": 0.5}}},
            r"\$\.exclusiveMaximum",
        ),
        (
            {
                "allOf": [
                    {"type": "object", "properties": {"a": {"exclusiveMinimum": 0}}},
                    {"additionalProperties": {"maximum": 0.5}},
                    {"properties": {"a": {"maximum": 0.5}}},
                ]
            },
            r"properties\.a\.exclusiveMinimum",
        ),
        (
            {"allOf": [{"prefixItems": [{"exclusiveMinimum": 0}]}, {"items": {"exclusiveMaximum": 0.5}}]},
            r"prefixItems\[0\]\.exclusiveMinimum",
        ),
        ({"exclusiveMinimum": 0, "oneOf": [{"type": "null"}, {"maximum": 0.5}]}, "exclusiveMinimum"),
    ],
)
def test_bounds_that_would_be_lost_are_refused_with_both_places(schema, place):
    with pytest.raises(InvalidArgumentError, match=place):
        check("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "number", "maximum": 0.5}]},
        {
            "allOf": [{"type": "integer", "exclusiveMinimum": 0}, {"maximum": 0.5}],
            "anyOf": [{"type": "null"}, {}],
        },
        {"properties": {"a": {"exclusiveMinimum": 0}, "b": {"maximum": 0.5}}},
        {"type": "null", "$defs": {"a": {"exclusiveMinimum": 0, "maximum": 0.5}}},
    ],
)
def test_bounds_that_do_not_meet_are_no_reason_to_refuse(schema):
    read_schema(json.dumps(schema))


@pytest.mark.one_python
@pytest.mark.parametrize(
    "schema",
    [
        {"patternProperties": {"b": False}, "additionalProperties": False, "properties": {"a": {"type": "null"}}},
        {"type": "object", "minProperties": 2, "required": ["a", "b"]},
        {"type": "object", "properties": {f"p{n}": {"type": "boolean"} for n in range(400)}},
        {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(250)}, "required": [f"p{n}" for n in range(250)]},
        {"anyOf": [{"type": "object", "properties": {"kind": {"const": n}}, "required": ["kind"]} for n in range(180)]},
        {"const": 123456789.123456},
        {"enum": [0.1, -0.0, 1e15, 4.2e-7]},
        {"type": "integer", "multipleOf": 3600, "minimum": -(10**6), "maximum": 10**6},
        {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 10**7},
        {"type": "number", "multipleOf": 0.125, "minimum": -1000, "maximum": 1000},
    ],
)  # fmt: skip
def test_what_is_wide_or_exact_is_taken(schema):
    generator, start, ended = random.Random(1), matcher(schema), 0
    for _ in range(6):
        text = drawn(start, generator, most=30_000)
        if text is not None:
            ended += 1
            assert fits(schema, json.loads(text)), text
    assert ended


def test_a_choice_of_a_thousand_texts_is_not_ambiguous():
    check("choice", json.dumps([f"{number * 2654435761 % 2**32:x}" for number in range(1000)]))


@pytest.mark.parametrize(
    "definitions",
    [
        {"n": {"$anchor": "n", "type": "object", "properties": {"x": {"$ref": "#n"}}, "required": ["x"]}},
        {"n": {"$id": "n", "type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}},
        {"n": {"type": "array", "items": {"$ref": "#/%24defs/n"}, "minItems": 1}},
    ],
)
def test_a_circle_is_found_by_whatever_name_it_is_called(definitions):
    schema = {"$defs": definitions, "$ref": "#/$defs/n"}
    with pytest.raises(InvalidArgumentError, match="without an end"):
        check("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("time", ["23:59:59Z", "12:00:00.5+01:00"], ["12:00:60Z", "23:59:61Z"]),
        ("date-time", ["2024-02-29T23:59:59Z"], ["2024-02-29T12:00:60Z", "2023-02-29T12:00:00Z"]),
        (
            "hostname",
            ["a.b-c", ".".join(["a" * 63] * 3 + ["b" * 61])],
            [".".join(["a" * 63] * 4), "-a", "a_b"],
        ),
    ],
)
def test_formats_are_what_their_standards_say(kind, good, bad):
    start = matcher({"type": "string", "format": kind})
    assert all(takes(start, json.dumps(text)) for text in good)
    assert not any(takes(start, json.dumps(text)) for text in bad)


def test_schemas_inside_a_grammar_are_made_exact_and_texts_are_left_alone():
    grammar = check(
        "lark", 'start: "%json {  }" d\nd: %json {"type": "string", "format": "time"} // %json {"a": 1}'
    )
    start = llguidance.LLMatcher(small_tokenizer(), grammar, log_level=0)
    assert takes(start, '%json {  }"12:00:59Z"')
    assert not takes(start, '%json {  }"12:00:60Z"')


@pytest.mark.parametrize("bound", [0, 1, -0.5, 99.99, 123456.5, 2.0**50])
def test_no_number_is_read_as_the_excluded_one(bound):
    above, below = matcher({"exclusiveMinimum": bound}), matcher({"exclusiveMaximum": bound})
    whole = str(int(bound)) if bound == int(bound) else ""
    for zeros in (3, 12, 20, 330):
        text = (f"{whole}." if whole else str(bound)) + "0" * zeros + "1"
        for start, schema in ((above, {"exclusiveMinimum": bound}), (below, {"exclusiveMaximum": bound})):
            assert not takes(start, text) or fits(schema, json.loads(text))
    assert takes(above, str(int(bound) + 1))
    assert takes(below, str(int(bound) - 1))
    assert takes(above, f"{int(bound) + 1}.5") == (bound < 2.0**50)


@pytest.mark.one_python
@given(st.floats(1e-7, 1e15).map(lambda value: float(f"{value:.15g}")), st.booleans())
@settings(max_examples=60, deadline=None)
def test_constants_come_out_as_they_are(value, below):
    value = -value if below else value
    assert json.loads(matcher({"const": value}).compute_ff_bytes()) == value


@pytest.mark.one_python
@given(
    st.floats(-1e9, 1e9).map(lambda value: float(f"{value:.12g}")).filter(lambda value: abs(value) > 1e-6),
    st.sampled_from(KEYS),
)
@settings(max_examples=50, deadline=None)
def test_bounds_are_kept_to_the_next_number(bound, key):
    schema = {"type": "number", key: bound}
    start = matcher(schema)
    for value in (bound, math.nextafter(bound, -1e99), math.nextafter(bound, 1e99)):
        assert not takes(start, json.dumps(value)) or fits(schema, value)
