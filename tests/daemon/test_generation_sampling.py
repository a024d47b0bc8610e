"""Every sampling parameter through the real daemon: applied as said, or refused by name."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from edged.client import Chunk
from edged.errors import InvalidArgumentError
from edged.v1 import inference_pb2, types_pb2

PROMPT = "The robot said: one two three four one two three"
MIXED = {
    "temperature": 1.4,
    "min_p": 0.01,
    "typical_p": 0.95,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "penalty_window": 20,
    "bad_words": ["four"],
    "logprobs": True,
    "top_logprobs": 2,
}


def answer(client, prompt=PROMPT, **options):
    return client.generate(prompt, **{"temperature": 0.0, "max_tokens": 10, **options}).answer()


def test_a_bias_forces_and_forbids_tokens(client):
    plain = answer(client)
    forbidden = answer(client, logit_bias={plain.token_ids[0]: -math.inf})
    assert plain.token_ids[0] not in forbidden.token_ids
    forced = answer(client, logit_bias={1234: 1000.0})
    assert forced.token_ids == (1234,) * 10


def test_bad_words_do_not_come(client):
    plain = answer(client, max_tokens=10)
    word = next(word for word in plain.text.split() if word.isalpha())
    assert f" {word}" in f" {plain.text}"
    without = answer(client, max_tokens=10, bad_words=[word])
    assert word not in without.text.split()
    pair = plain.token_ids[2:4]
    text = answer(client, max_tokens=10, bad_token_ids=[pair]).token_ids
    assert all(text[index : index + 2] != pair for index in range(9))


def test_penalties_keep_an_answer_from_turning_in_circles(client):
    circle = "a b a b a b a b a b a b"
    plain = len(set(answer(client, circle, max_tokens=10).token_ids))
    assert plain < 4
    for penalty in ({"frequency_penalty": 10.0}, {"presence_penalty": 10.0}, {"repetition_penalty": 5.0}):
        tokens = answer(client, circle, max_tokens=10, **penalty).token_ids
        assert len(set(tokens)) > plain + 3, penalty


def test_a_token_that_ends_is_not_drawn_early(client):
    plain = answer(client, max_tokens=8)
    stop = plain.token_ids[3]
    early = answer(client, max_tokens=8, stop_token_ids=[stop])
    assert early.finished.reason == "stop_token"
    assert early.finished.usage.generated_tokens == plain.token_ids.index(stop) + 1
    late = answer(client, max_tokens=8, stop_token_ids=[stop], min_tokens=8)
    assert late.finished.usage.generated_tokens == 8
    assert stop not in late.token_ids


def test_stop_strings_wait_for_min_tokens(client):
    plain = answer(client, max_tokens=12)
    letter = "e"
    early = answer(client, stop=[letter])
    late = answer(client, stop=[letter], min_tokens=6)
    assert early.finished.reason == late.finished.reason == "stop_string"
    assert late.finished.usage.generated_tokens > 6 > early.finished.usage.generated_tokens
    assert plain.text.startswith(late.text)


def test_log_probabilities_come_with_every_token(client):
    got = answer(client, logprobs=True, top_logprobs=3)
    plain = answer(client)
    assert got.token_ids == plain.token_ids, "asking for them changes no token"
    assert len(got.logprobs) == len(got.token_ids)
    for token_id, token in zip(got.token_ids, got.logprobs, strict=True):
        assert token.logprob <= 0
        assert [each.logprob for each in token.top] == sorted(
            (each.logprob for each in token.top), reverse=True
        )
        assert token.top[0].token_id == token_id, "a greedy answer takes the likeliest"
        assert token.top[0].logprob == token.logprob
        assert len(token.top) == 3
    assert b"".join(token.top[0].text for token in got.logprobs).decode() == got.text
    none = answer(client, logprobs=True)
    assert [token.logprob for token in none.logprobs] == [token.logprob for token in got.logprobs]
    assert none.logprobs[0].top == ()


def test_a_seeded_answer_is_the_same_in_any_company(client):
    alone = [answer(client, seed=seed, **MIXED) for seed in range(4)]
    with ThreadPoolExecutor(6) as threads:
        company = threads.map(lambda seed: answer(client, "Company", seed=seed, temperature=1.0), range(2))
        together = list(threads.map(lambda seed: answer(client, seed=seed, **MIXED), range(4)))
        list(company)
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert len({each.token_ids for each in alone}) == 4


def test_what_was_used_is_said(daemon, client):
    events = iter(
        client._inference.Generate(
            inference_pb2.GenerateRequest(
                text=PROMPT,
                sampling=types_pb2.Sampling(
                    min_p=0.25, presence_penalty=0.5, logit_bias={7: -2.5}, bad_words=["x"]
                ),
                stops=types_pb2.Stops(max_tokens=1),
            )
        )
    )
    used = next(events).started.sampling
    assert (used.min_p, used.presence_penalty, used.logit_bias[7]) == (0.25, 0.5, -2.5)
    assert (used.typical_p, used.repetition_penalty, used.n) == (1.0, 1.0, 1)
    assert used.HasField("frequency_penalty")
    words = [client.detokenize(list(each.ids)) for each in used.bad_token_ids]
    assert words == ["x", " x"]
    list(events)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"min_p": 1.5}, "sampling.min_p"),
        ({"min_p": math.nan}, "sampling.min_p"),
        ({"typical_p": 0.0}, "sampling.typical_p"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"repetition_penalty": math.inf}, "sampling.repetition_penalty"),
        ({"presence_penalty": -11.0}, "sampling.presence_penalty"),
        ({"frequency_penalty": math.nan}, "sampling.frequency_penalty"),
        ({"penalty_window": 5000, "presence_penalty": 1.0}, "sampling.penalty_window"),
        ({"penalty_window": 5}, "sampling.penalty_window"),
        ({"logit_bias": {3: math.nan}}, "sampling.logit_bias[3]"),
        ({"logit_bias": {3: math.inf}}, "sampling.logit_bias[3]"),
        ({"logit_bias": {10**6: 1.0}}, "sampling.logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "sampling.logit_bias"),
        ({"bad_words": [""]}, "sampling.bad_words[0]"),
        ({"bad_words": ["a"] * 257}, "sampling.bad_words"),
        ({"bad_token_ids": [[]]}, "sampling.bad_token_ids"),
        ({"bad_token_ids": [[1, 10**6]]}, "sampling.bad_token_ids"),
        ({"top_logprobs": 2}, "sampling.top_logprobs"),
        ({"top_logprobs": 65, "logprobs": True}, "sampling.top_logprobs"),
        ({"min_tokens": 11}, "stops.min_tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_name(client, options, field):
    with pytest.raises(InvalidArgumentError) as caught:
        answer(client, **options)
    assert caught.value.field == field
    assert field.partition("[")[0] in caught.value.message


def test_chunks_hold_one_entry_a_token(client):
    for event in client.generate(PROMPT, max_tokens=5, logprobs=True):
        if isinstance(event, Chunk):
            assert len(event.logprobs) == len(event.token_ids)
