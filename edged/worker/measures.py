"""Running figures in fixed memory: percentiles of the last minutes, and tokens a second of the last seconds."""

from __future__ import annotations

import bisect
import math

import msgspec

_FIRST = 1e-5
"""Upper bound of the first bucket, in seconds."""
_GROWTH = 1.04
"""Each bucket's bound over that of the one before: a percentile is right to 2 %."""
_BUCKETS = math.ceil(math.log(1e4 / _FIRST) / math.log(_GROWTH)) + 1
_BOUNDS = [_FIRST * _GROWTH**index for index in range(_BUCKETS)]
WINDOW_SECONDS = 120.0
"""Percentiles cover at least this time, and at most twice of it."""


class Percentiles(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a histogram says. Unit: seconds."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    most: float = 0.0
    count: int = 0
    """Values seen since the engine started."""


class Histogram:
    """Seconds in buckets of equal ratio (as DDSketch, arXiv 1908.10693), in two halves of which the older is dropped."""

    def __init__(self) -> None:
        self._count = 0
        self._begun = 0.0
        self._new, self._old = [0] * (_BUCKETS + 1), [0] * (_BUCKETS + 1)
        self._most_new = self._most_old = 0.0

    def add(self, seconds: float, now: float) -> None:
        """Take one value.

        Args:
            seconds: It.
            now: Seconds of ``time.monotonic()``.
        """
        if now - self._begun >= WINDOW_SECONDS:
            # After a longer silence neither half says anything about now.
            stale = now - self._begun >= 2 * WINDOW_SECONDS
            self._old = [0] * (_BUCKETS + 1) if stale else self._new
            self._most_old = 0.0 if stale else self._most_new
            self._new, self._most_new = [0] * (_BUCKETS + 1), 0.0
            self._begun = now
        self._new[bisect.bisect_left(_BOUNDS, seconds)] += 1
        self._most_new = max(self._most_new, seconds)
        self._count += 1

    def percentiles(self) -> Percentiles:
        """Of the values of the last minutes before the last value."""
        counts = [new + old for new, old in zip(self._new, self._old, strict=True)]
        total = sum(counts)
        most = max(self._most_new, self._most_old)
        if not total:
            return Percentiles(count=self._count)
        wanted = [math.ceil(total * part) for part in (0.5, 0.9, 0.99)]
        found: list[float] = []
        seen = 0
        for index, count in enumerate(counts):
            seen += count
            while len(found) < len(wanted) and seen >= wanted[len(found)]:
                found.append(min(most, _middle(index)))
            if len(found) == len(wanted):
                break
        p50, p90, p99 = found
        return Percentiles(p50, p90, p99, most, self._count)


def _middle(bucket: int) -> float:
    """The value that stands for a bucket."""
    bound = _BOUNDS[min(bucket, _BUCKETS - 1)]
    return bound * 2 / (1 + _GROWTH) if bucket else bound


class Rate:
    """Units a second over the last seconds."""

    SECONDS = 10

    def __init__(self) -> None:
        self._counts = [0] * self.SECONDS
        self._second = 0
        self._first = math.inf

    def add(self, units: int, now: float) -> None:
        """Count ``units`` at ``now``, seconds of ``time.monotonic()``."""
        self._advance(now)
        self._counts[self._second % self.SECONDS] += units
        self._first = min(self._first, now)

    def per_second(self, now: float) -> float:
        """Units a second, over as much of the last seconds as there has been anything."""
        self._advance(now)
        total = sum(self._counts)
        if not total:
            self._first = math.inf
            return 0.0
        covered = min(now - self._first, self.SECONDS - 1 + now % 1.0)
        return total / max(covered, 0.1)

    def _advance(self, now: float) -> None:
        second = int(now)
        for passed in range(max(self._second + 1, second - self.SECONDS + 1), second + 1):
            self._counts[passed % self.SECONDS] = 0
        self._second = max(self._second, second)


class StepBucket(msgspec.Struct, frozen=True):
    """Steps of about one size, since the engine started."""

    tokens: int
    """Most tokens that a step of this bucket has: a power of two."""
    count: int
    seconds: float


class StepTimes:
    """Time of steps by how many tokens they had, in buckets of powers of two."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._seconds: dict[int, float] = {}

    def add(self, tokens: int, seconds: float) -> None:
        """Take one step."""
        bucket = 1 << max(tokens - 1, 0).bit_length()
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self._seconds[bucket] = self._seconds.get(bucket, 0.0) + seconds

    def buckets(self) -> tuple[StepBucket, ...]:
        """What was taken, the smallest steps first."""
        return tuple(
            StepBucket(bucket, count, self._seconds[bucket]) for bucket, count in sorted(self._counts.items())
        )


class SpeedBook:
    """What one model's requests have seen so far."""

    def __init__(self) -> None:
        self.first_token = Histogram()
        self.between_messages = Histogram()
        self.per_token = Histogram()
        self.queue = Histogram()
        self.prompt = Rate()
        self.generated = Rate()
        self.steps = StepTimes()
