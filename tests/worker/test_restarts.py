from __future__ import annotations

from edged.worker.restarts import DELAYS, STABLE_SECONDS, RestartPolicy


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
