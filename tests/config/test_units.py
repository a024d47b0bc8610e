from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.units import exact_duration, exact_size, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0B", 0),
        ("12GiB", 12 * 2**30),
        ("512 MiB", 512 * 2**20),
        (" 1.5GB ", 1_500_000_000),
        ("0.1kB", 100),
        ("1KiB", 1024),
        ("999999999999999B", 999_999_999_999_999),
    ],
)
def test_sizes(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"), [("250ms", 0.25), ("30s", 30.0), ("1.5 min", 90.0), ("2h", 7200.0)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "1", "MiB", "1 mib", "1MIB", "-1MiB", "1e3MiB", "1,5MiB", "٣MiB", "1MiB2", "9" * 16 + "B"]
)
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match="a size with a unit out of B, KiB, MiB, GiB, kB, MB, GB, such as "):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "1", "s", "1 S", "-1s", "nan", "inf", "1d"])
def test_other_durations_are_refused(text):
    with pytest.raises(ValueError, match="a duration with a unit out of ms, s, min, h, such as "):
        parse_duration(text)


@given(st.integers(0, 2**49))
def test_exact_size_is_read_back(count):
    assert parse_size(exact_size(count)) == count


@given(st.integers(0, 10**9))
def test_exact_duration_is_read_back(milliseconds):
    assert parse_duration(exact_duration(milliseconds / 1000)) == milliseconds / 1000


@given(st.text())
def test_any_text_is_a_size_or_a_value_error(text):
    with contextlib.suppress(ValueError):
        assert parse_size(text) >= 0


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * 2**29, "1.50 GiB"), (2**41, "2048.00 GiB")],
)
def test_format(count, text):
    assert format_size(count) == text
