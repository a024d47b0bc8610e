from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.memory.kv_pool import PagePool
from edged.memory.prefix_cache import PrefixCache
from edged.memory.sessions import Sessions


def page(value):
    return np.full(64, value, np.int32)


def chain(cache, values, tenant="", adapter=""):
    digests = [cache.root(tenant, adapter)]
    for value in values:
        digests.append(cache.follow(digests[-1], page(value)))
    return digests[1:]


def test_a_page_is_known_by_all_that_comes_before_it():
    cache = PrefixCache(8, "m")
    table = cache.pool.allocate(3)
    for digest, number in zip(chain(cache, [1, 2, 3]), table.promised.tolist(), strict=True):
        assert cache.insert(digest, number)
    assert cache.find(chain(cache, [1, 2, 3])).tolist() == table.promised.tolist()
    assert cache.find(chain(cache, [1, 2, 9])).tolist() == table.promised[:2].tolist()
    assert cache.find(chain(cache, [9, 2, 3])).tolist() == []
    assert cache.find(chain(cache, [2, 3])).tolist() == []


def test_tenants_adapters_models_and_processes_know_nothing_of_each_other():
    cache = PrefixCache(8, "m")
    digests = {
        *chain(cache, [1]),
        *chain(cache, [1], tenant="a"),
        *chain(cache, [1], adapter="a"),
        *chain(cache, [1], tenant="a", adapter="a"),
        *chain(PrefixCache(8, "m"), [1]),
        *chain(PrefixCache(8, "n"), [1]),
    }
    assert len(digests) == 6


def test_the_second_page_of_one_content_stays_its_owners():
    cache = PrefixCache(4)
    (digest,) = chain(cache, [1])
    one, two = cache.pool.allocate(1), cache.pool.allocate(1)
    assert cache.insert(digest, int(one.promised[0]))
    assert not cache.insert(digest, int(two.promised[0]))
    cache.pool.free(two)
    cache.check()
    assert cache.pool.pages_idle == 0
    cache.pool.free(one)
    assert (cache.pool.pages_idle, cache.pool.pages_free) == (1, 4)
    cache.clear()
    assert len(cache) == 0
    cache.check()


def test_shared_pages_need_no_room_and_idle_ones_do():
    pool = PagePool(4)
    table = pool.allocate(3)
    for number in table.promised.tolist():
        pool.keep(number)
    shared = table.promised.copy()
    assert pool.can_allocate(4, shared)
    assert not pool.can_allocate(5, shared)
    pool.free(table)
    assert pool.can_allocate(4, shared), "one vacant and three that wake"
    assert not pool.can_allocate(5, shared)
    other = pool.allocate(4, shared)
    assert other.promised[:3].tolist() == shared.tolist()
    pool.check()
    with pytest.raises(ValueError, match="0 of 4 are free"):
        pool.allocate(1)


def check_owners(cache, sessions, tables):
    cache.check()
    owners = sessions.owners()
    assert sessions.pages_pinned == int((owners > 0).sum())
    for table in tables:
        owners[table.promised] += 1
    assert owners.tolist() == cache.pool.owners().tolist()
    assert cache.pool.pages_free == int((owners == 0).sum())


actions = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 4)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(actions, st.integers(0, 12))
def test_owners_are_tables_and_sessions_whatever_happens(todo, most):
    cache = PrefixCache(12)
    pool = cache.pool
    sessions = Sessions(pool, most)
    tables = []
    for kind, which, count in todo:
        values = [which * 10 + depth for depth in range(count)]
        digests = chain(cache, values)
        if kind <= 1:
            shared = cache.find(digests)
            if pool.can_allocate(count + 1, shared):
                table = pool.allocate(count + 1, shared)
                for digest, number in zip(digests, table.promised.tolist(), strict=False):
                    cache.insert(digest, number)
                tables.append((which, digests, table))
        elif kind == 2 and tables:
            owner, known, table = tables.pop(0)
            sessions.pin(("", str(owner)), cache.find(known), 0.0)
            pool.free(table)
        elif kind == 3 and tables:
            pool.free(tables.pop()[2])
        elif kind == 4:
            sessions.drop(("", str(which)))
        check_owners(cache, sessions, [table for _, _, table in tables])
        assert sessions.pages_pinned <= most
    for _, _, table in tables:
        pool.free(table)
    while len(sessions):
        sessions.drop_quietest()
    assert pool.pages_free == 12
