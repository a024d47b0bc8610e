from __future__ import annotations

import pytest

from edged.errors import ResourceExhaustedError
from edged.scheduler.queue import WaitingQueue


class Item:
    def __init__(self, name, priority=0, order=0, arrived=0.0):
        self.name, self.priority, self.order, self.arrived = name, priority, order, arrived
        self.suspended = False


def push(queue, item, retry=1.0):
    queue.weigh(item)
    queue.push(item, retry)
    return item


def names(queue):
    return "".join(item.name for item in queue)


def test_higher_priority_goes_first_and_then_the_earlier_arrival():
    queue = WaitingQueue(8)
    for order, (name, priority) in enumerate([("a", 0), ("b", 5), ("c", 0), ("d", -3), ("e", 5)]):
        push(queue, Item(name, priority, order))
    assert names(queue) == "beacd"
    assert queue.next.name == "b"
    assert [queue.pop().name for _ in range(5)] == list("beacd")
    assert queue.next is None


def test_waiting_weighs_as_much_as_priority():
    queue = WaitingQueue(8, aging=10.0)
    push(queue, Item("low", 0, 0, arrived=0.0))
    push(queue, Item("soon", 2, 1, arrived=19.0))  # it would have to arrive 20 s later to be as urgent
    push(queue, Item("late", 2, 2, arrived=21.0))
    assert names(queue) == "soonlowlate"


def test_one_more_than_capacity_is_refused_with_the_numbers_and_a_time():
    queue = WaitingQueue(2)
    push(queue, Item("a", 0, 0))
    push(queue, Item("b", 0, 1))
    with pytest.raises(
        ResourceExhaustedError, match=r"2 requests wait and the queue holds 2 \(queue.capacity\)"
    ) as info:
        push(queue, Item("c", 9, 2), 2.5)
    assert info.value.retry_seconds == 2.5
    assert names(queue) == "ab"


def test_a_waiting_request_leaves_from_any_place():
    queue = WaitingQueue(4)
    items = [push(queue, Item(name, 0, order)) for order, name in enumerate("abc")]
    queue.remove(items[1])
    assert names(queue) == "ac"
    assert len(queue) == 2


def test_what_ran_before_takes_no_place_of_the_queue():
    queue = WaitingQueue(1)
    ran = Item("ran", 0, 0)
    queue.weigh(ran)
    queue.take_back(ran)
    assert (len(queue), queue.suspended, queue.is_full) == (1, 1, False)
    push(queue, Item("new", 0, 1))
    assert queue.is_full
    assert queue.pop() is ran
    assert (len(queue), queue.suspended) == (1, 0)


def test_who_is_ahead():
    queue = WaitingQueue(8)
    for order, (name, priority) in enumerate([("a", 0), ("b", 5), ("c", 0), ("d", -3)]):
        push(queue, Item(name, priority, order))
    new = Item("n", 0, 9)
    queue.weigh(new)
    assert [item.name for item in queue.ahead_of(new)] == ["b", "a", "c"]
    first = Item("f", 50, 10)
    queue.weigh(first)
    assert queue.ahead_of(first) == []
