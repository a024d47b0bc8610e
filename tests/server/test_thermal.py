"""A hot board slows admission, says so, and lets everybody through once it has cooled."""

from __future__ import annotations

import asyncio
import time

import pytest

from edged.config import ThermalConfig
from edged.errors import DeadlineError, ResourceExhaustedError
from edged.jetson import Board
from edged.server.thermal import ThermalGate

HOT, EDGE, COOL = Board(thermal_margin=2.0), Board(thermal_margin=4.0), Board(thermal_margin=40.0)


def gate(*, margin=3, max_requests=1, capacity=4, look=None, queued=0):
    return ThermalGate(ThermalConfig(margin, max_requests), capacity, look, lambda _: queued)


async def hold(gate, running, release, deadline=None, model="m"):
    async with gate.place(model, deadline):
        running.append(1)
        await release.wait()
        running.pop()


def test_a_hot_board_runs_few_at_once_and_a_cool_one_all():
    async def main():
        ours, release, running = gate(), asyncio.Event(), []
        ours.note(HOT)
        assert ours.capped
        tasks = [asyncio.ensure_future(hold(ours, running, release)) for _ in range(4)]
        await asyncio.sleep(0.05)
        assert len(running) == 1
        assert "2.0 °C below throttling" in ours.notice
        assert "3 wait" in ours.notice
        assert (ours.waiting("m"), ours.waiting("other")) == (3, 0)
        ours.note(EDGE)
        await asyncio.sleep(0.05)
        assert len(running) == 1, "at its edge it does not flap"
        ours.note(COOL)
        await asyncio.sleep(0.05)
        assert len(running) == 4
        assert ours.notice == ""
        assert ours.waiting("m") == 0
        release.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_the_queue_has_its_places_for_each_model_here_and_in_the_engine_together():
    async def main():
        ours, release, running = gate(capacity=3, queued=2), asyncio.Event(), []
        ours.note(HOT)
        tasks = [asyncio.ensure_future(hold(ours, running, release)) for _ in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(ResourceExhaustedError, match="3 requests wait for model m") as caught:
            await hold(ours, running, release)
        assert caught.value.field == "queue.capacity"
        tasks.append(asyncio.ensure_future(hold(ours, running, release, model="other")))
        await asyncio.sleep(0.01)
        assert (ours.waiting("m"), ours.waiting("other"), len(running)) == (1, 1, 1)
        release.set()
        await asyncio.gather(*tasks)
        assert (ours.waiting("m"), ours.waiting("other")) == (0, 0)

    asyncio.run(main())


def test_one_after_the_other_while_it_stays_hot():
    async def main():
        ours, running, most = gate(max_requests=2), [], []
        ours.note(HOT)

        async def work():
            async with ours.place("m", None):
                running.append(1)
                most.append(len(running))
                await asyncio.sleep(0.01)
                running.pop()

        await asyncio.gather(*(work() for _ in range(6)))
        assert max(most) == 2
        assert len(most) == 6

    asyncio.run(main())


def test_who_waits_has_a_bound_and_a_deadline():
    async def main():
        ours, release, running = gate(capacity=1), asyncio.Event(), []
        ours.note(HOT)
        first = asyncio.ensure_future(hold(ours, running, release))
        await asyncio.sleep(0.01)
        late = asyncio.ensure_future(hold(ours, running, release, time.monotonic() + 0.1))
        await asyncio.sleep(0.01)
        with pytest.raises(ResourceExhaustedError, match="the board is hot") as caught:
            await hold(ours, running, release)
        assert caught.value.retry_seconds > 0
        with pytest.raises(DeadlineError, match="for the board to cool"):
            await late
        release.set()
        await first
        await asyncio.wait_for(hold(ours, running, release), 1)

    asyncio.run(main())


@pytest.mark.parametrize("board", [None, Board(), COOL])
def test_without_a_cap_or_a_figure_nothing_is_hot(board):
    async def main():
        ours = gate()
        ours.note(board)
        assert not ours.capped
        uncapped = gate(max_requests=0)
        uncapped.note(HOT)
        assert not uncapped.capped
        assert uncapped.notice == ""

    asyncio.run(main())


def test_it_looks_by_itself_and_closing_lets_everybody_go():
    async def main():
        ours = gate(look=lambda: HOT)
        ours.start()
        await asyncio.sleep(0.5)
        assert ours.capped
        release, running = asyncio.Event(), []
        tasks = [asyncio.ensure_future(hold(ours, running, release)) for _ in range(2)]
        await asyncio.sleep(0.02)
        ours.close()
        await asyncio.sleep(0.02)
        assert len(running) == 2
        release.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())
