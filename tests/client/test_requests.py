"""Plain Python values as request messages."""

from __future__ import annotations

import pytest

from edged.client.requests import GenerateOptions, detokenize_request, generate_request, tokenize_request
from edged.errors import InvalidArgumentError
from edged.proto_fields import single_fields
from edged.v1.types_pb2 import Sampling


def test_silence_stays_silent():
    request = generate_request("Hi", {})
    assert request.text == "Hi"
    assert not request.sampling.ListFields()
    assert not request.stops.ListFields()


def test_zero_is_not_silence():
    request = generate_request("Hi", {"temperature": 0.0, "seed": 0, "max_tokens": 0, "top_k": None})
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("seed")
    assert request.stops.HasField("max_tokens")
    assert not request.sampling.HasField("top_k")


def test_the_form_of_the_prompt_follows_its_type():
    assert list(generate_request([1, 2], {}).token_ids.ids) == [1, 2]
    assert generate_request([], {}).WhichOneof("prompt") == "token_ids"
    assert generate_request("", {}).WhichOneof("prompt") == "text"
    chat = generate_request([{"role": "user", "content": "Hi"}], {"continue_final_message": True}).chat
    assert (chat.messages[0].role, chat.messages[0].content) == ("user", "Hi")
    assert chat.continue_final_message


def test_one_stop_string_or_several():
    assert list(generate_request("Hi", {"stop": "END"}).stops.strings) == ["END"]
    assert list(generate_request("Hi", {"stop": ["a", "b"], "stop_token_ids": [3]}).stops.strings) == [
        "a",
        "b",
    ]


@pytest.mark.parametrize("name", [field.name for field in Sampling.DESCRIPTOR.fields])
def test_every_field_of_sampling_is_a_keyword_that_arrives(name):
    assert name in GenerateOptions.__annotations__
    several = {"logit_bias": {3: 1.0}, "bad_words": ["no"], "bad_token_ids": [[3]]}
    assert set(several) | set(single_fields(Sampling)) == {field.name for field in Sampling.DESCRIPTOR.fields}
    request = generate_request("Hi", {name: several.get(name, 1)})
    assert [field.name for field, _ in request.sampling.ListFields()] == [name]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"seed": 2**64}, "seed"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"stop_token_ids": [-1]}, "token_ids"),
        ({"temperature": "hot"}, "temperature"),
        ({"model": "\ud800"}, "model"),
    ],
)
def test_what_a_message_cannot_hold_names_its_field(options, field):
    with pytest.raises(InvalidArgumentError) as caught:
        generate_request("Hi", options)
    assert caught.value.field == field


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="max_token'"):
        generate_request("Hi", {"max_token": 3})
    with pytest.raises(InvalidArgumentError, match=r"messages\[0\] has the key 'tools'"):
        generate_request([{"role": "user", "tools": "x"}], {})
    with pytest.raises(TypeError, match="'tool'"):
        tokenize_request("Hi", model="", no_special_tokens=False, options={"tool": []})


def test_tokenize_and_detokenize():
    assert tokenize_request("Hi", model="m", no_special_tokens=True).no_special_tokens
    with pytest.raises(InvalidArgumentError, match="not token ids"):
        tokenize_request([1], model="", no_special_tokens=False)
    assert list(detokenize_request([1, 2], model="", keep_special_tokens=False).token_ids) == [1, 2]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_tokens", -1, "max_tokens is -1: give a whole number from 0 to 4294967295"),
        ("seed", -1, "seed is -1: give a whole number from 0 to 18446744073709551615"),
        ("priority", 2**31, "from -2147483648 to 2147483647"),
        ("top_k", 1.5, "top_k is 1.5: give a whole number"),
    ],
)
def test_a_whole_number_out_of_range_is_told_its_range(name, value, said):
    with pytest.raises(InvalidArgumentError) as caught:
        generate_request("x", {name: value})
    assert said in caught.value.message


CALL = {"name": "f", "arguments": {"é": 1}}


@pytest.mark.parametrize(
    "call",
    [CALL, {"function": CALL}, {"type": "function", "function": {**CALL, "arguments": '{"é": 1}'}}],
)
def test_a_chat_in_openais_form(call):
    messages = [
        {"role": "user", "content": "Hi", "name": "Ann"},
        {"role": "assistant", "content": None, "reasoning_content": "", "tool_calls": [{"id": "c", **call}]},
        {"role": "tool", "content": "wet", "tool_call_id": "c"},
    ]
    options = {
        "tools": [{"name": "f"}, '{"name": "g"}'],
        "template_arguments": {"n": 5},
        "enable_thinking": False,
        "template": "rag",
    }
    chat = generate_request(messages, options).chat
    assert chat == tokenize_request(messages, model="", no_special_tokens=False, options=options).chat
    assert not chat.messages[1].HasField("content")
    assert chat.messages[1].HasField("reasoning")
    sent = chat.messages[1].tool_calls[0]
    assert (sent.id, sent.name, sent.arguments) == ("c", "f", '{"é": 1}')
    assert list(chat.tools) == ['{"name": "f"}', '{"name": "g"}']
    assert (chat.template_arguments, chat.template) == ('{"n": 5}', "rag")
    assert chat.HasField("enable_thinking")


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("text", {"tools": [{"name": "f"}]}, "tools"),
        ([1, 2], {"enable_thinking": False}, "enable_thinking"),
        ("text", {"template_arguments": {"a": 1}}, "template_arguments"),
        ([{"role": "user", "content": "x"}], {"tools": [7]}, "tools"),
        ([{"role": "user", "content": "x"}], {"tools": [{"name": {1, 2}}]}, "tools"),
        (
            [{"role": "user", "content": "x"}],
            {"template_arguments": {"a": float("nan")}},
            "template_arguments",
        ),
        ([{"role": "user", "content": "x"}], {"enable_thinking": "yes"}, "enable_thinking"),
        ([{"role": "user", "content": ["x"]}], {}, "content"),
        ([{"role": "user", "content": "x"}, "and more"], {}, "chat"),
        ([{"role": "assistant", "tool_calls": ["f"]}], {}, "chat"),
        ([{"role": "assistant", "tool_calls": [{"function": "f"}]}], {}, "chat"),
    ],
)
def test_what_no_chat_can_hold(prompt, options, field):
    with pytest.raises(InvalidArgumentError) as caught:
        generate_request(prompt, options)
    assert caught.value.field == field


def test_every_sampling_parameter_arrives():
    numbers = {
        "min_p": 0.125,
        "typical_p": 0.5,
        "repetition_penalty": 1.25,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "penalty_window": 9,
        "top_logprobs": 3,
        "n": 2,
    }
    sampling = generate_request(
        "Hi",
        {
            **numbers,
            "logprobs": True,
            "logit_bias": {5: -1.5},
            "bad_words": ["a"],
            "bad_token_ids": [[1, 2], [3]],
            "min_tokens": 4,
        },
    )
    assert {name: getattr(sampling.sampling, name) for name in numbers} == numbers
    assert sampling.sampling.logprobs
    assert dict(sampling.sampling.logit_bias) == {5: -1.5}
    assert list(sampling.sampling.bad_words) == ["a"]
    assert [list(each.ids) for each in sampling.sampling.bad_token_ids] == [[1, 2], [3]]
    assert sampling.stops.min_tokens == 4


def test_a_bias_that_cannot_be_sent_is_refused():
    for bias in ({"five": 1.0}, {-1: 1.0}, {5: "much"}, [5]):
        with pytest.raises(InvalidArgumentError, match="logit_bias"):
            generate_request("Hi", {"logit_bias": bias})


def test_one_form_of_an_answer():
    assert generate_request("Hi", {"json_schema": {"type": "null"}}).json_schema == '{"type": "null"}'
    assert generate_request("Hi", {"json_schema": False}).json_schema == "false"
    assert generate_request("Hi", {"json_schema": '{"é": 1}'}).json_schema == '{"é": 1}'
    assert list(generate_request("Hi", {"choice": ["a", "b"]}).choice.texts) == ["a", "b"]
    assert generate_request("Hi", {"choice": []}).WhichOneof("constraint") == "choice"
    with pytest.raises(InvalidArgumentError, match="regex and choice are both given"):
        generate_request("Hi", {"regex": "a", "choice": ["b"]})
    with pytest.raises(InvalidArgumentError, match="no JSON"):
        generate_request("Hi", {"json_schema": {"minimum": float("nan")}})


def test_the_choice_of_tools():
    chat = [{"role": "user", "content": "Hi"}]
    assert generate_request(chat, {"tool_choice": "required"}).tool_choice == 3
    assert generate_request(chat, {"tool": "go", "raw": True}).tool == "go"
    with pytest.raises(InvalidArgumentError, match="auto, none, required"):
        generate_request(chat, {"tool_choice": "always"})
