"""The chat of a request: what a template gets of it, and what is refused before one runs."""

from __future__ import annotations

import json
import time

import pytest

from edged.errors import InvalidArgumentError
from edged.server.chat import MOST_TOOLS, chat_bytes, read_chat
from edged.v1.types_pb2 import Chat, ChatMessage, ToolCall

USER = ChatMessage(role="user", content="Hi")
WELL = ChatMessage(role="assistant", content="Well")
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def refused(chat) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        read_chat(chat)
    assert caught.value.field in caught.value.message
    assert len(caught.value.message) < 400
    return caught.value


def test_a_chat_as_templates_take_it():
    chat = Chat(
        messages=[
            ChatMessage(role="system", content=""),
            ChatMessage(role="user", content="Weather?", name="Ann"),
            ChatMessage(
                role="assistant",
                reasoning="Look it up.",
                tool_calls=[ToolCall(id="c1", name="f", arguments='{"b": 2, "a": 1.0}'), ToolCall(name="g")],
            ),
            ChatMessage(role="tool", content="wet", tool_call_id="c1"),
            ChatMessage(role="assistant", content="It is"),
        ],
        continue_final_message=True,
        tools=[json.dumps(TOOL)],
        template_arguments='{"n": 5, "x": {"z": null}}',
        enable_thinking=False,
        template="rag",
    )
    prompt = read_chat(chat)
    assert prompt.messages == [
        {"role": "system", "content": ""},
        {"role": "user", "content": "Weather?", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Look it up.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"b": 2, "a": 1.0}}},
                {"type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "wet", "tool_call_id": "c1"},
        {"role": "assistant", "content": "It is"},
    ]
    assert list(prompt.messages[2]["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]
    assert (prompt.tools, prompt.arguments) == ([TOOL], {"n": 5, "x": {"z": None}})
    assert type(prompt.arguments["n"]) is int
    assert (prompt.enable_thinking, prompt.continue_final_message, prompt.template) == (False, True, "rag")


def test_silence():
    prompt = read_chat(Chat(messages=[USER, ChatMessage(role="assistant")]))
    assert prompt.messages[1] == {"role": "assistant", "content": ""}
    assert (prompt.tools, prompt.arguments, prompt.enable_thinking) == (None, {}, None)


def test_every_text_counts_for_the_size_of_a_prompt():
    call = ToolCall(id="i" * 10, name="n" * 10, arguments="a" * 10)
    message = ChatMessage(
        role="r" * 10,
        content="é" * 5,
        name="n" * 10,
        reasoning="r" * 10,
        tool_call_id="t" * 10,
        tool_calls=[call] * 2,
    )
    chat = Chat(messages=[message], tools=["t" * 10] * 2, template_arguments="a" * 10)
    assert chat_bytes(chat) == 140


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (Chat(), "chat.messages"),
        (Chat(messages=[USER, ChatMessage(role="robot")]), "chat.messages[1].role"),
        (Chat(messages=[ChatMessage(role="x" * 1_000_000)]), "chat.messages[0].role"),
        (Chat(messages=[USER], continue_final_message=True), "chat.continue_final_message"),
        (
            Chat(messages=[ChatMessage(role="user", tool_calls=[ToolCall(name="f")])]),
            "chat.messages[0].tool_calls",
        ),
        (Chat(messages=[ChatMessage(role="user", reasoning="")]), "chat.messages[0].reasoning"),
        (Chat(messages=[ChatMessage(role="user", tool_call_id="x")]), "chat.messages[0].tool_call_id"),
    ],
)
def test_messages_that_no_template_takes(chat, field):
    assert refused(chat).field == field


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("{", "is no JSON"),
        ("[1]", "is [1]; give the JSON text of an object"),
        ('"x"', "give the JSON text of an object"),
        ("null", "give the JSON text of an object"),
        ('{"x": {"y": 1, "y": 2}}', "the key 'y' comes twice"),
        ('{"x": NaN}', "NaN is no JSON number"),
        ('{"x": -Infinity}', "-Infinity is no JSON number"),
        ('{"x": 1e999}', "too large a number"),
        ('{"x": ' + "9" * 10_000 + "}", "is no JSON"),
        (r'{"x": "\ud800"}', "half a surrogate pair"),
        ("[" * 200_000, "nested too deeply|no JSON"),
        ('{"a":' * 200_000, "nested too deeply|no JSON"),
    ],
    ids=lambda text: text[:12],
)
def test_json_that_is_no_object_is_refused_wherever_it_stands(arguments, said):
    begun = time.monotonic()
    message = ChatMessage(role="assistant", tool_calls=[ToolCall(name="f", arguments=arguments)])
    for chat, field in (
        (Chat(messages=[USER], tools=[json.dumps(TOOL), arguments]), "chat.tools[1]"),
        (Chat(messages=[USER], template_arguments=arguments), "chat.template_arguments"),
        (Chat(messages=[USER, message]), "chat.messages[1].tool_calls[0].arguments"),
    ):
        with pytest.raises(InvalidArgumentError, match=said.replace("[1]", r"\[1\]")) as caught:
            read_chat(chat)
        assert caught.value.field == field
        assert len(caught.value.message) < 400
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({}, "chat.tools[0].name"),
        ({"type": "function"}, "chat.tools[0].name"),
        ({"function": "f"}, "chat.tools[0].function"),
        ({"function": {"name": 7}}, "chat.tools[0].function.name"),
        ({"function": {"name": ""}}, "chat.tools[0].function.name"),
        ({"function": {"name": "f", "description": []}}, "chat.tools[0].function.description"),
        ({"function": {"name": "f", "parameters": "object"}}, "chat.tools[0].function.parameters"),
        ({"name": "f", "parameters": [1]}, "chat.tools[0].parameters"),
    ],
)
def test_tools_of_a_wrong_shape(tool, field):
    assert refused(Chat(messages=[USER], tools=[json.dumps(tool)])).field == field


def test_tools_of_one_name_and_too_many_tools():
    error = refused(Chat(messages=[USER], tools=[json.dumps(TOOL)] * 2))
    assert error.field == "chat.tools[1].function.name"
    assert "chat.tools[0]" in error.message
    assert str(MOST_TOOLS + 1) in refused(Chat(messages=[USER], tools=["{}"] * (MOST_TOOLS + 1))).message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_thinking", "yes"),
        ("enable_thinking", 1),
        ("date_string", 5),
        ("thinking_budget", True),
        ("builtin_tools", "x"),
    ],
)
def test_template_arguments_of_a_wrong_type(name, value):
    error = refused(Chat(messages=[USER], template_arguments=json.dumps({name: value})))
    assert error.field == f"chat.template_arguments.{name}"


def test_two_switches_that_disagree():
    chat = Chat(messages=[USER], template_arguments='{"enable_thinking": true}', enable_thinking=False)
    assert refused(chat).field == "chat.template_arguments.enable_thinking"
    chat.enable_thinking = True
    assert read_chat(chat).enable_thinking
