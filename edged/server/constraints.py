"""The constraint of a request, as far as it can be read without its grammar."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from edged.decoding.constraints.base import CHOICE, JSON_SCHEMA, LARK, READY_MADE, REGEX, Constraint
from edged.errors import InvalidArgumentError

if TYPE_CHECKING:
    from edged.config import LimitsConfig
    from edged.v1 import inference_pb2

MOST_CHOICES = 10_000


def read_constraint(request: inference_pb2.GenerateRequest, limits: LimitsConfig) -> Constraint | None:
    """The constraint of a request, or None.

    Raises:
        InvalidArgumentError: It is too large, has no texts, or contradicts what else the request says.
    """
    kind = request.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == CHOICE:
        texts = list(request.choice.texts)
        if not 1 <= len(texts) <= MOST_CHOICES or "" in texts:
            raise InvalidArgumentError(
                f"choice has {len(texts)} texts{', one of them empty' if '' in texts else ''}; give 1 to {MOST_CHOICES}, "
                "none of them empty",
                field="choice.texts",
            )
        text = json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False)
    else:
        text = {
            JSON_SCHEMA: request.json_schema,
            REGEX: request.regex,
            LARK: request.lark,
            READY_MADE: request.ready_made,
        }[kind]
    size = len(text.encode())
    if size > limits.constraint_size:
        raise InvalidArgumentError(
            f"{kind} has {size} bytes, and at most {limits.constraint_size} are allowed; shorten it or raise "
            "limits.constraint_size in the configuration",
            field=kind,
        )
    check_settings(request, kind)
    return Constraint(kind, text)


def check_settings(request: inference_pb2.GenerateRequest, kind: str) -> None:
    """Refuse what cannot hold together with a constraint.

    Raises:
        InvalidArgumentError: The request says that it goes on after its end, or does not end early.
    """
    stops = request.stops
    if stops.ignore_eos:
        raise InvalidArgumentError(
            f"stops.ignore_eos and {kind} contradict each other: an answer of a given form ends with it; leave one out",
            field="stops.ignore_eos",
        )
    if stops.min_tokens:
        raise InvalidArgumentError(
            f"stops.min_tokens is {stops.min_tokens} beside {kind}: the form says when an answer may end; leave one out",
            field="stops.min_tokens",
        )
