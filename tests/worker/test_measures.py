from __future__ import annotations

import random

import pytest

from edged.worker.measures import WINDOW_SECONDS, Histogram, Rate


@pytest.mark.parametrize("scale", [1e-4, 0.03, 20.0])
def test_percentiles_are_right_to_two_percent(scale):
    values = sorted(scale * random.Random(1).lognormvariate(0, 0.7) for _ in range(5000))
    histogram = Histogram()
    for value in values:
        histogram.add(value, 1.0)
    found = histogram.percentiles()
    for part, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert value == pytest.approx(values[int(part * len(values)) - 1], rel=0.021)
    assert found.most == values[-1]
    assert found.count == 5000


def test_what_is_old_no_longer_counts():
    histogram = Histogram()
    histogram.add(10.0, 1.0)
    histogram.add(0.1, 1.0 + WINDOW_SECONDS)
    assert histogram.percentiles().most == 10.0
    histogram.add(0.1, 2.0 + 2 * WINDOW_SECONDS)
    assert histogram.percentiles().most == 0.1
    assert histogram.percentiles().count == 3
    histogram.add(0.2, 9.0 + 9 * WINDOW_SECONDS)
    assert histogram.percentiles().p99 == pytest.approx(0.2, rel=0.02)
    assert histogram.percentiles().p50 == pytest.approx(0.2, rel=0.02)


def test_nothing_and_extremes():
    assert Histogram().percentiles().count == 0
    histogram = Histogram()
    for value in (0.0, 1e-9, 1e9):
        histogram.add(value, 1.0)
    assert histogram.percentiles().most == 1e9
    assert histogram.percentiles().p50 <= 1e-5


def test_a_rate_is_of_the_last_seconds():
    rate = Rate()
    for step in range(100):
        rate.add(5, 100 + step / 10)
    assert rate.per_second(110.0) == pytest.approx(50, rel=0.15)
    assert rate.per_second(115.0) < 40
    assert rate.per_second(130.0) == 0.0
    rate.add(3, 200.0)
    assert rate.per_second(200.5) == pytest.approx(6, rel=0.3)
