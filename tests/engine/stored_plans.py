"""Keys and plans for the cache of engines."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

from edged.engine.builder import Plan
from edged.engine.key import EngineKey

if TYPE_CHECKING:
    from edged.engine.entries import StoredEngine
    from edged.engine.store import EngineStore


KEY = EngineKey(
    graph="a" * 64,
    shapes="decode prefill",
    dtype="bfloat16",
    tensorrt="tensorrt_rtx 1.7.1.116",
    targets="sm86 sm89",
    driver="13.0",
    plugins="b" * 64,
    edged="0.1.0",
)


def other_key(**changes: str) -> EngineKey:
    return dataclasses.replace(KEY, **changes)


def plan_of(size: int = 3000, seed: int = 0) -> Plan:
    return Plan(memoryview(random.Random(seed).randbytes(size)), {"decode": 10, "prefill": 70}, 1.5)


def stored(
    store: EngineStore, key: EngineKey = KEY, plan: Plan | None = None, slot: str = "s"
) -> StoredEngine:
    with store.building(key):
        return store.publish(key, plan or plan_of(), slot=slot, label="model")
