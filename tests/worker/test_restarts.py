from __future__ import annotations

from edged.worker.restarts import (
    DELAYS,
    STABLE_SECONDS,
    WINDOW_RESTARTS,
    WINDOW_SECONDS,
    RestartPolicy,
)


def test_the_first_restart_is_at_once_and_the_last_is_none():
    policy = RestartPolicy()
    assert [policy.next_delay(0.0) for _ in range(len(DELAYS) + 1)] == [*DELAYS, None]
    assert DELAYS[0] == 0.0


def test_an_engine_that_served_long_begins_the_count_anew():
    policy = RestartPolicy()
    for _ in DELAYS:
        policy.next_delay(1.0)
    assert policy.next_delay(STABLE_SECONDS) == 0.0
    assert policy.next_delay(0.0) == DELAYS[1]


def test_an_engine_that_dies_every_minute_ends_as_a_crash_loop_too():
    now = [0.0]
    policy = RestartPolicy(lambda: now[0])
    for _ in range(WINDOW_RESTARTS):
        assert policy.next_delay(60.0) == 0.0
        now[0] += 60.0
    assert policy.next_delay(60.0) is None
    assert policy.describe() == "the engine ended 13 times within 60 minutes"
    now[0] += WINDOW_SECONDS
    assert policy.next_delay(60.0) == 0.0
