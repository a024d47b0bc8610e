"""A load of requests: how many, when, how long their prompts and answers are. The same seed makes the same load."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_FORMS = "a number, uniform:LOW:HIGH, normal:MEAN:DEVIATION, lognormal:MEDIAN:SIGMA or exponential:MEAN"
_PARAMETERS = {"uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1}


@dataclass(frozen=True)
class Lengths:
    """Distribution of a length in tokens."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """The distribution that ``text`` names: ``128``, ``uniform:64:256``, ``lognormal:200:0.6`` and others.

        Raises:
            ValueError: It names none.
        """
        kind, *rest = text.split(":")
        if re.fullmatch(r"[0-9]+", kind) and not rest:
            kind, rest = "fixed", [kind]
        wanted = 1 if kind == "fixed" else _PARAMETERS.get(kind)
        try:
            numbers = [float(part) for part in rest]
        except ValueError:
            numbers = []
        if wanted is None or len(numbers) != wanted or not all(math.isfinite(n) and n >= 0 for n in numbers):
            raise ValueError(f"{text!r} is no distribution of lengths; write {_FORMS}")
        if kind == "uniform" and numbers[0] > numbers[1]:
            raise ValueError(f"{text!r} ends before it begins")
        if kind in ("fixed", "exponential", "lognormal") and numbers[0] == 0:
            raise ValueError(f"{text!r} has only lengths of 0; write at least 1")
        return cls(kind, *numbers)

    def draw(self, numbers: random.Random, most: int) -> int:
        """One length, from 1 to ``most``."""
        first, second = self.first, self.second
        value = {
            "fixed": lambda: first,
            "uniform": lambda: float(numbers.randint(math.ceil(first), math.floor(second))),
            "normal": lambda: numbers.gauss(first, second),
            "lognormal": lambda: first * math.exp(numbers.gauss(0.0, second)),
            "exponential": lambda: numbers.expovariate(1.0 / first),
        }[self.kind]()
        return max(1, min(most, round(value)))

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.first:g}"
        numbers = (self.first, self.second)[: _PARAMETERS[self.kind]]
        return ":".join([self.kind, *(f"{number:g}" for number in numbers)])


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a load.

    Attributes:
        index: Its number.
        at: When it arrives, in seconds from the start; 0 in a closed loop, where it comes when another has ended.
        prompt: Token ids.
        output_tokens: Tokens to generate.
    """

    index: int
    at: float
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True)
class Load:
    """What is asked for.

    Attributes:
        requests: How many.
        prompt_tokens: Lengths of the prompts.
        output_tokens: Lengths of the answers.
        rate: Requests a second, arriving as a Poisson process; None: a closed loop.
        shared_prefix: Tokens that all prompts begin with.
        seed: Decides lengths, texts and arrivals.
    """

    requests: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    rate: float | None = None
    shared_prefix: int = 0
    seed: int = 0

    def plan(self, token_ids: Sequence[int], context_length: int) -> Iterator[PlannedRequest]:
        """The requests, in the order of their arrival.

        Args:
            token_ids: What prompts are made of.
            context_length: Most tokens of prompt and answer together.
        """
        numbers = random.Random(self.seed)  # noqa: S311 - a load is no secret
        prefix = numbers.choices(token_ids, k=self.shared_prefix)
        at = 0.0
        for index in range(self.requests):
            length = self.prompt_tokens.draw(numbers, context_length - 1)
            output = self.output_tokens.draw(numbers, context_length - length)
            own = numbers.choices(token_ids, k=max(0, length - len(prefix)))
            if self.rate is not None and index:
                at += numbers.expovariate(self.rate)
            yield PlannedRequest(index, at, (*prefix[:length], *own), output)
