"""What a constraint may say: enforced exactly, or refused by name before any token."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from drawn_answers import walks
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.decoding.constraints.checker import check, small_tokenizer
from edged.decoding.constraints.lark_check import endless_rule
from edged.decoding.constraints.schema_check import read_schema
from edged.errors import InvalidArgumentError

SCHEMAS = sorted((Path(__file__).parent.parent / "daemon" / "schemas").glob("*.json"))


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.mark.one_python
@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_whatever_is_drawn_fits_the_schema(path, tokenizer):
    schema = json.loads(path.read_text())
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    grammar = check("json_schema", path.read_text())
    ended = 0
    for text, end in walks(grammar, tokenizer, 8):
        if end:
            ended += 1
            validator.validate(json.loads(text))
    assert ended


def test_there_are_schemas_enough():
    assert len(SCHEMAS) >= 40


@pytest.mark.parametrize("kind", ["date", "date-time"])
def test_dates_are_real_days(kind, tokenizer):
    february = json.dumps({"type": "string", "format": kind, "pattern": "^[0-9]{4}-02-(28|29)"})
    days = [
        json.loads(text)[:10] for text, end in walks(check("json_schema", february), tokenizer, 80) if end
    ]
    for day in days:
        jsonschema.Draft202012Validator.FORMAT_CHECKER.check(day, "date")
    assert {day[-2:] for day in days} == {"28", "29"}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"uniqueItems": True}}}, r"\$\.properties\.a\.uniqueItems cannot be enforced"),
        ({"anyOf": [{}, {"not": {}}]}, r"\$\.anyOf\[1\]\.not cannot"),
        ({"if": {}, "then": {}}, r"\$\.if cannot"),
        ({"items": {"contains": {}}}, r"\$\.items\.contains cannot"),
        ({"dependentRequired": {}}, "dependentRequired cannot"),
        ({"propertyNames": {}}, "propertyNames cannot"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties cannot"),
        ({"type": "string", "minimumLength": 3}, "minimumLength cannot"),
        ({"x-guidance": {"lenient": True}}, "x-guidance cannot"),
        ({"type": "string", "format": "iri"}, 'format is "iri"; these can be enforced: date-time'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf cannot be enforced"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"enum": []}, "empty"),
        ({"type": "strin"}, "strin"),
        ({"required": 5, "type": "object"}, "required"),
        ({"properties": []}, r"\$\.properties must be an object"),
        ({"anyOf": {}}, r"\$\.anyOf must be a list"),
        ({"items": 3}, r"\$\.items is 3"),
        ({"$ref": "http://example.com/schema"}, "example.com"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"type": "string", "pattern": "(a"}, "(?i)regex"),
        (False, "no JSON fits"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema, message, tokenizer):
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        check("json_schema", json.dumps(schema))
    assert caught.value.field == "json_schema"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"text"', "nan", "{'a': 1}"])
def test_what_is_no_schema_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="json_schema"):
        read_schema(text)


def nested(depth):
    schema: dict = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_nesting_has_a_bound(tokenizer):
    check("json_schema", json.dumps(nested(50)))
    for text in (json.dumps(nested(70)), "[" * 100_000, '{"items":' * 5000):
        with pytest.raises(InvalidArgumentError):
            read_schema(text)


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}


@pytest.mark.parametrize(
    ("node", "ends"),
    [
        (NODE, False),
        ({**NODE, "required": []}, True),
        ({"anyOf": [NODE, {"type": "null"}]}, True),
        ({"anyOf": [NODE, {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 1}]}, False),
        ({"type": "array", "items": {"$ref": "#/$defs/node"}}, True),
        ({"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 2}, False),
        ({"type": "array", "prefixItems": [{"$ref": "#/$defs/node"}], "minItems": 1}, False),
        ({"allOf": [{"$ref": "#/$defs/node"}]}, False),
        ({"$ref": "#/$defs/node"}, False),
        ({**NODE, "type": ["object", "null"]}, True),
    ],
)
def test_a_schema_without_an_end_is_refused(node, ends):
    text = json.dumps({"$defs": {"node": node}, "$ref": "#/$defs/node"})
    if ends:
        read_schema(text)
    else:
        with pytest.raises(InvalidArgumentError, match="without an end"):
            read_schema(text)


def test_a_long_chain_of_references_is_refused():
    definitions = {f"a{index}": {"allOf": [{"$ref": f"#/$defs/a{index + 1}"}]} for index in range(3000)}
    schema = {"$defs": {**definitions, "a3000": {"type": "null"}}, "$ref": "#/$defs/a0"}
    with pytest.raises(InvalidArgumentError, match="chain of references"):
        read_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("lark", "ends"),
    [
        ("start: start", False),
        ('start: start "a"', False),
        ('start: "a" start', False),
        ('start: ("a" | "b") start', False),
        ('start: x | y\nx: "a" y\ny: "b" x', False),
        ('start: "a" start+', False),
        ('start: "a" start ~ 2..3', False),
        ('start: "a" start{1,3}', False),
        ('start: x\n  | start "a"\nx: "x" x', False),
        ('start: start "a" | "b"', True),
        ('start: "a" start?', True),
        ('start: "a" start*', True),
        ('start: "a" [start]', True),
        ('start: "a" start{0,3}', True),
        ('start: x\n  | "start: x" // or x\nx: "x" x', True),
        ('start: /start: [/] start/ X\nX: "a" | X "b"', True),
        ('%import common.INT\nstart: INT ("," INT)*', True),
        ('start: %json {"type": "null"}', True),
        ('start: a -> b\na: "x"', True),
    ],
)
def test_a_grammar_without_an_end_is_found(lark, ends):
    assert (endless_rule(lark) is None) == ends


def test_rules_that_call_themselves_first_are_parsed(tokenizer):
    grammar = check("lark", 'start: sum\nsum: sum "+" NUMBER | NUMBER\nNUMBER: /[0-9]/')
    for text, end in walks(grammar, tokenizer, 10):
        assert not end or all(part.isdigit() and len(part) == 1 for part in text.split("+"))


names = st.sampled_from("abcdef")
# A body is a list of alternatives, an alternative a list of names.
bodies = st.lists(st.lists(names, max_size=3), min_size=1, max_size=3)


@given(st.dictionaries(names, bodies))
@settings(max_examples=200)
def test_productive_rules_are_found_as_by_the_definition(rules):
    rules = {"start": [["a"]], **rules}
    depth_known: set[str] = set()
    for _ in range(len(rules) + 1):
        depth_known = {
            name
            for name, alternatives in rules.items()
            if any(all(part not in rules or part in depth_known for part in each) for each in alternatives)
        }
    lark = "\n".join(
        f"{name}: " + " | ".join(" ".join(each) if each else '"x"' for each in alternatives)
        for name, alternatives in rules.items()
    )
    assert (endless_rule(lark) is None) == ("start" in depth_known)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-a"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "", "is empty"),
        ("regex", "a{0}", "no text but the empty one"),
        ("regex", r"[^\x00-\U0010FFFF]", "no text at all"),
        ("regex", "(" * 5000 + "a" + ")" * 5000, "refused"),
        ("lark", "", "no start rule"),
        ("lark", 'foo: "a"', "no start rule"),
        ("lark", "start: foo", "foo"),
        ("lark", 'start: "a" start', "never comes to an end"),
        ("lark", 'start: ("a" "b"){1000000}', "too complex"),
        ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
        ("lark", "%import .secret\nstart: secret", "secret"),
        ("ready_made", "yaml", "json, sql-select"),
    ],
)
def test_what_is_wrong_is_said(kind, text, message, tokenizer):
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        check(kind, text)
    assert caught.value.field == kind
    assert len(caught.value.message) < 700


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", ".*a.{200}b.*c.{200}d", "grows with the answer: its expression"),
        ("regex", ".*a.{20}b", "grows"),
        ("regex", "(.|\n)*a(.|\n){60}b", "grows"),
        ("regex", "(.*a.{30}){5}", "grows"),
        ("regex", "(a|b)*a(a|b){30}", "grows"),
        ("regex", "((a{1,100}){1,100}){1,100}", "too complex"),
        ("json_schema", '{"type": "array", "items": {"type": "string", "pattern": "a.{90}b"}}', "grows"),
        ("lark", 'start: start start | "a"', "grows with the answer: it is ambiguous"),
        ("lark", 'start: x\nx: x x x | y\ny: "a"? "b"? | x', "grows"),
    ],
)
def test_what_grows_with_the_answer_is_refused_before_any_token(kind, text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        check(kind, text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "[a-z0-9._%+-]{1,64}@[a-z0-9.-]{1,253}[.][a-z]{2,10}"),
        ("regex", "(#{1,6} [^\n]{1,80}\n\n([^\n]{1,200}\n){1,20}\n){1,10}"),
        ("regex", ".*(foo|bar).*[0-9]{3}-[0-9]{4}.*"),
        ("regex", r"(\p{L}|\p{N}){1,5000}"),
        ("regex", r"[^\p{L}]{100,2000}x"),
        ("regex", "[一-龥]{1,300}。([^。]{1,200}。){3}"),
        (
            "json_schema",
            '{"type": "string", "minLength": 5000, "maxLength": 100000, "pattern": "^(a|b|cc)*$"}',
        ),
        ("json_schema", '{"type": "array", "items": {"type": "string", "maxLength": 9000}, "minItems": 30}'),
        ("lark", 'start: sum\nsum: sum "+" sum | NUMBER\nNUMBER: /[0-9]+/'),
        (
            "lark",
            'start: (line "\\n")+\nline: NAME "=" x\nx: NAME | x OP x | "(" x ")"\nOP: /[-+]/\nNAME: /[a-z]+/',
        ),
    ],
)
def test_what_only_counts_or_is_a_little_ambiguous_is_taken(kind, text):
    check(kind, text)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.25}, r"\$\.exclusiveMinimum"),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, r"\$\.exclusiveMaximum"),
        ({"exclusiveMinimum": 1.0, "exclusiveMaximum": 1.5}, r"\$\.exclusiveMinimum"),
        ({"items": {"type": "integer", "minimum": 10**30}}, r"\$\.items\.minimum is beyond"),
        ({"type": "integer", "maximum": -(10**30)}, r"\$\.maximum is beyond"),
        ({"const": 2**53 + 1}, r"\$\.const holds"),
        ({"enum": [{"a": [-(2**64)]}]}, r"\$\.enum holds"),
    ],
)
def test_numbers_that_would_come_out_wrong_are_refused(schema, place):
    with pytest.raises(InvalidArgumentError, match=place):
        check("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMinimum": 0.001, "exclusiveMaximum": 0.5},
        {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 2**63 - 1},
        {"type": "number", "exclusiveMinimum": -2, "exclusiveMaximum": -1},
    ],
)
def test_excluded_numbers_do_not_come(schema, tokenizer):
    validator = jsonschema.Draft202012Validator(schema)
    for text, end in walks(check("json_schema", json.dumps(schema)), tokenizer, 40, most=60):
        if end:
            validator.validate(json.loads(text))


def test_an_anchor_is_no_way_back_to_the_start():
    assert read_schema('{"$defs": {"a": {"$anchor": "q", "type": "boolean"}}, "$ref": "#q"}')


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"type": "string", "mystery": 1}', r"\$\.mystery cannot be enforced"),
        ('{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}', "without an end"),
    ],
)
def test_a_schema_inside_a_grammar_is_held_to_the_same(schema, message):
    with pytest.raises(InvalidArgumentError, match=message):
        check("lark", f'start: "a" %json {schema}')
    assert check("lark", 'start: "a" %json {"type": "boolean", "x-guidance": {"whitespace_flexible": false}}')


@pytest.mark.parametrize(
    "lark",
    [
        'start: %json {"type": "null"} start',
        'start: x\nx: "a" x\ny: %json {"const": "x: y"}',
        'start: "%json" start | start %json\t{"type": "null"}',
    ],
)
def test_a_grammar_with_schemas_comes_to_an_end_too(lark):
    with pytest.raises(InvalidArgumentError, match="never comes to an end"):
        check("lark", lark)


@pytest.mark.parametrize("said", [{"lenient": True}, {"coerce_one_of": True}, 5])
def test_a_grammar_cannot_have_its_schemas_taken_lightly(said):
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": said}
    with pytest.raises(InvalidArgumentError, match=r"lark: json_schema: \$\.x-guidance\.\w+ is not taken"):
        check("lark", f"start: %json {json.dumps(schema)}")
