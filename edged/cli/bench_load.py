"""A load of requests: how many, when, how long their prompts and answers are. The same seed makes the same load."""

from __future__ import annotations

import math
import random
import re
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edged.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_FORMS = "a number, uniform:LOW:HIGH, normal:MEAN:DEVIATION, lognormal:MEDIAN:SIGMA or exponential:MEAN"
_LONGEST, _LARGEST_POWER = 1e9, 30.0
"""Beyond every context, and a number still: a wide lognormal has values that overflow."""
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
        if kind == "uniform" and math.ceil(numbers[0]) > math.floor(numbers[1]):
            raise ValueError(f"{text!r} ends before it begins: there is no whole number in it")
        if kind in ("fixed", "exponential", "lognormal") and numbers[0] == 0:
            raise ValueError(f"{text!r} has only lengths of 0; write at least 1")
        return cls(kind, *numbers)

    @property
    def most(self) -> int | None:
        """The longest; None where nothing bounds it."""
        if self.kind not in ("fixed", "uniform"):
            return None
        return max(1, math.floor(self.first if self.kind == "fixed" else self.second))

    @property
    def least(self) -> int:
        """The shortest."""
        return max(1, math.ceil(self.first)) if self.most is not None else 1

    def draw(self, numbers: random.Random) -> int:
        """One length, at least 1."""
        first, second = self.first, self.second
        value = {
            "fixed": lambda: first,
            "uniform": lambda: float(numbers.randint(math.ceil(first), math.floor(second))),
            "normal": lambda: numbers.gauss(first, second),
            "lognormal": lambda: first * math.exp(min(_LARGEST_POWER, numbers.gauss(0.0, second))),
            "exponential": lambda: numbers.expovariate(1.0 / first),
        }[self.kind]()
        return max(1, round(min(value, _LONGEST)))

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
        drawn: The lengths of prompt and answer before the context cut them.
    """

    index: int
    at: float
    prompt: tuple[int, ...]
    output_tokens: int
    drawn: tuple[int, int]

    @property
    def is_cut(self) -> bool:
        """Whether the context left less than was drawn."""
        return (len(self.prompt), self.output_tokens) != self.drawn


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

        Lengths without an upper bound are cut where prompt and answer do not fit the context together, and the request
        says so; the others never are.

        Args:
            token_ids: What prompts are made of.
            context_length: Most tokens of prompt and answer together.

        Raises:
            InvalidArgumentError: Lengths that have bounds do not fit the context or the shared prefix.
        """
        self._check(context_length)
        return self._draw(token_ids, context_length)

    def _check(self, context_length: int) -> None:
        """Refuse what could only be run as another load than the one that was asked for."""
        prompt, answer = self.prompt_tokens, self.output_tokens
        # Beside what has no bound of its own, room for its shortest is enough.
        most = [lengths.least if lengths.most is None else lengths.most for lengths in (prompt, answer)]
        if sum(most) > context_length:
            raise InvalidArgumentError(
                f"--prompt-tokens {prompt} and --output-tokens {answer} reach {sum(most)} tokens together, and the model's "
                f"context_length is {context_length}: ask for shorter ones, or serve the model with a longer context",
                field="prompt_tokens" if most[0] >= context_length else "output_tokens",
            )
        room = context_length - most[1] if prompt.most is None else prompt.least
        if self.shared_prefix > room:
            raise InvalidArgumentError(
                f"--shared-prefix {self.shared_prefix} does not fit prompts of {room} tokens (--prompt-tokens {prompt}, "
                f"--output-tokens {answer}, the model's context_length is {context_length}): ask for a prefix of at most "
                f"{room}, or for longer prompts",
                field="shared_prefix",
            )

    def _draw(self, token_ids: Sequence[int], context_length: int) -> Iterator[PlannedRequest]:
        numbers = random.Random(self.seed)  # noqa: S311 - a load is no secret
        prefix = numbers.choices(token_ids, k=self.shared_prefix)
        at = 0.0
        for index in range(self.requests):
            drawn = self.prompt_tokens.draw(numbers), self.output_tokens.draw(numbers)
            length, output = self._fitted(*drawn, context_length)
            own = numbers.choices(token_ids, k=max(0, length - len(prefix)))
            if self.rate is not None and index:
                at += numbers.expovariate(self.rate)
            yield PlannedRequest(index, at, (*prefix[:length], *own), output, drawn)

    def _fitted(self, length: int, output: int, context_length: int) -> tuple[int, int]:
        """Lengths that fit; what has no bound of its own gives way."""
        if self.output_tokens.most is None:
            kept = length if self.prompt_tokens.most is not None else 1
            output = min(output, context_length - kept)
        return min(length, context_length - output), output


def cuts(planned: Sequence[PlannedRequest], context_length: int, shared_prefix: int) -> list[str]:
    """What a load is not that its distributions say, one line each; empty where it is all of it.

    Args:
        planned: The load.
        context_length: What it was cut to.
        shared_prefix: Tokens that its prompts begin with.
    """
    lines = []
    changed = [each for each in planned if each.is_cut]
    if changed:
        lines.append(
            f"{len(changed)} of {len(planned)} requests were cut to the context of {context_length} tokens: "
            f"prompts have {_mean(len(each.prompt) for each in planned)} tokens on average, "
            f"{_mean(each.drawn[0] for each in planned)} were drawn; "
            f"answers {_mean(each.output_tokens for each in planned)}, {_mean(each.drawn[1] for each in planned)} were drawn"
        )
    short = sum(len(each.prompt) < shared_prefix for each in planned)
    if short:
        lines.append(
            f"{short} of {len(planned)} prompts are shorter than the shared prefix of {shared_prefix} tokens: they are its "
            "beginning"
        )
    return lines


def _mean(values: Iterable[int]) -> str:
    return f"{statistics.fmean(values):.1f}"
