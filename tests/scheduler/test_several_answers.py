from __future__ import annotations

import pytest
from hand_stepped import HandStepped

from edged.errors import InvalidArgumentError, ResourceExhaustedError


def answers(bench, count, **options):
    return [bench.request(f"n-{index}", [1] * 70, 4, **options) for index in range(count)]


def test_answers_to_one_prompt_are_refused_together_and_put_nobody_aside():
    bench = HandStepped(max_sequences=2, queue=0, host_pages=16)
    bench.submit("low", [2], 40, priority=-5)
    bench.submit("high", [3], 40, priority=9)
    bench.step()
    with pytest.raises(ResourceExhaustedError, match="2 answers"):
        bench.scheduler.submit_all(answers(bench, 2), bench.now)
    assert [r.request_id for r in bench.scheduler.running] == ["low", "high"]
    assert bench.scheduler.suspensions == 0
    bench.run()


def test_answers_that_fit_start_and_the_others_wait():
    bench = HandStepped(max_sequences=2, queue=1)
    bench.scheduler.submit_all(answers(bench, 3), bench.now)
    assert (len(bench.scheduler.running), len(bench.scheduler.queue)) == (2, 1)
    bench.run()
    assert len(bench.tokens) == 3


@pytest.mark.parametrize("shape", [{"max_sequences": 2, "queue": 1}, {"pages": 4, "queue": 1}])
def test_more_answers_than_an_idle_model_takes_are_refused_for_good(shape):
    bench = HandStepped(**shape)
    with pytest.raises(InvalidArgumentError, match=r"sampling.n is 4"):
        bench.scheduler.submit_all(answers(bench, 4), bench.now)
    assert not bench.scheduler.has_work
