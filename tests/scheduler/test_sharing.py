"""Prefixes in the cache, sessions, fairness among prompts, suspended requests and deadlines, a case at a time."""

from __future__ import annotations

import pytest
from fake_executor import generate
from hand_stepped import HandStepped

from edged.errors import DeadlineError, ResourceExhaustedError


def text(which, tokens):
    return [(which * 17 + i * i) % 97 for i in range(tokens)]


def cached(**options):
    return HandStepped(caches=True, prefill_chunk=512, max_step_tokens=600, **options)


def test_a_prompt_that_was_there_is_not_computed_again_but_for_its_last_page():
    bench = cached()
    first = bench.submit("a", text(1, 200), 3)
    bench.run()
    again = bench.submit("b", text(1, 200), 3)
    bench.run()
    assert (first.cached_tokens, again.cached_tokens) == (0, 192)
    assert bench.executor.batches[0] == (1, 200)
    assert bench.tokens["b"] == bench.tokens["a"] == generate(text(1, 200), 3, 97)
    assert bench.holdings.cached_tokens == 192


def test_the_last_token_of_a_prompt_is_always_computed():
    bench = cached()
    bench.submit("a", text(1, 128), 1)
    bench.run()
    assert bench.submit("b", text(1, 128), 2).cached_tokens == 64
    bench.run()
    assert bench.tokens["b"] == generate(text(1, 128), 2, 97)


def test_an_answer_is_a_prefix_of_the_next_turn():
    bench = cached()
    bench.submit("a", text(1, 100), 60)
    bench.run()
    turn = [*text(1, 100), *bench.tokens["a"], 5, 6]
    assert bench.submit("b", turn, 2).cached_tokens == 128
    bench.run()
    assert bench.tokens["b"] == generate(turn, 2, 97)


def test_prompts_that_run_at_once_compute_their_common_pages_once():
    bench = cached()
    requests = [bench.submit(name, [*text(1, 256), ord(name)], 3) for name in "abc"]
    bench.run()
    assert sum(request.cached_tokens for request in requests) == 512
    assert bench.executor.batches[0] == (1, 257)
    for name in "abc":
        assert bench.tokens[name] == generate([*text(1, 256), ord(name)], 3, 97)


def test_who_waits_for_a_page_goes_on_when_its_maker_is_cancelled():
    bench = HandStepped(caches=True, prefill_chunk=16)
    bench.submit("a", text(1, 200), 3)
    bench.submit("b", text(1, 200), 3)
    bench.step()
    bench.scheduler.cancel("a")
    bench.run()
    assert bench.tokens["b"] == generate(text(1, 200), 3, 97)


def test_another_tenant_sees_nothing():
    bench = cached()
    bench.submit("a", text(1, 200), 1, tenant="alice", session="s")
    bench.run()
    assert bench.submit("b", text(1, 200), 1, tenant="bob", session="s").cached_tokens == 0
    assert bench.submit("c", text(1, 200), 1, tenant="alice").cached_tokens == 192
    bench.run()
    assert not bench.holdings.drop_session("carol", "s")


def test_what_is_used_least_goes_first():
    bench = cached(pages=8)
    bench.submit("a", text(1, 130), 1)  # pages of 1: two of them known afterwards
    bench.run()
    bench.submit("b", text(2, 130), 1)
    bench.run()
    bench.submit("a again", text(1, 130), 1)
    bench.run()
    bench.submit("big", text(3, 300), 10)  # 5 pages of 8: one of the 4 known ones must go
    bench.run()
    assert bench.submit("a now", text(1, 130), 1).cached_tokens == 128
    assert bench.submit("b now", text(2, 130), 1).cached_tokens == 64, "its end went first"


def test_a_session_keeps_its_pages_in_a_busy_pool_until_it_is_dropped():
    bench = cached(pages=8, session_pages=4)
    bench.submit("turn", text(1, 130), 1, session="chat")
    bench.run()
    for which in range(5, 9):
        bench.submit(f"noise {which}", text(which, 200), 20)
        bench.run()
    assert bench.holdings.sessions.pages_pinned == 2
    assert bench.scheduler.pool.pages_free == 6
    assert bench.submit("next turn", text(1, 130), 1, session="chat").cached_tokens == 128
    bench.run()
    assert bench.holdings.drop_session("", "chat")
    assert bench.scheduler.pool.pages_free == 8


def test_sessions_keep_no_more_than_their_share_and_the_quietest_goes():
    bench = cached(pages=16, session_pages=4)
    for which, name in enumerate(["old", "middle", "new"]):
        bench.submit(name, text(which, 130), 1, session=name)
        bench.run()
    assert [key[1] for key, _ in bench.holdings.sessions.items()] == ["new", "middle"]
    assert bench.holdings.sessions.pages_pinned == 4


def test_a_request_that_needs_what_sessions_keep_gets_it():
    bench = cached(pages=8, session_pages=7)
    bench.submit("chat", text(1, 400), 1, session="chat")
    bench.run()
    assert bench.holdings.sessions.pages_pinned == 6
    bench.submit("big", text(2, 450), 10)
    bench.run()
    assert bench.tokens["big"] == generate(text(2, 450), 10, 97)


def test_a_short_prompt_does_not_wait_for_a_long_one():
    bench = HandStepped(prefill_chunk=32, max_step_tokens=64, pages=32)
    bench.submit("long", text(1, 900), 2)
    bench.step()
    bench.submit("short", text(2, 40), 2)
    for _ in range(4):
        bench.step()
    assert "short" in bench.tokens
    assert "long" not in bench.tokens
    bench.run()


def test_a_stream_of_short_prompts_does_not_starve_a_long_one():
    bench = HandStepped(prefill_chunk=32, max_step_tokens=64, pages=64, max_sequences=8, queue=64)
    bench.submit("long", text(1, 640), 2)
    for index in range(200):
        bench.submit(f"short {index}", text(index, 16), 1)
        bench.step()
        if "long" in bench.tokens:
            break
    assert index <= 42, "half of each step is the long one's"


def suspending(**options):
    return HandStepped(host_pages=16, prefill_chunk=64, **options)


def test_a_higher_priority_takes_the_place_of_a_lower_one_which_comes_back_as_it_was():
    bench = suspending(max_sequences=1, pages=8)
    low = bench.submit("low", text(1, 100), 30)
    for _ in range(8):
        bench.step()
    had = list(bench.tokens["low"])
    memory = bench.executor.memory[low.table.pages].copy()
    bench.submit("high", text(2, 80), 3, priority=5)
    assert low.suspended
    assert bench.scheduler.queue.suspended == 1
    while "high" not in bench.tokens or len(bench.tokens["high"]) < 3:
        bench.step()
    assert bench.tokens["low"] == had
    bench.scheduler._admit(bench.now)
    stored = low.stored
    assert (
        bench.executor.memory[low.table.pages].reshape(-1)[:stored].tolist()
        == memory.reshape(-1)[:stored].tolist()
    )
    bench.run()
    assert bench.tokens["low"] == generate(text(1, 100), 30, 97)
    assert bench.order == ["low", "high"], "it started once"


def test_pages_are_taken_from_as_few_as_suffice_and_never_from_equals():
    bench = suspending(max_sequences=4, pages=6)
    bench.submit("equal", text(1, 60), 60, priority=5)  # 2 pages
    small = bench.submit("small", text(2, 60), 60, priority=0)  # 2 pages
    other = bench.submit("other", text(3, 60), 60, priority=1)  # 2 pages
    bench.step()
    bench.submit("high", text(4, 60), 60, priority=5)
    assert (small.suspended, other.suspended) == (True, False)
    bench.run()
    for which, name in enumerate(["equal", "small", "other", "high"], start=1):
        assert bench.tokens[name] == generate(text(which, 60), 60, 97)


def test_without_room_on_the_host_nobody_is_suspended():
    bench = HandStepped(host_pages=1, max_sequences=1, prefill_chunk=256, max_step_tokens=257)
    low = bench.submit("low", text(1, 150), 20)
    bench.step()
    bench.submit("high", text(2, 30), 3, priority=9)
    assert not low.suspended
    bench.run()
    assert bench.order == ["low", "high"]


def test_what_has_waited_long_is_left_alone():
    bench = suspending(max_sequences=1, aging=2.0)
    low = bench.submit("low", text(1, 30), 60)
    for _ in range(30):
        bench.step()
    bench.submit("high", text(2, 30), 3, priority=9)
    assert not low.suspended, "30 s of age weigh more than 9 steps of priority"
    bench.run()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_suspended_request_that_ends_leaves_the_host_memory(how):
    bench = suspending(max_sequences=1)
    low = bench.submit("low", text(1, 100), 30, deadline=12.0 if how == "deadline" else None)
    for _ in range(4):
        bench.step()
    bench.submit("high", text(2, 80), 20, priority=5)
    assert low.suspended
    assert bench.holdings.host.slots_free == 14
    if how == "cancel":
        bench.scheduler.cancel("low")
    else:
        while bench.now < 13:
            bench.step()
    assert bench.holdings.host.slots_free == 16
    bench.run()


def timed(**options):
    def cost(streams, tokens):
        return 0.010 * (streams > 0) + 0.001 * tokens

    return HandStepped(
        prefill_chunk=64, max_step_tokens=80, pages=64, context=2000, step_seconds=cost, **options
    )


def warm(bench):
    bench.submit("warm", text(9, 100), 20)
    bench.run()
    return bench


def test_before_anything_was_measured_no_deadline_is_refused():
    bench = timed()
    bench.submit("a", text(1, 1000), 1, deadline=0.001)


def test_a_prompt_that_takes_longer_than_its_deadline_is_refused_with_the_estimate():
    bench = warm(timed())
    with pytest.raises(DeadlineError, match=r"leaves 0\.50 s and the first token is expected after 1\.0"):
        bench.submit("a", text(1, 1000), 100, deadline=bench.now + 0.5)
    assert not bench.scheduler.has_work
    bench.submit("b", text(1, 1000), 100, deadline=bench.now + 1.5)


def test_an_answer_of_certain_length_must_fit_too():
    bench = warm(timed())
    bench.submit("may end early", text(1, 50), 500, deadline=bench.now + 1.0)
    bench.scheduler.cancel("may end early")
    with pytest.raises(DeadlineError, match="the answer of 500 tokens is expected after"):
        bench.submit("cannot", text(1, 50), 500, deadline=bench.now + 1.0, least_tokens=500)


def test_who_is_ahead_counts():
    bench = warm(timed(max_sequences=1))
    bench.submit("runs", text(1, 100), 20)
    bench.submit("waits", text(2, 100), 20)
    alone = 0.1
    with pytest.raises(DeadlineError, match=r"behind 1 waiting and 1 running requests"):
        bench.submit("late", text(3, 100), 20, deadline=bench.now + 3 * alone)
    bench.submit("in time", text(3, 100), 20, deadline=bench.now + 10 * alone)
    bench.run()
    assert len(bench.tokens["in time"]) == 20


def test_a_cached_prompt_meets_a_deadline_that_a_new_one_would_not():
    bench = warm(timed(caches=True))
    bench.submit("a", text(1, 1000), 1)
    bench.run()
    bench.submit("b", text(1, 1000), 1, deadline=bench.now + 0.2)
    bench.run()
    assert bench.tokens["b"] == bench.tokens["a"]


def test_a_full_queue_names_its_length_and_when_the_next_place_is_free():
    bench = warm(timed(max_sequences=1, queue=2))
    bench.submit("runs", text(1, 100), 20)
    for name in "ab":
        bench.submit(name, text(2, 100), 20)
    with pytest.raises(ResourceExhaustedError, match="2 requests wait and the queue holds 2") as info:
        bench.submit("c", text(3, 100), 20)
    # 100 prompt tokens and an answer of the usual 20 tokens lie before the first of the two.
    assert info.value.retry_seconds == pytest.approx(0.3, rel=0.2)


def test_a_higher_priority_request_finds_a_place_though_the_queue_is_full():
    bench = suspending(max_sequences=1, queue=0)
    bench.submit("low", text(1, 30), 30)
    bench.step()
    bench.submit("high", text(2, 30), 3, priority=1)
    bench.run()
    assert bench.tokens["low"] == generate(text(1, 30), 30, 97)
