"""Bad input through a real socket: a canonical code, a message that says what to do, and nothing else breaks."""

from __future__ import annotations

import math
import time

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from edged import errors
from edged.client import Chunk
from edged.v1 import inference_pb2

STORY = "Once upon a time"


def steps(client) -> int:
    return client.status().models[0].steps


def wait_until_free(client, after):
    """Wait for a report that is younger than the step `after` and says that nobody holds a page."""
    end = time.monotonic() + 60
    while True:
        (model,) = client.status().models
        if model.steps > after and model.pages_free == model.pages and model.running == model.waiting == 0:
            return
        assert time.monotonic() < end, model
        time.sleep(0.02)


def wait_until_held(client):
    end = time.monotonic() + 60
    while client.status().models[0].pages_free == client.status().models[0].pages:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def _still_serves(client):
    """After every refusal the next request is answered and every page is free."""
    yield
    before = steps(client)
    assert client.generate(STORY, temperature=0.0, max_tokens=2).answer().finished.reason == "length"
    wait_until_free(client, before)


def refused(client, prompt, kind=errors.InvalidArgumentError, **options) -> errors.EdgedError:
    with pytest.raises(kind) as caught:
        client.generate(prompt, **options).answer()
    assert type(caught.value) is kind
    return caught.value


def send_raw(daemon, data: bytes, method: str = "Inference/Generate") -> grpc.RpcError:
    """The failure of a call whose request is these bytes."""
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(daemon.address, options) as channel:
        call = channel.unary_stream(f"/edged.v1.{method}")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(data, timeout=60))
    return caught.value


@pytest.mark.parametrize(("prompt", "field"), [("", "text"), ([], "token_ids")])
def test_empty_prompt(client, prompt, field):
    error = refused(client, prompt)
    assert error.field == field
    assert "at least one" in error.message


def test_no_prompt_at_all(daemon):
    error = send_raw(daemon, b"")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "text, token_ids, chat" in error.details()


@pytest.mark.parametrize("tokens", [1024, 1025, 5000])
def test_prompt_longer_than_the_context(client, tokens):
    error = refused(client, [5] * tokens)
    assert str(tokens) in error.message
    assert "1024" in error.message


def test_text_longer_than_the_context(client):
    text = "word " * 2000
    error = refused(client, text)
    assert str(len(client.tokenize(text))) in error.message
    assert "1024" in error.message


def test_megabytes_of_text_are_refused_at_once(client):
    begun = time.monotonic()
    error = refused(client, "word " * 180_000)
    assert "900000 bytes" in error.message
    assert time.monotonic() - begun < 5  # tokenizing it would take longer


def test_max_tokens_that_does_not_fit(client):
    error = refused(client, [5] * 1000, max_tokens=25)
    assert error.field == "stops.max_tokens"
    for number in ("25", "1000", "24", "1024"):
        assert number in error.message
    assert "at least 1" in refused(client, STORY, max_tokens=0).message
    fits = client.generate([5] * 100, max_tokens=924, temperature=0, ignore_eos=True)
    assert next(iter(fits)).max_tokens == 924


def test_token_ids_outside_the_vocabulary(client):
    error = refused(client, [1, 2, 49152])
    assert error.field == "token_ids.ids[2]"
    assert "49152" in error.message
    assert "49151" in error.message
    with pytest.raises(errors.InvalidArgumentError, match="4294967295"):
        client.detokenize([2**32 - 1])


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -math.inf, -0.5])
def test_temperature(client, temperature):
    error = refused(client, STORY, temperature=temperature)
    assert error.field == "sampling.temperature"
    assert str(temperature) in error.message


@pytest.mark.parametrize("top_p", [math.nan, 0.0, -1.0, 1.5])
def test_top_p(client, top_p):
    assert refused(client, STORY, top_p=top_p).field == "sampling.top_p"


def test_top_k(client):
    assert "49153" in refused(client, STORY, top_k=49153).message


def test_unknown_model(client):
    error = refused(client, STORY, errors.NotFoundError, model="gpt-5")
    assert "'gpt-5'" in error.message
    assert "smollm" in error.message
    long = refused(client, STORY, errors.NotFoundError, model="x" * 100_000)
    assert len(long.message) < 1000
    with pytest.raises(errors.NotFoundError):
        client.tokenize("hi", model="gpt-5")


def test_ten_thousand_stop_strings(client):
    error = refused(client, STORY, stop=[f"stop {number}" for number in range(10_000)])
    assert "10000" in error.message
    assert "16" in error.message
    assert "limits.stop_strings" in error.message


def test_long_stop_strings(client):
    assert "1025 bytes" in refused(client, STORY, stop="x" * 1025).message
    assert refused(client, STORY, stop=[""]).field == "stops.strings[0]"


def test_priority(client):
    assert "101" in refused(client, STORY, priority=101).message


def test_64_mib(daemon, client):
    error = refused(client, "x" * (64 << 20), errors.MessageTooLargeError)
    assert str(2 << 20) in error.message
    assert "limits.message_size" in error.message
    raw = send_raw(daemon, b"\0" * (64 << 20))
    assert raw.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_invalid_utf8_names_the_field(daemon):
    error = send_raw(daemon, b"\x12\x04ab\xff!")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "text is not UTF-8" in error.details()
    (metadata,) = [value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin"]
    bad = error_details_pb2.BadRequest()
    assert status_pb2.Status.FromString(metadata).details[0].Unpack(bad)
    assert bad.field_violations[0].field == "text"


@pytest.mark.parametrize("data", [b"\x12\xff", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256))])
def test_garbage(daemon, data):
    error = send_raw(daemon, data)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "GenerateRequest" in error.details()


def test_unknown_method(daemon):
    assert send_raw(daemon, b"", "Inference/Dream").code() is grpc.StatusCode.UNIMPLEMENTED


def test_chat_faults(client):
    assert "'robot'" in refused(client, [{"role": "robot", "content": "beep"}]).message
    assert refused(client, [{"role": "", "content": "x"}]).field == "chat.messages[0].role"
    user = [{"role": "user", "content": "Hi"}]
    assert "assistant" in refused(client, user, continue_final_message=True).message


def test_an_expired_deadline_frees_the_pages(client):
    before = steps(client)
    # It might end at any token, so nothing says beforehand that it cannot meet its deadline.
    with pytest.raises(errors.DeadlineError, match=r"timeout of 0\.5 s|the deadline passed after"):
        client.generate(STORY, max_tokens=900, temperature=0.0, timeout=0.5).answer()
    wait_until_free(client, before)


def test_a_deadline_in_the_past(client):
    with pytest.raises(errors.DeadlineError):
        client.generate(STORY, timeout=0.0).answer()
    with pytest.raises(errors.DeadlineError):
        client.generate(STORY, timeout=1e-6).answer()


def test_a_client_that_vanishes_mid_stream(daemon, client):
    finished, before = client.status().requests_finished, steps(client)
    with daemon.client() as other:
        stream = iter(other.generate(STORY, max_tokens=900, ignore_eos=True, temperature=0.0))
        assert any(isinstance(event, Chunk) for event in (next(stream), next(stream)))
        wait_until_held(client)
    # Its steps are later than `before`; none need follow the last that a report told of.
    wait_until_free(client, before)
    assert client.status().requests_finished == finished


def test_a_cancelled_request_in_the_middle_of_its_prompt(client):
    (model,) = client.status().models
    generation = client.generate([5] * 1000, max_tokens=20, temperature=0.0)
    stream = iter(generation)
    assert next(stream).prompt_tokens == 1000
    generation.cancel()
    with pytest.raises(errors.CancelledError):
        list(stream)
    wait_until_free(client, model.steps)
    assert client.status().models[0].prompt_tokens - model.prompt_tokens < 1000


def test_a_loop_that_is_left_early_ends_the_work(client):
    before = steps(client)
    for event in client.generate(STORY, max_tokens=900, ignore_eos=True, temperature=0.0):
        if isinstance(event, Chunk):
            break
    wait_until_free(client, before)


def test_the_wire_without_our_client(daemon):
    """What a client in another language sees: the bare stubs' messages and codes."""
    request = inference_pb2.GenerateRequest(text=STORY)
    request.stops.max_tokens = 5000
    error = send_raw(daemon, request.SerializeToString())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "5000" in error.details()
