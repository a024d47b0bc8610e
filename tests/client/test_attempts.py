"""When a call that failed is sent again, and when not."""

from __future__ import annotations

import pytest

from edged.client.attempts import Attempts
from edged.errors import (
    DeadlineError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
    UnreachableError,
)

REFUSED = UnavailableError("it loads", retry_seconds=30.0)
LOST = UnavailableError("the engine hung", retry_seconds=3.0, lost=True)
BROKEN = UnavailableError("the connection broke")


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_refusal_is_asked_about_again_and_again_ever_more_slowly():
    attempts = Attempts(None, patient=True)
    assert attempts.left() is None
    pauses = [attempts.pause(REFUSED) for _ in range(50)]
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert set(pauses[4:]) == {1.0}


@pytest.mark.parametrize("first", [LOST, BROKEN, UnreachableError("no such socket")])
@pytest.mark.parametrize("second", [LOST, BROKEN])
def test_a_call_that_was_under_way_is_sent_a_second_time_and_no_third(first, second):
    attempts = Attempts(None, patient=True)
    attempts.pause(REFUSED)
    attempts.pause(first)
    attempts.pause(REFUSED)
    with pytest.raises(UnavailableError) as caught:
        attempts.pause(second)
    assert caught.value is second


@pytest.mark.parametrize(
    "error", [InternalError("a step failed"), ResourceExhaustedError("full", retry_seconds=1.0)]
)
def test_what_would_end_the_same_way_is_not_sent_again(error):
    with pytest.raises(type(error)):
        Attempts(None, patient=True).pause(error)


@pytest.mark.parametrize("error", [REFUSED, LOST])
def test_a_client_that_does_not_wait_hears_the_first_word(error):
    with pytest.raises(UnavailableError) as caught:
        Attempts(60.0, patient=False).pause(error)
    assert caught.value is error


def test_all_tries_have_one_deadline():
    clock = Clock()
    attempts = Attempts(10.0, patient=True, clock=clock)
    assert attempts.left() == 10
    clock.now += 4
    assert attempts.left() == 6
    attempts.pause(LOST)
    clock.now += 5.95
    assert attempts.pause(REFUSED) == pytest.approx(0.05), "not beyond the end"
    clock.now += 0.1
    assert attempts.left() == 0
    with pytest.raises(DeadlineError, match="within the timeout of 10 s: it loads"):
        attempts.pause(REFUSED)
    with pytest.raises(DeadlineError, match="within the timeout of 10 s: it loads"):
        attempts.pause(DeadlineError("gRPC's own word, which says less"))
    with pytest.raises(DeadlineError, match="the only word"):
        Attempts(1.0, patient=True).pause(DeadlineError("the only word"))


def test_patience_begins_with_the_first_failure():
    clock = Clock()
    attempts = Attempts(None, patient=True, patience=5.0, clock=clock)
    clock.now += 1000
    attempts.pause(REFUSED)
    clock.now += 4
    attempts.pause(REFUSED)
    clock.now += 1
    with pytest.raises(UnavailableError) as caught:
        attempts.pause(REFUSED)
    assert caught.value is REFUSED
