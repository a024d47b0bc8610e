from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.errors import FailedPreconditionError, ResourceExhaustedError
from edged.memory.residency import Residency, shared_room


def make(room=10):
    return Residency({"r": 50, "a": 6, "b": 4, "c": 5}, {"a", "b", "c"}, room)


def test_at_start_what_fits_is_loaded_in_order():
    assert make(10).loaded == ("r", "a", "b")
    assert make(5).loaded == ("r", "b")
    assert make(15).loaded == ("r", "a", "b", "c")


def test_the_least_recently_used_goes_first_and_the_busy_stay():
    residency = make(10)
    assert residency.victims("c", ()) == ("a",)
    residency.use("a")
    assert residency.victims("c", ()) == ("b", "a")
    assert residency.victims("c", {"b"}) == ("a",)
    with pytest.raises(ResourceExhaustedError, match="a answers requests and stays") as info:
        residency.victims("c", {"a"})
    assert info.value.retry_seconds > 0
    residency.remove("a")
    residency.add("c")
    assert residency.loaded == ("r", "b", "c")
    with pytest.raises(FailedPreconditionError, match="does not fit"):
        residency.add("a")


def test_a_reserved_model_needs_no_room():
    residency = make(10)
    residency.remove("r")
    assert residency.victims("r", {"a", "b"}) == ()
    residency.add("r")
    assert residency.loaded == ("r", "a", "b")


@pytest.mark.parametrize(
    ("sizes", "left", "room"), [([6, 4, 5], 10, 10), ([6, 4], 100, 10), ([6, 4], 3, 6), ([], 9, 0)]
)
def test_the_room_is_what_is_left_but_holds_the_largest(sizes, left, room):
    assert shared_room(sizes, left) == room


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 30),
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30),
)
def test_whatever_is_loaded_the_room_holds_it(sizes, left, todo):
    names = {str(index): size for index, size in enumerate(sizes)}
    room = shared_room(sizes, left)
    residency = Residency(names, set(names), room)
    for index, load in todo:
        name = str(index % len(sizes))
        if name in residency.loaded:
            if load:
                residency.use(name)
            else:
                residency.remove(name)
        else:
            for victim in residency.victims(name, ()):
                residency.remove(victim)
            residency.add(name)
        assert sum(names[each] for each in residency.loaded) <= room
