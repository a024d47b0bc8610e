"""Constraints at the daemon's door, before they are checked."""

from __future__ import annotations

import pytest

from edged.config import LimitsConfig
from edged.decoding.constraints.base import Constraint
from edged.errors import InvalidArgumentError
from edged.server.constraints import read_constraint
from edged.v1 import inference_pb2, types_pb2


def request(**fields):
    return inference_pb2.GenerateRequest(text="x", **fields)


def test_requests_are_read():
    limits = LimitsConfig()
    assert read_constraint(request(), limits) is None
    assert read_constraint(request(regex="a"), limits) == Constraint("regex", "a")
    choice = inference_pb2.Choice(texts=["a", "é", "a"])
    assert read_constraint(request(choice=choice), limits) == Constraint("choice", '["a", "é"]')


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"choice": inference_pb2.Choice()}, "choice.texts"),
        ({"choice": inference_pb2.Choice(texts=["a", ""])}, "choice.texts"),
        ({"choice": inference_pb2.Choice(texts=map(str, range(10_001)))}, "choice.texts"),
        ({"json_schema": '{"enum": ["' + "x" * 2**20 + '"]}'}, "json_schema"),
        ({"regex": "a", "stops": types_pb2.Stops(ignore_eos=True)}, "stops.ignore_eos"),
        ({"regex": "a", "stops": types_pb2.Stops(min_tokens=3)}, "stops.min_tokens"),
    ],
)
def test_what_contradicts_itself_or_is_too_large_is_refused(fields, field):
    with pytest.raises(InvalidArgumentError) as caught:
        read_constraint(request(**fields), LimitsConfig())
    assert caught.value.field == field
