"""Random schedules, and what must hold of each: every request gets the tokens it gets alone, and nothing is left over."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hand_stepped import HandStepped
from hypothesis import strategies as st

from edged.decoding.sampling import Sampling
from edged.errors import DeadlineError, InvalidArgumentError, ResourceExhaustedError

VOCABULARY = 97
CONTEXT = 256
TEXTS = [[(7 * i * i + 3 * i + which) % VOCABULARY for i in range(CONTEXT)] for which in range(3)]
"""Prompts begin with pieces of these, so that they have prefixes in common."""


@dataclass(frozen=True)
class Arrival:
    at: int  # steps before it arrives
    text: int
    common: int  # tokens of the text that it begins with
    own: list[int]
    max_tokens: int
    priority: int
    cancel_in: int | None
    deadline_in: int | None
    temperature: float
    tenant: str
    session: str

    @property
    def prompt(self):
        return [*TEXTS[self.text][: self.common], *self.own]


def draw_schedule(seed):
    """A schedule and its surroundings out of a seed: on the whole fuller ones than hypothesis makes."""
    r = random.Random(seed)
    schedule = [
        Arrival(
            at=r.randint(0, 12),
            text=r.choice([0, 0, 1]),
            common=r.choice([r.randint(0, 40), r.randint(60, 180)]),
            own=[r.randrange(VOCABULARY) for _ in range(r.randint(1, 40))],
            max_tokens=r.randint(1, 70),
            priority=r.randint(-2, 2),
            cancel_in=r.choice([None, None, r.randint(0, 40)]),
            deadline_in=r.choice([None, None, r.randint(0, 60)]),
            temperature=r.choice([0.0, 0.8]),
            tenant=r.choice(["", "", "", "b"]),
            session=r.choice(["", "", "s", "t"]),
        )
        for _ in range(r.randint(2, 10))
    ]
    shape = {
        "prefill_chunk": r.randint(1, 80),
        "max_sequences": r.randint(1, 4),
        "pages": r.randint(4, 12),
        "caches": r.random() < 0.8,
        "session_pages": r.randint(0, 6),
        "host_pages": r.choice([0, 2, 4, 16]),
        "queue": r.choice([2, 64]),
        "aging": r.choice([0.5, 10.0, 1000.0]),
        "prefill_share": r.choice([0.3, 1.0]),
    }
    return schedule, shape, r.randint(0, 64)


arrivals = st.lists(
    st.builds(
        Arrival,
        at=st.integers(0, 12),
        text=st.integers(0, 2),
        common=st.integers(0, 180),
        own=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40),
        max_tokens=st.integers(1, 70),
        priority=st.integers(-2, 2),
        cancel_in=st.one_of(st.none(), st.integers(0, 40)),
        deadline_in=st.one_of(st.none(), st.integers(0, 60)),
        temperature=st.sampled_from([0.0, 0.8]),
        tenant=st.sampled_from(["", "", "b"]),
        session=st.sampled_from(["", "", "s", "t"]),
    ),
    min_size=1,
    max_size=10,
)

shapes = st.fixed_dictionaries(
    {
        "prefill_chunk": st.integers(1, 80),
        "max_sequences": st.integers(1, 4),
        "pages": st.integers(4, 12),
        "caches": st.booleans(),
        "session_pages": st.integers(0, 6),
        "host_pages": st.sampled_from([0, 2, 4, 16]),
        "queue": st.sampled_from([2, 64]),
        "aging": st.sampled_from([0.5, 10.0, 1000.0]),
        "prefill_share": st.sampled_from([0.3, 1.0]),
    }
)
extra_tokens = st.integers(0, 64)


class Run:
    """One schedule on one bench.

    Args:
        schedule: The requests.
        shape: Arguments of `HandStepped`.
        extra: Tokens that a step may hold beyond one for each sequence.
        executor: Made for `shape`; a fake one by default.
    """

    def __init__(self, schedule, shape, extra, executor=None, speculator=None):
        self.schedule = schedule
        self.pages = shape["pages"]
        self.bench = HandStepped(
            **shape,
            max_step_tokens=shape["max_sequences"] + extra,
            context=CONTEXT,
            executor=executor,
            speculator=speculator,
            # Odd times, so that the pace cuts prompts in odd ways.
            step_seconds=lambda streams, tokens: 1.0 + 0.01 * streams + 0.037 * tokens,
        )
        self.cancels = {}
        self.dropped = set()

    def submit(self, index, time):
        bench, arrival, name = self.bench, self.schedule[index], str(index)
        try:
            bench.submit(
                name,
                arrival.prompt,
                arrival.max_tokens,
                priority=arrival.priority,
                deadline=None if arrival.deadline_in is None else bench.now + arrival.deadline_in,
                sampling=Sampling(temperature=arrival.temperature, seed=index),
                tenant=arrival.tenant,
                session=arrival.session,
                least_tokens=arrival.max_tokens,
            )
        except InvalidArgumentError:
            tokens = len(arrival.prompt) + arrival.max_tokens
            extra = bench.holdings._extra
            assert tokens > CONTEXT or tokens + extra > 64 * self.pages
        except ResourceExhaustedError:
            assert bench.scheduler.queue.is_full
        except DeadlineError:
            assert arrival.deadline_in is not None
        else:
            if arrival.cancel_in is not None:
                self.cancels[name] = time + arrival.cancel_in
            return
        self.dropped.add(name)

    def cancel(self, time):
        for name, when in list(self.cancels.items()):
            if when <= time:
                del self.cancels[name]
                if self.bench.scheduler.cancel(name, self.bench.now) is not None:
                    self.dropped.add(name)
                    self.bench.scheduler.check()

    def run(self):
        bench = self.bench
        todo = sorted(range(len(self.schedule)), key=lambda index: self.schedule[index].at)
        for time in range(10_000):
            while todo and self.schedule[todo[0]].at <= time:
                self.submit(todo.pop(0), time)
            self.cancel(time)
            before = bench.now
            self.dropped |= {r.request_id for r in bench.step() if r.answer.finish is None}
            if bench.now == before:
                bench.now += 1.0
            if not todo and not bench.scheduler.has_work:
                return
        raise AssertionError("the requests do not end")

    def check_answers(self, alone):
        for index, arrival in enumerate(self.schedule):
            got = self.bench.tokens.get(str(index), [])
            expected = alone(arrival.prompt, arrival.max_tokens, Sampling(arrival.temperature, seed=index))
            if str(index) in self.dropped:
                assert got == expected[: len(got)]
            else:
                assert got == expected

    def check_nothing_is_left(self):
        scheduler, holdings = self.bench.scheduler, self.bench.holdings
        assert scheduler.pool.pages_free == self.pages - holdings.sessions.pages_pinned
        while len(holdings.sessions):
            holdings.sessions.drop_quietest()
        assert scheduler.pool.pages_free == self.pages
        assert not scheduler.pool.owners().any()
        assert holdings.host.slots_free == holdings.host.slots
        holdings.cache.clear()
        assert len(holdings.cache) == 0
        scheduler.check()


def check(schedule, shape, extra, alone, *, executor=None, speculator=None):
    """Drive one schedule and hold it; return its bench.

    Args:
        schedule: The requests.
        shape: Arguments of `HandStepped`.
        extra: Tokens that a step may hold beyond one for each sequence.
        alone: (prompt, count, sampling) to the tokens of a request that is alone.
        executor: Made for `shape`; a fake one by default.
        speculator: Drafts for the requests; none by default.
    """
    run = Run(schedule, shape, extra, executor, speculator)
    run.run()
    run.check_answers(alone)
    run.check_nothing_is_left()
    return run.bench
