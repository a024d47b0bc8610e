"""Cache, sessions, priorities, deadlines, limits and the watched status, through the real daemon."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from edged import errors
from edged.client import Chunk, Started
from edged.v1 import control_pb2

ON = {"temperature": 0.0, "ignore_eos": True}
STORY = "Once upon a time there was a robot who " * 30


def test_a_prompt_that_was_there_is_cached_and_answered_alike(client):
    first = client.generate(STORY, max_tokens=8, temperature=0.0).answer()
    again = client.generate(STORY, max_tokens=8, temperature=0.0).answer()
    assert again.token_ids == first.token_ids
    prompt = first.started.prompt_tokens
    assert again.started.cached_tokens == again.finished.usage.cached_tokens == (prompt - 1) // 64 * 64
    other = client.generate("Another beginning. " + STORY, max_tokens=1, temperature=0.0).answer()
    assert other.started.cached_tokens == 0
    (model,) = client.status().models
    assert model.cached_tokens >= again.started.cached_tokens
    assert model.pages_cached > 0
    assert model.time_to_first_token.count >= 3
    assert 0 < model.inter_token_latency.p50 <= model.inter_token_latency.p99 <= model.inter_token_latency.max


def test_a_session_is_listed_used_and_dropped(client):
    turn = [(7 * i) % 3000 + 100 for i in range(180)]
    answer = client.generate(turn, max_tokens=24, session="talk", **ON).answer()
    (session,) = [each for each in client.sessions() if each.name == "talk"]
    assert (session.model, session.pages, session.requests) == ("smollm", 3, 1)
    more = [*turn, *answer.token_ids, 5, 6, 7]
    second = client.generate(more, max_tokens=2, session="talk", **ON).answer()
    assert second.started.cached_tokens == 192
    assert client.sessions("smollm")[0].requests == 2
    assert client.status().models[0].pages_pinned >= 3
    client.drop_session("talk")
    assert not [each for each in client.sessions() if each.name == "talk"]
    with pytest.raises(errors.NotFoundError, match="no session 'talk'"):
        client.drop_session("talk")


@pytest.mark.parametrize("name", ["x" * 129, "new\nline"])
def test_a_session_that_cannot_be_named_is_refused(client, name):
    with pytest.raises(errors.InvalidArgumentError, match="session is"):
        client.generate("Hi", session=name, max_tokens=1).answer()


def test_sessions_of_what_is_not_there(client):
    with pytest.raises(errors.NotFoundError, match="no model is called nobody"):
        client.sessions("nobody")
    with pytest.raises(errors.InvalidArgumentError, match="name is empty"):
        client.drop_session("")


@pytest.mark.parametrize("interval", [0.0, 0.05, 3601.0, float("nan")])
def test_an_interval_outside_its_range_is_refused(client, interval):
    with pytest.raises(errors.InvalidArgumentError, match="interval_seconds"):
        next(client.watch_status(interval))


def test_a_watched_status_shows_what_runs_and_ends_with_the_daemon(start_daemon):
    daemon = start_daemon(fake={"step_seconds": 0.01}, model={"max_sequences": 2})
    with daemon.client() as client, daemon.client() as other:
        generation = iter(other.generate([5, 6, 7], max_tokens=300, **ON))
        assert isinstance(next(generation), Started)
        statuses = client.watch_status(0.1)
        busy = next(
            each
            for each in itertools.islice(statuses, 50)
            if each.models[0].generated_tokens_per_second > 0
            and each.models[0].inter_token_latency.max
            > 0.008  # what waited for this process comes all at once
        )
        assert busy.models[0].running == 1
        latency = busy.models[0].inter_token_latency
        assert latency.p50 <= latency.p99 <= latency.max < 8, "in seconds"
        assert busy.models[0].queue_capacity == 64
        generation.close()
        idle = next(each for each in statuses if each.models[0].running == 0)
        assert idle.models[0].generated_tokens_per_second == 0
        daemon.signal()
        states = set()
        with pytest.raises(errors.UnavailableError):
            states.update(each.state for each in statuses)
        assert control_pb2.STATE_DRAINING in states, "a change is told at once"
    assert daemon.wait() == 0


def test_a_deadline_that_cannot_be_met_is_refused_at_once(start_daemon):
    daemon = start_daemon(fake={"step_seconds": 0.02}, model={"max_sequences": 1, "prefill_chunk": 64})
    with daemon.client() as client:
        client.generate([5] * 300, max_tokens=20, **ON).answer()
        with pytest.raises(errors.DeadlineError, match="the answer of 500 tokens is expected after"):
            client.generate([6] * 10, max_tokens=500, timeout=3.0, **ON).answer()
        running = iter(client.generate([7] * 10, max_tokens=200, **ON))
        next(running)
        with pytest.raises(errors.DeadlineError, match="behind 0 waiting and 1 running"):
            client.generate([8] * 10, max_tokens=5, timeout=0.15, **ON).answer()
        running.close()
        assert client.generate([9] * 10, max_tokens=5, timeout=60.0, **ON).answer().text
    assert daemon.stop() == 0


def test_one_client_may_have_so_many_requests_at_once(start_daemon):
    daemon = start_daemon(
        fake={"step_seconds": 0.01},
        model={"max_sequences": 1},
        limits={"requests_per_client": 2},
        listen={"tcp": "127.0.0.1:0"},
    )
    with daemon.client() as client:
        running = iter(client.generate([5], max_tokens=500, **ON))
        next(running)
        waiting = client.generate([6], max_tokens=2, **ON)
        end = time.monotonic() + 60
        while client.status().models[0].waiting < 1:
            assert time.monotonic() < end
            time.sleep(0.02)
        with pytest.raises(errors.ResourceExhaustedError, match="2 requests of this client") as caught:
            client.generate([7], max_tokens=2).answer()
        assert caught.value.retry_seconds > 0
        running.close()
        assert len(waiting.answer().token_ids) == 2
        assert len(client.generate([7], max_tokens=2, **ON).answer().token_ids) == 2
    assert daemon.stop() == 0


def tokens_of(generation):
    return (token for event in generation if isinstance(event, Chunk) for token in event.token_ids)


def test_a_suspended_request_goes_on_as_if_nothing_had_been(start_daemon, daemon):
    """The demo model with room for one sequence and host memory for another."""
    single = start_daemon(model={"max_sequences": 1, "host_kv": "64MiB", "prefix_cache": False})
    with daemon.client() as other:
        expected = other.generate("The sea is", max_tokens=24, **ON).answer().token_ids
    with single.client() as client, single.client() as second:
        tries = 0
        while (model := client.status().models[0]).suspensions == 0:
            tries += 1
            assert tries <= 5, "the other one never had the only place"
            stream = tokens_of(client.generate("The sea is", max_tokens=24, priority=-5, **ON))
            tokens = [next(stream) for _ in range(5)]
            rest = threading.Thread(target=tokens.extend, args=(stream,))
            rest.start()
            # Where this comes late, the answer has ended, and it is tried again.
            assert len(second.generate("Hello", max_tokens=8, priority=5, **ON).answer().token_ids) == 8
            rest.join()
            assert tuple(tokens) == expected
        assert model.host_pages == model.host_pages_free > 0
        assert any(row.name == "suspended sequences" for row in client.status().ledger.rows)
    assert single.stop() == 0
