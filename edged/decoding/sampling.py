"""Sampling parameters of one request: their checked form, and the check."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING

import msgspec

from edged.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MOST_BIASES = 1024
MOST_BAD_SEQUENCES = 1024
LONGEST_BAD_SEQUENCE = 256
MOST_TOP_LOGPROBS = 64
MOST_ANSWERS = 64
_LARGEST_BIAS = 1000.0
_LARGEST_PENALTY = 10.0


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Resolved sampling parameters of one request; every default has been applied.

    What each does, and in which order, stands in docs/generation.md.
    """

    temperature: float = 0.0
    """Divides the logits; 0 takes the largest."""
    top_k: int = 0
    """Only this many largest logits can be drawn; 0: all."""
    top_p: float = 1.0
    """Only the smallest set of tokens whose probabilities reach it can be drawn."""
    seed: int = 0
    """Unsigned 64 bits; keys the random numbers together with the token's position."""
    min_p: float = 0.0
    """Only tokens at least this many times as likely as the likeliest can be drawn."""
    typical_p: float = 1.0
    """Only the most typical tokens whose probabilities reach it can be drawn (arXiv 2202.00666)."""
    repetition_penalty: float = 1.0
    """Divides or multiplies the logits of tokens of prompt and answer (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Taken off the logits of the answer's tokens."""
    frequency_penalty: float = 0.0
    """Taken off the logits of the answer's tokens, once for each time."""
    penalty_window: int = 0
    """The penalties look at this many last tokens; 0: all."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their logits; minus infinity forbids one."""
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    """Token ids whose last is not drawn after the others."""
    logprobs: bool = False
    """Whether the log probabilities of tokens are wanted."""
    top_logprobs: int = 0
    """And those of this many likeliest tokens."""
    n: int = 1
    """Answers to the one prompt."""

    @property
    def is_simple(self) -> bool:
        """Whether temperature, top_k, top_p and seed say everything about a draw."""
        return (
            self.min_p == 0
            and self.typical_p == 1
            and self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and not self.logit_bias
            and not self.bad_sequences
            and not self.logprobs
        )


def resolve_sampling(
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    min_p: float | None = None,
    typical_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    penalty_window: int | None = None,
    logit_bias: Mapping[int, float] | None = None,
    bad_token_ids: Iterable[Iterable[int]] = (),
    logprobs: bool = False,
    top_logprobs: int = 0,
    n: int | None = None,
    defaults: Sampling | None = None,
    vocabulary: int | None = None,
    context_length: int | None = None,
) -> Sampling:
    """Check what a request says about sampling and fill in what it leaves out.

    Args:
        temperature: 0 (greedy) or more, finite.
        top_k: 0 (all) up to ``vocabulary``.
        top_p: Above 0, up to 1.
        seed: Any unsigned 64-bit number; a random one where it is None.
        min_p: 0 (all) to 1.
        typical_p: Above 0, up to 1.
        repetition_penalty: Above 0, up to 10.
        presence_penalty: -10 to 10.
        frequency_penalty: -10 to 10.
        penalty_window: 0 (all) up to ``context_length``.
        logit_bias: At most 1024 token ids, each with -1000 to 1000 or minus infinity.
        bad_token_ids: At most 1024 sequences of 1 to 256 token ids.
        logprobs: Any.
        top_logprobs: 0 to 64 and at most ``vocabulary``; above 0 only with ``logprobs``.
        n: 1 to 64.
        defaults: The model's own values for what is None (``generation_config.json``); a seed in it is not looked at.
        vocabulary: Token ids of the model; bounds ids and ``top_k`` where it is given.
        context_length: Bounds ``penalty_window`` where it is given.

    Raises:
        InvalidArgumentError: A value outside its range, or one that could have no effect; ``field`` is
            ``sampling.temperature`` and so on.
    """
    base = Sampling() if defaults is None else defaults
    sampling = Sampling(
        temperature=base.temperature if temperature is None else _temperature(temperature),
        top_k=base.top_k
        if top_k is None
        else _whole("top_k", top_k, vocabulary, "the size of the vocabulary"),
        top_p=base.top_p if top_p is None else _share("top_p", top_p),
        seed=secrets.randbits(64) if seed is None else _seed(seed),
        min_p=base.min_p if min_p is None else _between("min_p", min_p, 0, 1),
        typical_p=base.typical_p if typical_p is None else _share("typical_p", typical_p),
        repetition_penalty=(
            base.repetition_penalty if repetition_penalty is None else _repetition_penalty(repetition_penalty)
        ),
        presence_penalty=_penalty("presence_penalty", presence_penalty),
        frequency_penalty=_penalty("frequency_penalty", frequency_penalty),
        penalty_window=_whole("penalty_window", penalty_window or 0, context_length, "context_length"),
        logit_bias=_logit_bias(logit_bias or {}, vocabulary),
        bad_sequences=_bad_sequences(bad_token_ids, vocabulary),
        logprobs=logprobs,
        top_logprobs=_top_logprobs(top_logprobs, logprobs=logprobs, vocabulary=vocabulary),
        n=1 if n is None else _answers(n),
    )
    _check_window(sampling)
    return sampling


def _refuse(name: str, value: object, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"sampling.{name} is {value}: {what}", field=f"sampling.{name}")


def _temperature(value: float) -> float:
    if not math.isfinite(value) or value < 0:
        raise _refuse(
            "temperature", value, "give a finite number of 0 or more (0 always takes the likeliest token)"
        )
    return float(value)


def _whole(name: str, value: int, most: int | None, what: str) -> int:
    if value < 0 or (most is not None and value > most):
        upper = "" if most is None else f" to {most}, {what}"
        meaning = "allows every token" if name == "top_k" else "looks at all of them"
        raise _refuse(name, value, f"give a whole number from 0{upper} (0 {meaning})")
    return value


def _share(name: str, value: float) -> float:
    if not 0 < value <= 1:  # false for NaN as well
        raise _refuse(name, value, "give a number above 0 and at most 1 (1 allows every token)")
    return float(value)


def _between(name: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:
        raise _refuse(name, value, f"give a number from {low:g} to {high:g}")
    return float(value)


def _penalty(name: str, value: float | None) -> float:
    return 0.0 if value is None else _between(name, value, -_LARGEST_PENALTY, _LARGEST_PENALTY)


def _repetition_penalty(value: float) -> float:
    if not 0 < value <= _LARGEST_PENALTY:
        raise _refuse(
            "repetition_penalty", value, f"give a number above 0 and at most {_LARGEST_PENALTY:g} (1: none)"
        )
    return float(value)


def _seed(value: int) -> int:
    if not 0 <= value < 2**64:
        raise _refuse("seed", value, f"give a whole number from 0 to {2**64 - 1}")
    return value


def _answers(value: int) -> int:
    if not 1 <= value <= MOST_ANSWERS:
        raise _refuse("n", value, f"ask for 1 to {MOST_ANSWERS} answers")
    return value


def _top_logprobs(value: int, *, logprobs: bool, vocabulary: int | None) -> int:
    most = MOST_TOP_LOGPROBS if vocabulary is None else min(MOST_TOP_LOGPROBS, vocabulary)
    if not 0 <= value <= most:
        raise _refuse("top_logprobs", value, f"give a whole number from 0 to {most}")
    if value and not logprobs:
        raise _refuse("top_logprobs", value, "it has no effect without sampling.logprobs; set that, too")
    return value


def _token_id(name: str, value: int, vocabulary: int | None) -> int:
    if value < 0 or (vocabulary is not None and value >= vocabulary):
        most = "" if vocabulary is None else f" to {vocabulary - 1}"
        raise InvalidArgumentError(
            f"sampling.{name} holds the token id {value}, and the model's ids go from 0{most}; make the ids with the "
            "model's own tokenizer (Tokenize)",
            field=f"sampling.{name}",
        )
    return value


def _logit_bias(biases: Mapping[int, float], vocabulary: int | None) -> tuple[tuple[int, float], ...]:
    if len(biases) > MOST_BIASES:
        raise _refuse("logit_bias", f"of {len(biases)} tokens", f"give at most {MOST_BIASES}")
    for token_id, bias in biases.items():
        _token_id("logit_bias", token_id, vocabulary)
        if not -_LARGEST_BIAS <= bias <= _LARGEST_BIAS and bias != -math.inf:
            raise InvalidArgumentError(
                f"sampling.logit_bias[{token_id}] is {bias}: give a number from {-_LARGEST_BIAS:g} to "
                f"{_LARGEST_BIAS:g}, or -infinity to forbid the token",
                field=f"sampling.logit_bias[{token_id}]",
            )
    return tuple(sorted((token_id, float(bias)) for token_id, bias in biases.items()))


def _bad_sequences(sequences: Iterable[Iterable[int]], vocabulary: int | None) -> tuple[tuple[int, ...], ...]:
    found = tuple(dict.fromkeys(tuple(sequence) for sequence in sequences))
    if len(found) > MOST_BAD_SEQUENCES:
        raise _refuse("bad_token_ids", f"of {len(found)} sequences", f"give at most {MOST_BAD_SEQUENCES}")
    for sequence in found:
        if not 1 <= len(sequence) <= LONGEST_BAD_SEQUENCE:
            raise _refuse(
                "bad_token_ids",
                f"holding a sequence of {len(sequence)} ids",
                f"give sequences of 1 to {LONGEST_BAD_SEQUENCE}",
            )
        for token_id in sequence:
            _token_id("bad_token_ids", token_id, vocabulary)
    return found


def _check_window(sampling: Sampling) -> None:
    """Refuse a window of penalties that are not there.

    Raises:
        InvalidArgumentError: There is no penalty.
    """
    if sampling.penalty_window and (
        sampling.repetition_penalty == 1
        and sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
    ):
        raise _refuse(
            "penalty_window",
            sampling.penalty_window,
            "it has no effect without a repetition, presence or frequency penalty; set one or leave it out",
        )
