from __future__ import annotations

import numpy as np
import pytest

from edged.memory.host_pages import HostPages


class Arena:
    def __init__(self, pages, page_bytes):
        self.memory = np.random.default_rng(1).integers(0, 256, (pages, page_bytes), np.uint8)

    def read(self, pages, out):
        out[:] = self.memory[pages]

    def write(self, pages, data):
        self.memory[pages] = data


def test_what_is_saved_comes_back_bit_by_bit_from_scattered_slots():
    arena = Arena(8, 24)
    host = HostPages(5, 24, arena.read, arena.write)
    original = arena.memory.copy()
    first = host.save(np.array([1, 4], np.int32))
    second = host.save(np.array([7], np.int32))
    host.discard(first)
    third = host.save(np.array([2, 6, 0, 3], np.int32))  # two slots before the second's and two behind it
    assert host.slots_free == 0
    arena.memory[:] = 0
    host.restore(third, np.array([3, 2, 1, 0], np.int32))
    host.restore(second, np.array([5], np.int32))
    assert arena.memory[[3, 2, 1, 0, 5]].tolist() == original[[2, 6, 0, 3, 7]].tolist()
    assert host.slots_free == 5
    host.check()


def test_more_than_there_is_room_for_is_refused():
    arena = Arena(4, 8)
    with pytest.raises(ValueError, match="3 pages asked for"):
        HostPages(2, 8, arena.read, arena.write).save(np.arange(3, dtype=np.int32))
    with pytest.raises(ValueError, match="no host memory"):
        HostPages(0, 8, arena.read, arena.write).save(np.arange(1, dtype=np.int32))
