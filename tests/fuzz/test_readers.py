"""Every reader on what fuzzing found, and on a few seconds of changed files."""

from __future__ import annotations

from pathlib import Path

import pytest
import readers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CASES = sorted((Path(__file__).parent / "cases").glob("*/*"))


@pytest.fixture(scope="module", autouse=True)
def scratch():
    yield
    readers.clean()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}-{case.name}")
def test_what_was_found(case):
    readers.TARGETS[case.parent.name](case.read_bytes())


@pytest.mark.parametrize("target", readers.TARGETS)
def test_seeds_are_good(target):
    for content in readers.seeds(target):
        readers.TARGETS[target](content)


PIECES = st.binary(min_size=0, max_size=8) | st.sampled_from(
    [b"\xff" * 8, b"\0" * 8, b"\x80\0\0\0\0\0\0\0", b'"', b"{", b"]", b"-", b"e999", b"null", b": ", b"\n"]
)


@pytest.mark.parametrize("target", readers.TARGETS)
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_change_of_a_good_file_is_read_or_refused(target, data):
    content = bytearray(data.draw(st.sampled_from(readers.seeds(target))))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        piece = data.draw(PIECES)
        content[place : place + data.draw(st.sampled_from([0, len(piece)]))] = piece
    readers.TARGETS[target](bytes(content))


@pytest.mark.parametrize("target", ["config", "packed"])
@given(content=st.binary(max_size=120))
@settings(max_examples=150, deadline=None)
def test_any_decisions_are_read_or_refused(target, content):
    readers.TARGETS[target](content)
