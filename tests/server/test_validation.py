"""Every check of a request: what passes, and what a refusal says."""

from __future__ import annotations

import pytest

from edged.config import LimitsConfig
from edged.errors import InvalidArgumentError
from edged.server import validation
from edged.v1.inference_pb2 import GenerateRequest, TokenizeRequest
from edged.v1.types_pb2 import Chat, ChatMessage, Stops, TokenIds

LIMITS = LimitsConfig()


def resolve(stops: Stops, **changes):
    options = {
        "limits": LIMITS,
        "prompt_tokens": 100,
        "context_length": 4096,
        "vocabulary": 49152,
        "eos_token_ids": (2,),
    }
    return validation.resolve_stops(stops, **{**options, **changes})


def refused(check, *arguments, **options) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        check(*arguments, **options)
    return caught.value


def test_silent_stops_take_all_that_the_context_leaves_and_the_models_end():
    stops = resolve(Stops())
    assert stops.max_tokens == 3996
    assert stops.token_ids == stops.eos_token_ids == (2,)


def test_ignore_eos_leaves_the_requests_own_ids():
    stops = resolve(Stops(ignore_eos=True, token_ids=[7, 7, 9]))
    assert stops.token_ids == (7, 9)
    assert stops.eos_token_ids == ()


def test_own_ids_come_beside_the_models_end():
    stops = resolve(Stops(token_ids=[7, 2]))
    assert set(stops.token_ids) == {2, 7}
    assert stops.eos_token_ids == (2,)


def test_max_tokens_that_just_fits():
    assert resolve(Stops(max_tokens=3996)).max_tokens == 3996


def test_max_tokens_that_does_not_fit_says_all_numbers():
    error = refused(resolve, Stops(max_tokens=3997))
    assert error.field == "stops.max_tokens"
    for number in ("3997", "100", "3996", "4096"):
        assert number in error.message


def test_max_tokens_zero():
    assert "at least 1" in refused(resolve, Stops(max_tokens=0)).message


def test_too_many_stop_strings():
    error = refused(resolve, Stops(strings=["x"] * 10_000))
    assert "10000" in error.message
    assert "16" in error.message
    assert error.field == "stops.strings"


def test_long_and_empty_stop_strings():
    assert resolve(Stops(strings=["é" * 512])).strings == ("é" * 512,)
    error = refused(resolve, Stops(strings=["ok", "é" * 513]))
    assert error.field == "stops.strings[1]"
    assert "1026 bytes" in error.message
    assert refused(resolve, Stops(strings=[""])).field == "stops.strings[0]"


def test_stop_ids_outside_the_vocabulary_and_too_many():
    assert refused(resolve, Stops(token_ids=[1, 49152])).field == "stops.token_ids[1]"
    assert "65" in refused(resolve, Stops(token_ids=range(65))).message


def test_token_ids():
    validation.check_token_ids([0, 49151], 49152, "token_ids.ids")
    error = refused(validation.check_token_ids, [5, 49152, 70000], 49152, "token_ids.ids")
    assert error.field == "token_ids.ids[1]"
    assert "49152" in error.message
    assert "49151" in error.message


def test_prompt_length():
    validation.check_prompt_length(4095, 4096, "text")
    for tokens in (4096, 5000):
        error = refused(validation.check_prompt_length, tokens, 4096, "text")
        assert str(tokens) in error.message
        assert "4096" in error.message
        assert "4095" in error.message
    assert "no tokens" in refused(validation.check_prompt_length, 0, 4096, "token_ids").message


def test_text_far_beyond_the_context_is_refused_before_it_is_tokenized():
    def check(request, prompt_size=2**20):
        validation.check_prompt_size(request, prompt_size=prompt_size, context_length=100, longest_token=100)

    for kind in (GenerateRequest, TokenizeRequest):
        check(kind(text="x" * 20_000))
        error = refused(check, kind(text="é" * 10_001))
        assert error.field == "text"
        for number in ("20002 bytes", "100 tokens", "10000"):
            assert number in error.message
        half = ChatMessage(role="user", content="x" * 10_001)
        assert refused(check, kind(chat=Chat(messages=[half, half]))).field == "chat"
        named = ChatMessage(role="user", name="x" * 20_001)
        assert refused(check, kind(chat=Chat(messages=[named]))).field == "chat"
        many = refused(check, kind(chat=Chat(messages=[ChatMessage(role="user")] * 101)))
        assert many.field == "chat.messages"
        assert "101 messages" in many.message
        error = refused(check, kind(text="x" * 2000), 1024)
        assert "2000 bytes" in error.message
        assert "1024 (limits.prompt_size)" in error.message
    check(GenerateRequest(token_ids=TokenIds(ids=range(50_000))))


def test_more_ids_than_a_sequence_holds():
    validation.check_token_count(range(100), 100, "token_ids")
    error = refused(validation.check_token_count, range(101), 100, "token_ids")
    assert error.field == "token_ids"
    assert "101 ids" in error.message
    assert "100 (context_length)" in error.message


def test_empty_text():
    assert refused(validation.check_text, "").field == "text"


def test_priority():
    validation.check_priority(-100)
    validation.check_priority(100)
    assert "101" in refused(validation.check_priority, 101).message
