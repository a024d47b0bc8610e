"""Lists of names in messages."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from edged.checkpoint.name_list import MOST_PATTERNS, listed


def test_layers_of_one_pattern_are_together() -> None:
    names = [
        f"model.layers.{layer}.mlp.{part}.weight" for layer in (0, 1, 2, 5, 7, 8) for part in ("up", "down")
    ]
    assert listed(["a", *names, "model.layers.3.x", "b.c"]) == (
        "a, model.layers.{0-2,5,7-8}.mlp.up.weight, model.layers.{0-2,5,7-8}.mlp.down.weight, model.layers.3.x, b.c"
    )
    assert listed([]) == ""


def test_a_list_without_end_is_cut() -> None:
    text = listed(f"name{number}" for number in range(100_000))
    assert text.endswith(f"name{MOST_PATTERNS - 1} and {100_000 - MOST_PATTERNS} more")


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["q", "k", "up"])), max_size=40, unique=True))
def test_nothing_is_lost(parts: list[tuple[int, str]]) -> None:
    found = set()
    for piece in listed(f"model.layers.{layer}.{part}" for layer, part in parts).split(", m"):
        if not piece:
            continue
        match = re.search(r"layers\.\{?([\d,-]+)\}?\.(\w+)$", piece)
        assert match is not None
        for each in match[1].split(","):
            first, _, last = each.partition("-")
            found |= {(layer, match[2]) for layer in range(int(first), int(last or first) + 1)}
    assert found == set(parts)
