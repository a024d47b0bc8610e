from __future__ import annotations

import pytest

from edged.errors import ResourceExhaustedError
from edged.scheduler.queue import WaitingQueue


class Item:
    def __init__(self, name, priority=0, order=0):
        self.name, self.priority, self.order = name, priority, order


def names(queue):
    return "".join(item.name for item in queue)


def test_higher_priority_goes_first_and_then_the_earlier_arrival():
    queue = WaitingQueue(8)
    for order, (name, priority) in enumerate([("a", 0), ("b", 5), ("c", 0), ("d", -3), ("e", 5)]):
        queue.push(Item(name, priority, order), 1.0)
    assert names(queue) == "beacd"
    assert queue.next.name == "b"
    assert [queue.pop().name for _ in range(5)] == list("beacd")
    assert queue.next is None


def test_one_more_than_capacity_is_refused_with_the_numbers_and_a_time():
    queue = WaitingQueue(2)
    queue.push(Item("a", 0, 0), 1.0)
    queue.push(Item("b", 0, 1), 1.0)
    with pytest.raises(
        ResourceExhaustedError, match=r"2 requests wait and the queue holds 2 \(queue.capacity\)"
    ) as info:
        queue.push(Item("c", 9, 2), 2.5)
    assert info.value.retry_seconds == 2.5
    assert names(queue) == "ab"


def test_a_waiting_request_leaves_from_any_place():
    queue = WaitingQueue(4)
    items = [Item(name, 0, order) for order, name in enumerate("abc")]
    for item in items:
        queue.push(item, 1.0)
    queue.remove(items[1])
    assert names(queue) == "ac"
    assert len(queue) == 2
