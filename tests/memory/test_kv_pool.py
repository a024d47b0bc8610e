from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.memory.kv_pool import PagePool, pages_for


def runs(table):
    ids = table.promised
    return 1 + int((np.diff(ids) != 1).sum()) if len(ids) else 0


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_pages_for_rounds_up(tokens, pages):
    assert pages_for(tokens, 64) == pages


def test_a_new_table_is_consecutive_and_grows_inside_its_promise():
    pool = PagePool(8)
    table = pool.allocate(3)
    assert len(table) == 0
    assert pool.pages_free == 5
    pool.append(table, 1)
    pool.append(table, 3)
    assert table.pages.tolist() == [0, 1, 2]
    assert table.pages.dtype == np.int32
    pool.append(table, 2)
    assert len(table) == 3, "a table never shrinks"
    with pytest.raises(ValueError, match=r"4 pages needed.*promised 3"):
        pool.append(table, 4)


def test_the_shortest_run_that_fits_is_taken():
    pool = PagePool(20)
    tables = [pool.allocate(n) for n in (4, 1, 2, 1, 5, 7)]
    for hole in (0, 2, 4):  # free runs of 4, 2 and 5 pages
        pool.free(tables[hole])
    assert pool.allocate(2).promised.tolist() == [5, 6]
    assert pool.allocate(4).promised.tolist() == [0, 1, 2, 3]
    assert pool.allocate(3).promised.tolist() == [8, 9, 10]


def test_a_table_is_split_only_when_no_run_holds_it_and_then_as_little_as_can_be():
    pool = PagePool(12)
    tables = [pool.allocate(n) for n in (2, 1, 4, 1, 3, 1)]
    for hole in (0, 2, 4):  # 2 + 4 + 3 pages free
        pool.free(tables[hole])
    table = pool.allocate(7)
    assert runs(table) == 2
    assert table.promised.tolist() == [3, 4, 5, 6, 8, 9, 10]
    pool.check()


def test_more_than_is_free_is_refused_with_the_numbers():
    pool = PagePool(4)
    pool.allocate(3)
    assert pool.can_allocate(1)
    assert not pool.can_allocate(2)
    with pytest.raises(ValueError, match="2 pages asked for, 1 of 4 are free"):
        pool.allocate(2)
    with pytest.raises(ValueError, match="0 pages asked for"):
        pool.allocate(0)
    assert pool.pages_free == 1


def test_freeing_joins_neighbours_on_both_sides():
    pool = PagePool(9)
    tables = [pool.allocate(3) for _ in range(3)]
    for index in (0, 2, 1):
        pool.free(tables[index])
    assert runs(pool.allocate(9)) == 1


def test_a_freed_table_is_empty_and_freeing_it_again_changes_nothing():
    pool = PagePool(4)
    table = pool.allocate(2)
    pool.append(table, 2)
    pool.free(table)
    assert len(table) == 0
    pool.free(table)
    assert pool.pages_free == 4
    pool.check()


def test_a_page_freed_twice_is_found():
    pool = PagePool(4)
    table = pool.allocate(2)
    copy = table.promised.copy()
    pool.free(table)
    table.promised = copy
    with pytest.raises(ValueError, match="page 0 is freed twice"):
        pool.free(table)


def test_check_finds_a_broken_pool():
    pool = PagePool(4)
    pool.allocate(2)
    pool.pages_free = 3
    with pytest.raises(AssertionError, match="pages_free is 3"):
        pool.check()


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), max_size=60))
def test_any_order_of_allocating_and_freeing_keeps_every_page_in_one_place(pages, actions):
    pool = PagePool(pages)
    live = []
    for count, pick in actions:
        if pick < 5 and pool.can_allocate(count):
            table = pool.allocate(count)
            assert len(table.promised) == count
            live.append(table)
        elif live:
            pool.free(live.pop(pick % len(live)))
        pool.check()
        owned = [page for table in live for page in table.promised.tolist()]
        assert len(owned) == len(set(owned)) == pool.pages_used
    for table in live:
        pool.free(table)
    pool.check()
    assert pool.pages_free == pages
    assert runs(pool.allocate(pages)) == 1, "everything freed is one run again"
