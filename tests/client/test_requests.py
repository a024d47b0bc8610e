"""Plain Python values as request messages."""

from __future__ import annotations

import pytest

from edged.client.requests import detokenize_request, generate_request, tokenize_request
from edged.errors import InvalidArgumentError


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
    with pytest.raises(InvalidArgumentError, match="'tools'"):
        generate_request([{"role": "user", "tools": "x"}], {})


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
