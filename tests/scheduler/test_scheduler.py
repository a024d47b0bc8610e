from __future__ import annotations

import pytest
from fake_executor import generate
from hand_stepped import HandStepped

from edged.decoding.sampling import Sampling
from edged.errors import InvalidArgumentError, ResourceExhaustedError
from edged.executor.base import ExecutorLimits
from edged.scheduler.scheduler import Scheduler


def test_a_request_alone_gets_its_tokens_and_leaves_no_page_behind():
    bench = HandStepped(prefill_chunk=7)
    prompt = list(range(1, 100))
    request = bench.submit("a", prompt, 70)
    bench.run()
    assert bench.tokens["a"] == generate(prompt, 70, 97)
    assert request.steps == 15 + 69  # 99 prompt tokens in pieces of 7; the last piece draws the first token
    assert bench.scheduler.pool.pages_free == 32
    assert not bench.scheduler.has_work


def test_a_prompt_shares_steps_with_streams_that_run():
    bench = HandStepped(prefill_chunk=16, max_step_tokens=32)
    bench.submit("stream", [1, 2, 3], 12)
    bench.step()
    bench.submit("long", list(range(60)), 2)
    bench.executor.batches.clear()
    for _ in range(4):
        bench.step()
    assert bench.executor.batches == [(2, 17), (2, 17), (2, 17), (2, 13)]
    assert len(bench.tokens["stream"]) == 5, "the stream had a token in every step"
    bench.run()
    assert bench.tokens["long"] == generate(range(60), 2, 97)


def test_several_prompts_fill_one_step():
    bench = HandStepped(prefill_chunk=32)
    for name in "abc":
        bench.submit(name, [ord(name)] * 10)
    bench.step()
    assert bench.executor.batches == [(3, 30)]


def test_a_step_never_holds_more_than_the_executor_takes():
    bench = HandStepped(max_step_tokens=8, max_sequences=4, prefill_chunk=100)
    for name in "abcd":
        bench.submit(name, [ord(name)] * 30, 9)
    bench.run()
    assert max(tokens for _, tokens in bench.executor.batches) == 8


def test_admission_counts_the_worst_case_and_nobody_overtakes():
    bench = HandStepped(pages=4)
    bench.submit("a", [1] * 64, 64)  # 2 pages
    bench.submit("big", [2] * 64, 129)  # 4 pages
    small = bench.submit("small", [3], 4)
    assert [r.request_id for r in bench.scheduler.running] == ["a"]
    assert [r.request_id for r in bench.scheduler.queue] == ["big", "small"]
    assert small.table is None
    bench.run()
    assert bench.tokens["small"] == generate([3], 4, 97)


def test_max_sequences_bounds_who_runs():
    bench = HandStepped(max_sequences=2)
    for name in "abc":
        bench.submit(name, [1], 3)
    assert len(bench.scheduler.running) == 2
    bench.run()
    assert max(sequences for sequences, _ in bench.executor.batches) == 2


def test_a_queue_of_no_places_takes_what_can_start_at_once():
    bench = HandStepped(max_sequences=1, queue=0)
    bench.submit("a", [1], 1)
    with pytest.raises(ResourceExhaustedError, match="the queue holds 0"):
        bench.submit("b", [1], 1)
    bench.step()
    bench.submit("b", [1], 1)
    bench.run()
    assert set(bench.tokens) == {"a", "b"}


def test_a_refusal_names_a_time_that_follows_from_the_requests_before():
    bench = HandStepped(max_sequences=1, queue=0)
    bench.submit("a", [1], 8)
    bench.run()
    bench.submit("b", [1], 8)
    with pytest.raises(ResourceExhaustedError) as info:
        bench.submit("c", [1], 8)
    assert info.value.retry_seconds == 8.0  # a step of the bench takes a second


def test_cancelling_frees_pages_before_the_next_step_in_every_state():
    bench = HandStepped(max_sequences=2, prefill_chunk=16)
    bench.submit("prefills", [1] * 100, 4)
    bench.submit("decodes", [2], 50)
    bench.submit("waits", [3], 4)
    for _ in range(8):
        bench.step()
    assert bench.scheduler.cancel("prefills").request_id == "prefills"
    assert bench.scheduler.cancel("waits").request_id == "waits"
    assert bench.scheduler.pool.pages_used == 1
    bench.scheduler.check()
    assert bench.scheduler.cancel("decodes") is not None
    assert bench.scheduler.cancel("decodes") is None
    assert bench.scheduler.pool.pages_free == 32
    assert bench.scheduler.next_batch(0.0) is None


def test_a_cancelled_place_goes_to_who_waits_in_the_next_step():
    bench = HandStepped(max_sequences=1)
    bench.submit("a", [1], 50)
    bench.submit("b", [2], 2)
    bench.step()
    bench.scheduler.cancel("a")
    bench.step()
    assert bench.tokens["b"] == generate([2], 1, 97)
    assert bench.order == ["a", "b"]


def test_a_request_that_ends_before_its_first_step_never_started():
    bench = HandStepped()
    bench.submit("a", [1])
    bench.scheduler.cancel("a")
    bench.submit("late", [1], deadline=0.5)
    bench.step()
    assert bench.order == []


def test_a_deadline_drops_running_and_waiting_requests():
    bench = HandStepped(max_sequences=1)
    bench.submit("runs", [1], 50, deadline=3.0)
    bench.submit("waits", [2], 50, deadline=2.0)
    bench.submit("stays", [3], 2, deadline=100.0)
    assert bench.step() == []
    assert [r.request_id for r in bench.step()] == ["waits"]
    assert [r.request_id for r in bench.step()] == ["runs"]
    bench.run()
    assert bench.tokens["stays"] == generate([3], 2, 97)
    assert bench.scheduler.pool.pages_free == 32


def test_priority_decides_who_starts_next():
    bench = HandStepped(max_sequences=1)
    for name, priority in (("first", 0), ("low", -1), ("high", 7), ("second", 0)):
        bench.submit(name, [1], 2, priority=priority)
    bench.run()
    assert bench.order == ["first", "high", "second", "low"]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        ([], 4, "the prompt has no tokens"),
        ([1] * 1000, 25, r"1000 tokens and max_tokens is 25: together at most 1024 \(context_length\)"),
        ([1] * 500, 500, "16 pages: the pool has 8"),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(prompt, max_tokens, words):
    bench = HandStepped(pages=8)
    with pytest.raises(InvalidArgumentError, match=words):
        bench.submit("a", prompt, max_tokens)
    assert not bench.scheduler.has_work


def test_a_name_in_use_is_refused():
    bench = HandStepped()
    bench.submit("a", [1])
    with pytest.raises(InvalidArgumentError, match="request id a is in use"):
        bench.submit("a", [1])


def test_an_executor_that_cannot_decode_all_its_sequences_is_refused():
    with pytest.raises(ValueError, match="a step of 3 tokens cannot decode 4 sequences"):
        Scheduler(ExecutorLimits(3, 4, 128, 8, 10), prefill_chunk=1, queue_capacity=1)


def test_a_seeded_request_draws_by_its_own_positions():
    bench = HandStepped(prefill_chunk=3)
    sampling = Sampling(temperature=0.7, seed=2**64 - 1)
    bench.submit("other", [4] * 20, 30)
    bench.submit("a", [5] * 20, 30, sampling=sampling)
    bench.run()
    assert bench.tokens["a"] == generate([5] * 20, 30, 97, seed=2**64 - 1, temperature=0.7)
