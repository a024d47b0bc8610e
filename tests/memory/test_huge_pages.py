"""Huge pages are asked for where a whole one lies inside a buffer, and nowhere else."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest

from edged.memory.huge_pages import ask_for_huge_pages, huge_page_size

PAGE = huge_page_size()
needs_them = pytest.mark.skipif(not PAGE, reason="this kernel has no transparent huge pages")


def asked(address):
    """Whether the mapping that holds an address has the flag of MADV_HUGEPAGE."""
    inside = False
    for line in Path("/proc/self/smaps").read_text("ascii", "replace").splitlines():
        place = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if place:
            inside = int(place[1], 16) <= address < int(place[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"no mapping holds {address:#x}")


@pytest.fixture
def region():
    """Four huge pages' worth of fresh memory: its mapping and its address."""
    with mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        anchor = ctypes.c_char.from_buffer(memory)
        yield ctypes.addressof(anchor)
        del anchor


@needs_them
def test_whole_pages_inside_are_asked_for_and_their_surroundings_are_not(region):
    first = -(-region // PAGE) * PAGE
    assert ask_for_huge_pages(first + 64, 2 * PAGE - 64)
    assert not asked(first)
    assert asked(first + PAGE)
    assert asked(first + 2 * PAGE - 1)
    assert not asked(first + 2 * PAGE)


@needs_them
def test_a_buffer_without_a_whole_page_has_ordinary_ones(region):
    first = -(-region // PAGE) * PAGE
    assert not ask_for_huge_pages(first + 64, PAGE)
    assert not asked(first + 64)


@needs_them
def test_the_executor_asks_for_its_weights(tmp_path):
    torch = pytest.importorskip("torch")
    from edged.executor.torch_buffers import allocate
    from edged.memory.buffers import BufferSpec

    size = 3 * PAGE // 4
    (buffer,) = allocate(
        [BufferSpec("weights", "model weights", (size,), "float32")], torch.device("cpu")
    ).values()
    assert asked(-(-buffer.data_ptr() // PAGE) * PAGE)
    assert not buffer.any()


@pytest.mark.parametrize("page", [0, 1 << 21])
def test_nothing_to_ask_for_is_no_error(page):
    assert not ask_for_huge_pages(0, 0, page=page)
