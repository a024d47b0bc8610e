"""What a tool grammar lets through is read by the format's parser as calls whose arguments fit the tools' schemas."""

from __future__ import annotations

import json
import random

import jsonschema
import llguidance
import msgspec
import pytest
from drawn_answers import allowed_tokens

from edged.decoding.constraints.base import LIMITS
from edged.decoding.constraints.checker import _END, Vocabulary, check, small_tokenizer
from edged.decoding.constraints.tool_grammar import ToolCalls
from edged.decoding.parsing.calls import Tools
from edged.decoding.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from edged.decoding.parsing.parser import AnswerParser
from edged.errors import InvalidArgumentError

SMALL = {"type": "integer", "minimum": 0, "maximum": 99}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "move-arm",
            "parameters": {
                "type": "object",
                "properties": {
                    "target": {"type": "string", "maxLength": 8},
                    "speed": {"type": "number", "minimum": 0, "maximum": 2},
                    "from": {"type": "string", "enum": ["left", "right side"]},
                    "joints": {"type": "array", "items": SMALL, "maxItems": 3},
                    "safe-mode": {"type": "boolean"},
                    "pose": {
                        "type": "object",
                        "properties": {"x": SMALL, "label": {"type": "string", "maxLength": 4}},
                        "required": ["x"],
                        "additionalProperties": False,
                    },
                },
                "required": ["speed", "joints"],
            },
        },
    },
    {"name": "stop"},
    {
        "name": "say",
        "parameters": {
            "type": "object",
            "$defs": {"volume": SMALL},
            "properties": {"text": {"type": "string", "maxLength": 12}, "volume": {"$ref": "#/$defs/volume"}},
            "required": ["text"],
        },
    },
]
THINK = REASONING_FORMATS["think"]


def wanted(name, **changes):
    marks = tuple(mark for mark in (TOOL_FORMATS[name].start, TOOL_FORMATS[name].end) if mark)
    tools = changes.pop("tools", TOOLS)
    special = marks if changes.pop("special", False) else ()
    return ToolCalls(name, tuple(map(json.dumps, tools)), special=special, **changes)


def answers(calls, count, begin=(), most=500):
    """Random answers of the grammar that go on after the pieces ``begin``, as the engine would write them."""
    grammar = check("tool_choice", msgspec.json.encode(calls).decode())
    vocabulary = Vocabulary(calls.special)
    start = llguidance.LLMatcher(
        small_tokenizer(calls.special), grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS)
    )
    for piece in begin:
        special = piece.encode() if piece in calls.special else None
        for each in [vocabulary.tokens.index(special)] if special else piece.encode():
            assert start.consume_token(each), f"{piece!r} is not allowed"
    generator = random.Random(1)
    for _ in range(count):
        matcher, taken = start.deep_copy(), []
        while len(taken) < most and not matcher.is_stopped():
            allowed = allowed_tokens(matcher)
            assert not matcher.is_error(), matcher.get_error()
            closing = [
                each
                for each in allowed
                if vocabulary.tokens[each][:1] in (b'"', b"}", b"]", b"<", b")", b"\n")
            ]
            token = generator.choice(closing if closing and generator.random() < 0.3 else allowed)
            if _END in allowed and generator.random() < 0.7:
                token = _END
            if token == _END:
                break
            assert matcher.consume_token(token)
            taken.append(token)
        else:
            if not matcher.is_stopped():
                continue
        yield "".join(begin) + b"".join(vocabulary.tokens[token] for token in taken).decode()


def read(name, answer, *, reasoning=None, thinking=False):
    parser = AnswerParser(reasoning, TOOL_FORMATS[name], Tools.of(TOOLS), thinking=thinking)
    found = [parser.feed(answer), parser.flush()]
    text = "".join(each.text for each in found)
    return text, "".join(each.reasoning for each in found), [call for each in found for call in each.calls]


def hold(calls):
    schemas = Tools.of(TOOLS).parameters
    for call in calls:
        assert call.name in schemas
        arguments = json.loads(call.arguments)
        jsonschema.Draft202012Validator(schemas[call.name]).validate(arguments)
        assert set(arguments) <= set(schemas[call.name].get("properties", {}))


@pytest.mark.one_python
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_every_answer_is_calls_that_fit(name, special):
    seen, answered = set(), 0
    for answer in answers(wanted(name, special=special), 25):
        text, _, calls = read(name, answer)
        assert text == "", answer
        assert calls, answer
        hold(calls)
        seen |= {call.name for call in calls}
        answered += 1
    assert answered > 10
    assert seen == {"move-arm", "stop", "say"}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", ["hermes", "minicpm4"])
def test_thoughts_may_come_first(name, thinking, special):
    calls = wanted(name, reasoning=THINK, thinking=thinking)
    if special:
        calls = msgspec.structs.replace(calls, special=THINK)
    begin = ("<think>", "\nHm. <b> 日\n\n{", "</think>", "\n\n")[thinking:]
    for answer in answers(calls, 6, begin):
        text, reasoning, found = read(name, answer, reasoning=THINK, thinking=thinking)
        assert (text, reasoning) == ("", "Hm. <b> 日\n\n{"), answer
        assert found, answer
        hold(found)
    if not thinking:
        for answer in answers(calls, 2, (TOOL_FORMATS[name].start,)):
            assert read(name, answer, reasoning=THINK)[2]


def test_one_tool_alone():
    for answer in answers(wanted("hermes", tools=TOOLS[1:2]), 5):
        _, _, calls = read("hermes", answer)
        assert {call.name for call in calls} == {"stop"}


def tool(**properties):
    return [{"name": "f", "parameters": {"type": "object", "properties": properties}}]


def parameters(**schema):
    return [{"name": "f", "parameters": {"type": "object", **schema}}]


@pytest.mark.parametrize(
    ("name", "tools", "message"),
    [
        ("hermes", tool(a={"uniqueItems": True}), r"tool f: .*\$\.properties\.a\.uniqueItems"),
        ("minicpm4", tool(a={"not": {}}), r"tool f, argument a: .*\$\.not"),
        ("minicpm4", tool(**{"a b": {}}), "a b is no name of Python"),
        ("minicpm4", [{"name": "a b"}], "no name of Python"),
        ("minicpm5", [{"name": 'a"b'}], "ends it"),
        ("minicpm5", tool(a={"type": "string", "pattern": "x"}), "pattern of a text"),
        ("minicpm5", tool(a={"type": ["string", "null"]}), "one type"),
        ("minicpm5", tool(a={"type": "string", "enum": ["<"]}), "no plain text"),
        ("minicpm5", tool(a={"type": "string", "enum": "ab"}), "no plain text"),
        ("minicpm5", tool(a={"type": "string", "enum": []}), "allows no text"),
        ("minicpm5", tool(a={"type": "string", "enum": ["a"], "minLength": 2}), "allows no text"),
        (
            "minicpm5",
            parameters(
                properties={"a": {"$ref": "#/$defs/t", "maxLength": 3}},
                **{"$defs": {"t": {"type": "string"}}},
            ),
            "tool f, argument a cannot be enforced",
        ),
        ("minicpm5", tool(a={"type": "string", "not": {}}), r"tool f, argument a: .*\$\.not"),
        ("minicpm5", tool(a={"type": "string", "mystery": 1}), r"tool f, argument a: .*\$\.mystery"),
        *((name, parameters(type="string"), "no object") for name in sorted(TOOL_FORMATS)),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(name, tools, message):
    with pytest.raises(InvalidArgumentError, match=message):
        check("tool_choice", msgspec.json.encode(wanted(name, tools=tools)).decode())


@pytest.mark.parametrize("name", ["minicpm4", "minicpm5"])
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"anyOf": [{"required": ["a"]}]}, "anyOf of its parameters"),
        ({"minProperties": 1}, "minProperties of its parameters"),
        ({"patternProperties": {"a": {}}}, "patternProperties of its parameters"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired of its parameters"),
        ({"$ref": "#/$defs/x"}, "[$]ref of its parameters"),
        (
            {"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}},
            "[$]ref .* not to one of its definitions",
        ),
        ({"required": ["b"]}, "requires b"),
        ({"properties": {"a": False}, "required": ["a"]}, "requires a"),
        ({"required": 5}, "required must be a list"),
        ({"required": [["a"]]}, "required must be a list"),
        ({"properties": []}, "objects of schemas"),
        ({"$defs": 5}, "objects of schemas"),
        ({"properties": {"a": 5}}, "must be a schema"),
    ],
)
def test_what_is_said_of_all_arguments_together_is_refused_where_each_stands_alone(name, schema, message):
    with pytest.raises(InvalidArgumentError, match=message):
        check("tool_choice", msgspec.json.encode(wanted(name, tools=parameters(**schema))).decode())


def test_lengths_may_be_written_with_a_point():
    tools = parameters(
        properties={"a": {"type": "string", "minLength": 2.0, "maxLength": 2.0}}, required=["a"]
    )
    for name in sorted(TOOL_FORMATS):
        for answer in answers(wanted(name, tools=tools), 3):
            parser = AnswerParser(None, TOOL_FORMATS[name], Tools.of(tools), thinking=False)
            for call in [*parser.feed(answer).calls, *parser.flush().calls]:
                assert len(json.loads(call.arguments)["a"]) == 2


def test_an_enum_of_texts_needs_no_type():
    properties = {
        "a": {"enum": ["left", "far left"], "maxLength": 5},
        "b": {"const": "on"},
        "c": False,
    }
    tools = parameters(properties=properties, required=["a", "b"])
    for answer in answers(wanted("minicpm5", tools=tools), 5):
        parser = AnswerParser(None, TOOL_FORMATS["minicpm5"], Tools.of(tools), thinking=False)
        for call in [*parser.feed(answer).calls, *parser.flush().calls]:
            assert json.loads(call.arguments) == {"a": "left", "b": "on"}
