"""Answers taken apart: the same in every split, calls whole, malformed ones as text to the last character."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.decoding.parsing.calls import Tools
from edged.decoding.parsing.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    guess_reasoning_format,
    guess_tool_format,
)
from edged.decoding.parsing.parser import AnswerParser

THINK = REASONING_FORMATS["think"]
TOOLS = Tools.of(
    [
        {
            "type": "function",
            "function": {
                "name": "move",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "to": {"type": "string"},
                        "speed": {"type": "number"},
                        "stops": {"type": "array"},
                        "fast": {"type": "boolean"},
                        "from": {"type": "string"},
                        "via-point": {"type": ["string", "null"]},
                    },
                },
            },
        },
        {"name": "get-time"},
    ]
)


def parse(tools, pieces, *, reasoning=THINK, thinking=False):
    """Text, thoughts and calls of an answer that comes in ``pieces``."""
    parser = AnswerParser(reasoning, TOOL_FORMATS.get(tools), TOOLS, thinking=thinking)
    found = [parser.feed(piece) for piece in pieces] + [parser.flush()]
    calls = [(call.name, json.loads(call.arguments)) for each in found for call in each.calls]
    return "".join(each.text for each in found), "".join(each.reasoning for each in found), calls


MOVE = ("move", {"to": "dock", "speed": 1.5})
ANSWERS = {
    "hermes": [
        (
            '<tool_call>\n{"name": "move", "arguments": {"to": "dock", "speed": 1.5}}\n</tool_call>',
            "",
            [MOVE],
        ),
        (
            (
                'I go.\n<tool_call>{"name": "move", "arguments": {"to": "dock", "speed": 1.5}}</tool_call>\n'
                '<tool_call>{"name": "get-time"}</tool_call>\n'
            ),
            "I go.",
            [MOVE, ("get-time", {})],
        ),
        (
            '<tool_call>{"name": "move", "arguments": {"to": "a </tool_call> \\" b"}}</tool_call> Done.',
            " Done.",
            [("move", {"to": 'a </tool_call> " b'})],
        ),
        ('<tool_call>{"name": "move", "arguments": "{\\"to\\": \\"ж\\"}"}', "", [("move", {"to": "ж"})]),
        ("<tool_call>{broken</tool_call> <b>x</b>", "<tool_call>{broken</tool_call> <b>x</b>", []),
        (
            '<tool_call>{"a": "}</tool_call>\n<tool_call>{"name": "get-time"}</tool_call>',
            '<tool_call>{"a": "}</tool_call>',
            [("get-time", {})],
        ),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        (
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            [],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
            [],
        ),
        ('<tool_call>{"name": "f\\ud800"}</tool_call>', '<tool_call>{"name": "f\\ud800"}</tool_call>', []),
        ("<tool_call>" + "[" * 5000, "<tool_call>" + "[" * 5000, []),
        ("a < b and <tool_cal", "a < b and <tool_cal", []),
        ("  two spaces  ", "  two spaces  ", []),
        (" \n ", " \n ", []),
        ("", "", []),
    ],
    "minicpm4": [
        (
            '<|tool_call_start|>\n```python\nmove(to="dock", speed=1.5)\n```\n<|tool_call_end|>',
            "",
            [MOVE],
        ),
        (
            "So:\n<|tool_call_start|>\n```python\nmove(to='do' 'ck', speed=1.5)\nget_time()\n```\n<|tool_call_end|>\n",
            "So:",
            [MOVE, ("get-time", {})],
        ),
        (
            (
                "<|tool_call_start|>move(stops=[1, -2.5, (True, false)], fast=None, kw_from='x', "
                "via_point={'a': 'b'})<|tool_call_end|>"
            ),
            "",
            [
                (
                    "move",
                    {"stops": [1, -2.5, [True, False]], "fast": None, "from": "x", "via-point": {"a": "b"}},
                )
            ],
        ),
        (
            '<|tool_call_start|>move(to="""a <|tool_call_end|> " b""")<|tool_call_end|>',
            "",
            [("move", {"to": 'a <|tool_call_end|> " b'})],
        ),
        ("<|tool_call_start|>a.b(c=1)<|tool_call_end|>", "", [("a.b", {"c": 1})]),
        *(
            (text, text, [])
            for text in (
                f"<|tool_call_start|>{code}<|tool_call_end|>"
                for code in (
                    "move('dock')",
                    "move(**x)",
                    "move(to=open('/etc/passwd'))",
                    "move(to=__import__('os').system('true'))",
                    "move(to=f'{1}')",
                    "move(to=b'x')",
                    "move(to={1: 2})",
                    "move(speed=1e999)",
                    "move(speed=1 + 1)",
                    "x = move(to='a')",
                    "import os",
                    "lambda: 0",
                    "move(",
                    "",
                    "(" * 1000,
                )
            )
        ),
    ],
    "minicpm5": [
        (
            '<function name="move"><param name="to">dock</param><param name="speed">1.5</param></function>',
            "",
            [MOVE],
        ),
        (
            (
                'Go. <function name="move">\n<param name="to"><![CDATA[a <b> </function> & c]]></param>\n'
                '<param name="fast">True</param><param name="stops">[1, "x"]</param>\n</function>\n'
                '<function name="get_time"></function>'
            ),
            "Go.",
            [("move", {"to": "a <b> </function> & c", "fast": True, "stops": [1, "x"]}), ("get-time", {})],
        ),
        (
            '<function name="move"><param name="to">1 &lt; 2 &amp;amp; 3</param></function>',
            "",
            [("move", {"to": "1 < 2 &amp; 3"})],
        ),
        (
            '<function name="other"><param name="n">7</param><param name="s">x y</param></function>',
            "",
            [("other", {"n": 7, "s": "x y"})],
        ),
        (
            '<function name="move"><param name="speed">fast</param></function>',
            '<function name="move"><param name="speed">fast</param></function>',
            [],
        ),
        (
            '<function name="move"><param>x</param></function>!',
            '<function name="move"><param>x</param></function>!',
            [],
        ),
        ("use <function > tags", "use <function > tags", []),
    ],
    "llama3": [
        ('{"name": "move", "parameters": {"to": "dock", "speed": 1.5}}', "", [MOVE]),
        ('<|python_tag|>{"name": "move", "parameters": {"to": "dock", "speed": 1.5}}', "", [MOVE]),
        (
            '{"name": "move", "parameters": {"to": "}"}}; {"name": "get-time", "parameters": {}}',
            "",
            [("move", {"to": "}"}), ("get-time", {})],
        ),
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ('{"a": {"b": 1}} and more', '{"a": {"b": 1}} and more', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ('{"name": "move", "param', '{"name": "move", "param', []),
        ('Sure: {"name": "move", "parameters": {}}', 'Sure: {"name": "move", "parameters": {}}', []),
    ],
}
CASES = [(tools, *case) for tools, cases in ANSWERS.items() for case in cases]


@pytest.mark.parametrize(("tools", "answer", "text", "calls"), CASES)
def test_an_answer_in_one_piece(tools, answer, text, calls):
    assert parse(tools, [answer]) == (text, "", calls)


@pytest.mark.parametrize(("tools", "answer", "text", "calls"), CASES)
def test_an_answer_letter_by_letter_and_in_every_two_pieces(tools, answer, text, calls):
    assert parse(tools, list(answer)) == (text, "", calls)
    for cut in range(min(len(answer), 200)):
        assert parse(tools, [answer[:cut], answer[cut:]]) == (text, "", calls)


@pytest.mark.parametrize("marks", REASONING_FORMATS.values(), ids=REASONING_FORMATS)
def test_thoughts_are_split_from_the_answer(marks):
    start, end = marks
    call = '<tool_call>{"name": "get-time"}</tool_call>'

    def split(answer, **options):
        whole = parse("hermes", [answer], reasoning=marks, **options)
        assert parse("hermes", list(answer), reasoning=marks, **options) == whole
        return whole

    assert split(f"{start}\nHm.\n\nYes.\n{end}\n\nThe answer.") == ("The answer.", "Hm.\n\nYes.", [])
    assert split(f"Hm.\n{end}\n\nIt is.", thinking=True) == ("It is.", "Hm.", [])
    assert split(f"{start}\n\n{end}\n\nQuick.") == ("Quick.", "", [])
    assert split(f"{start}\ncut off") == ("", "cut off", [])
    assert split(f"{start}Hm.{end}{call}") == ("", "Hm.", [("get-time", {})])
    assert split(f"{start}a{end}{call}{start}b{end}So.") == ("So.", "ab", [("get-time", {})])
    assert split(f"Write {start} to think.") == (f"Write {start} to think.", "", [])
    assert split(f"{start}{call}{end}x") == ("x", call, [])


def test_without_formats_all_is_text():
    answer = '<think>x</think><tool_call>{"name": "get-time"}</tool_call>'
    assert parse("", [answer], reasoning=None) == (answer, "", [])


# Pieces of marks and of calls, in any order: half of them malformed.
fragments = st.lists(
    st.sampled_from(
        [
            "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "move", "arguments": {"to": "x"}}', "{", "}",
            '"', "\\", "\n", " ", "a", "<", "<|tool_call_start|>", "<|tool_call_end|>", "move(to='x')", "'", "#", "```python\n",
            "\n```", "<function ", 'name="move">', "</function>", '<param name="to">', "</param>", "<![CDATA[", "]]>",
            "<|python_tag|>", '{"name": "move", "parameters": {}}', ";", "日",
        ]
    ),
    max_size=12,
)  # fmt: skip


@given(st.sampled_from(sorted(TOOL_FORMATS)), fragments, st.data(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_every_split_gives_the_same(tools, parts, data, thinking):
    answer = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    whole = parse(tools, [answer], thinking=thinking)
    assert parse(tools, pieces, thinking=thinking) == whole
    assert parse(tools, list(answer), thinking=thinking) == whole


@given(st.sampled_from(sorted(TOOL_FORMATS)), fragments)
@settings(max_examples=300, deadline=None)
def test_an_answer_without_calls_and_thoughts_loses_nothing(tools, parts):
    answer = "".join(parts)
    text, _, calls = parse(tools, [answer], reasoning=None)
    if not calls:
        assert text == answer


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.from_regex("[a-z]{1,6}", fullmatch=True), json_values, max_size=4))
@settings(max_examples=150, deadline=None)
def test_every_call_that_is_written_is_read(arguments):
    arguments = {f"x{name}": value for name, value in arguments.items()}
    text = json.dumps(arguments)
    written = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>',
        "llama3": f'{{"name": "move", "parameters": {text}}}',
        "minicpm4": "<|tool_call_start|>f("
        + ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        + ")<|tool_call_end|>",
    }
    for tools, answer in written.items():
        for pieces in ([answer], list(answer)):
            found = parse(tools, pieces)
            assert found == ("", "", [("move" if tools == "llama3" else "f", arguments)]), tools


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("... <|tool_call_start|>\n```python", "minicpm4", ""),
        ('<tools> ... <function name="f"> <think>', "minicpm5", "think"),
        ("<tool_call>{...}</tool_call> <think>", "hermes", "think"),
        ("<tool_call>\n<function=f>\n<parameter=x>", "", ""),
        ("<tool_call>f\n<arg_key>", "", ""),
        ('<|start_header_id|> {"name": f, "parameters": {}}', "llama3", ""),
        ("<|thought_start|>", "", "thought"),
        ("<|im_start|>", "", ""),
    ],
)
def test_formats_are_known_by_their_templates(template, tools, reasoning):
    assert guess_tool_format(template) == tools
    assert guess_reasoning_format(template, frozenset()) == reasoning


def test_thoughts_are_known_by_their_tokens():
    assert guess_reasoning_format("", frozenset({"<think>", "</think>", "<s>"})) == "think"
    assert guess_reasoning_format("", frozenset({"<think>"})) == ""
