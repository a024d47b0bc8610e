from __future__ import annotations

import math

import pytest

from edged.decoding.sampling import Sampling, resolve_sampling
from edged.errors import InvalidArgumentError


def test_what_is_left_out_takes_the_models_own_value_and_a_random_seed():
    defaults = Sampling(temperature=0.6, top_k=40, top_p=0.9, seed=5)
    resolved = resolve_sampling(top_k=0, defaults=defaults)
    assert (resolved.temperature, resolved.top_k, resolved.top_p) == (0.6, 0, 0.9)
    assert len({resolve_sampling(defaults=defaults).seed for _ in range(4)}) == 4


def test_without_a_default_sampling_is_greedy():
    assert resolve_sampling(seed=1) == Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_k", 1001),
        ("top_p", 0.0),
        ("top_p", 1.0001),
        ("top_p", -0.5),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidArgumentError) as info:
        resolve_sampling(**{name: value}, vocabulary=1000)
    assert info.value.field == f"sampling.{name}"
    assert f"sampling.{name} is {value}" in info.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0), ("top_k", 1000), ("top_p", 1), ("seed", 2**64 - 1), ("top_p", 1e-9)],
)
def test_the_ends_of_the_ranges_are_allowed(name, value):
    assert getattr(resolve_sampling(**{name: value}, vocabulary=1000), name) == value
