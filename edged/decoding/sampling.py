"""Sampling parameters of one request: their checked form, and the check."""

from __future__ import annotations

import math
import secrets

import msgspec

from edged.errors import InvalidArgumentError


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Resolved sampling parameters of one request; every default has been applied."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the largest."""
    top_k: int = 0
    """Only this many largest logits can be drawn; 0: all."""
    top_p: float = 1.0
    """Only the smallest set of tokens whose probabilities reach it can be drawn."""
    seed: int = 0
    """Unsigned 64 bits; keys the random numbers together with the token's position."""


def resolve_sampling(
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    defaults: Sampling | None = None,
    vocabulary: int | None = None,
) -> Sampling:
    """Check what a request says about sampling and fill in what it leaves out.

    Args:
        temperature: 0 (greedy) or more, finite.
        top_k: 0 (all) up to ``vocabulary``.
        top_p: Above 0, up to 1.
        seed: Any unsigned 64-bit number; a random one where it is None.
        defaults: The model's own values for what is None (``generation_config.json``); a seed in it is not looked at.
        vocabulary: Token ids of the model; bounds ``top_k`` where it is given.

    Raises:
        InvalidArgumentError: A value outside its range; ``field`` is ``sampling.temperature`` and so on.
    """
    base = Sampling() if defaults is None else defaults
    return Sampling(
        temperature=base.temperature if temperature is None else _temperature(temperature),
        top_k=base.top_k if top_k is None else _top_k(top_k, vocabulary),
        top_p=base.top_p if top_p is None else _top_p(top_p),
        seed=secrets.randbits(64) if seed is None else _seed(seed),
    )


def _temperature(value: float) -> float:
    if not math.isfinite(value) or value < 0:
        raise InvalidArgumentError(
            f"sampling.temperature is {value}: give a finite number of 0 or more (0 always takes the likeliest token)",
            field="sampling.temperature",
        )
    return float(value)


def _top_k(value: int, vocabulary: int | None) -> int:
    if value < 0 or (vocabulary is not None and value > vocabulary):
        most = "" if vocabulary is None else f" to {vocabulary}, the size of the vocabulary"
        raise InvalidArgumentError(
            f"sampling.top_k is {value}: give a whole number from 0{most} (0 allows every token)",
            field="sampling.top_k",
        )
    return value


def _top_p(value: float) -> float:
    if not 0 < value <= 1:  # false for NaN as well
        raise InvalidArgumentError(
            f"sampling.top_p is {value}: give a number above 0 and at most 1 (1 allows every token)",
            field="sampling.top_p",
        )
    return float(value)


def _seed(value: int) -> int:
    if not 0 <= value < 2**64:
        raise InvalidArgumentError(
            f"sampling.seed is {value}: give a whole number from 0 to {2**64 - 1}", field="sampling.seed"
        )
    return value
