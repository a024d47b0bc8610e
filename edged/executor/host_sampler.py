"""Choosing tokens on the host, from fp32 logits, with everything that a request can say about it.

Executors draw simple rows themselves (:attr:`edged.executor.base.SamplingRow.simple`) and hand the others over to
:func:`draw`. The order is that of transformers' ``generate`` (``_get_logits_processor``); for a row of logits l:

1. logit bias: ``l[i] += b[i]``.
2. repetition penalty r (arXiv 1909.05858): of tokens of prompt and answer, ``l > 0`` becomes ``l / r``, else ``l r``.
3. presence and frequency penalties: ``l[i] -= presence + frequency * count[i]`` for the tokens of the answer.
4. forbidden tokens: bad sequences, end and stop tokens before ``min_tokens``, what a constraint does not allow.
5. temperature; 0 takes the largest logit of what is left (on a tie, the smallest id).
6. top_k, 7. top_p, 8. min_p, 9. typical_p (arXiv 2202.00666), each over what the one before it left.
10. the draw, as :mod:`plugins_trt.sample.reference` defines it: the first rank r of what is left whose running sum of
    weights exceeds u times their total, with u keyed by (seed, position).

Without 1 to 4, 8 and 9 the result is that of the reference. Log probabilities are the model's own, before step 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from edged.executor.tallies import BadSequences, Tally
from plugins_trt.sample.philox import uniform
from plugins_trt.sample.rows import UNIT, Terms

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from edged.executor.base import FloatArray, Int32Array, SamplingRow

    BoolArray = npt.NDArray[np.bool_]

NO_TOKEN = -1
"""Drawn where every token is forbidden."""

_FIRST_RANKS = (256, 4096, 32768)
"""Ranks looked at first; a draw that needs more sorts all."""
_SMALLEST_TEMPERATURE = 2.0**-126


class AllowedTokens(Protocol):
    """What a constraint allows next."""

    def allowed(self) -> BoolArray | None:
        """Whether each token id may come next, bool [V]; None: every one may. May wait for its computation."""

    def allowed_bits(self) -> bytes | None:
        """The same, a bit each, the lowest of a byte first; what is beyond its end may not come."""


@dataclass(frozen=True)
class HostOptions:
    """What a request says beyond a simple row; see the module for the meaning."""

    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    """Forbidden before ``min_tokens``."""
    logprobs: int = -1
    """Likeliest tokens to record beside the chosen one; -1 records nothing."""


@dataclass(frozen=True)
class Logprobs:
    """Natural log probabilities of one position: the chosen token's, and the likeliest ones' in falling order."""

    chosen: float
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


_SIMPLE = HostOptions()


class HostSampler:
    """The sampling state of one sequence: its options and the tokens so far.

    Args:
        options: What the request says.
        prompt: Token ids of the prompt.
        constraint: What it allows next; None for no constraint.
    """

    def __init__(
        self,
        options: HostOptions,
        prompt: Sequence[int] | Int32Array,
        constraint: AllowedTokens | None = None,
    ) -> None:
        self.options = options
        self.constraint = constraint
        self.logprobs: Logprobs | None = None
        """Of the token drawn last, where the options ask for them."""
        self._answered = 0
        window = options.penalty_window
        tokens = np.asarray(prompt, np.int64)  # [P]
        self._seen = Tally(window, tokens) if options.repetition_penalty != 1 else None
        penalized = options.presence_penalty != 0 or options.frequency_penalty != 0
        self._answer = Tally(window, tokens[:0]) if penalized else None
        self._bad = BadSequences(options.bad_sequences, tokens) if options.bad_sequences else None
        self._bias_ids = np.array([token_id for token_id, _ in options.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in options.logit_bias], np.float32)
        self._ends = np.array(options.end_token_ids, np.int64)

    def accept(self, token_id: int) -> None:
        """The next token of the answer, drawn or forced, is ``token_id``."""
        self._answered += 1
        for part in (self._seen, self._answer, self._bad):
            if part is not None:
                part.add(token_id)

    def draw(self, logits: FloatArray, row: SamplingRow) -> int:
        """Choose the next token.

        Args:
            logits: fp32 ``[V]``; not changed.
            row: Temperature, top_k, top_p, seed and position.

        Returns:
            Its id, or ``NO_TOKEN`` if all are forbidden.
        """
        token_id = _draw(self._processed(logits), row, self.options)
        wanted = self.options.logprobs
        self.logprobs = _logprobs(logits, token_id, wanted) if wanted >= 0 and token_id >= 0 else None
        return token_id

    def terms(self) -> Terms:
        """What the next row's draw needs beside temperature, top_k, top_p, seed and position, for a device's sampler.

        May wait for the constraint.
        """
        options, seen, answer = self.options, self._seen, self._answer
        early = self._answered < options.min_tokens
        none = np.empty(0, np.int64)
        return Terms(
            min_p=options.min_p,
            typical_p=options.typical_p,
            repetition=options.repetition_penalty,
            presence=options.presence_penalty,
            frequency=options.frequency_penalty,
            bias_ids=self._bias_ids,
            biases=self._biases,
            seen=none if seen is None else seen.ids,
            answered=none if answer is None else answer.ids,
            counts=none if answer is None else answer.counts,
            forbidden=np.concatenate(
                [none if self._bad is None else self._bad.forbidden(), self._ends if early else none]
            ),
            mask=None if self.constraint is None else self.constraint.allowed_bits(),
            logprobs=options.logprobs,
        )

    def note(self, token_id: int, record: npt.NDArray[np.void]) -> None:
        """A device has drawn a token by :meth:`terms`.

        Args:
            token_id: It, or ``NO_TOKEN``.
            record: One of :data:`plugins_trt.sample.rows.LOGPROBS`, which says something where logprobs were asked for.
        """
        wanted = self.options.logprobs
        self.logprobs = None
        if wanted >= 0 and token_id >= 0:
            total = float(record["largest"]) + float(np.log(float(record["total"]) / UNIT))
            self.logprobs = Logprobs(
                float(record["chosen"]) - total,
                tuple(record["ids"][:wanted].tolist()),
                tuple((record["values"][:wanted].astype(np.float64) - total).tolist()),
            )

    def _processed(self, logits: FloatArray) -> FloatArray:
        """Steps 1 to 4, fp32 ``[V]``."""
        options = self.options
        scores: FloatArray = logits.copy()
        if len(self._bias_ids):
            scores[self._bias_ids] += self._biases
        if self._seen is not None:
            ids = self._seen.ids
            values = scores[ids]
            penalty = np.float32(options.repetition_penalty)
            scores[ids] = np.where(values < 0, values * penalty, values / penalty)
        if self._answer is not None:
            counts = self._answer.counts.astype(np.float32)
            scores[self._answer.ids] -= np.float32(options.presence_penalty) + counts * np.float32(
                options.frequency_penalty
            )
        if self._bad is not None:
            scores[self._bad.forbidden()] = -np.inf
        if self._answered < options.min_tokens:
            scores[self._ends] = -np.inf
        allowed = None if self.constraint is None else self.constraint.allowed()
        if allowed is not None:
            scores[~allowed] = -np.inf
        return scores


def draw(logits: FloatArray, rows: Sequence[SamplingRow]) -> Int32Array:
    """Choose a token for each row, simple ones too.

    Args:
        logits: fp32 ``[n, V]``.
        rows: How, in the same order.

    Returns:
        int32 ``[n]``; ``NO_TOKEN`` where every token is forbidden.
    """
    return np.array(
        [
            _draw(values, row, _SIMPLE) if row.host is None else row.host.draw(values, row)
            for values, row in zip(logits, rows, strict=True)
        ],
        np.int32,
    )


def _draw(scores: FloatArray, row: SamplingRow, options: HostOptions) -> int:
    """Steps 5 to 10 for one row of processed logits ``[V]``."""
    best = int(scores.argmax())  # the first of equal values
    if scores[best] == -np.inf:
        return NO_TOKEN
    if row.temperature < _SMALLEST_TEMPERATURE:
        return best
    vocabulary = len(scores)
    distances = (scores[best] - scores) / np.float32(row.temperature)  # [V]
    weights = np.exp(-distances)  # [V]
    top_k = row.top_k if 0 < row.top_k < vocabulary else 0
    keys = _rank_keys(scores)
    for ranks in (*(each for each in _FIRST_RANKS if top_k <= each < vocabulary), vocabulary):
        ids = _first_ids(keys, ranks)
        token_id = _among(ids, weights=weights, distances=distances, top_k=top_k, row=row, options=options)
        if token_id is not None:
            return token_id
    raise AssertionError("all ranks decide every draw")


def _rank_keys(scores: FloatArray) -> npt.NDArray[np.uint64]:
    """Numbers ``[V]`` whose rising order is that of the ranks: falling logits, then rising ids, which fill the low half."""
    bits = (scores + np.float32(0)).view(np.uint32)  # minus zero is zero
    falling = np.where(bits >> 31, bits, ~bits & np.uint32(0x7FFFFFFF))
    keys: npt.NDArray[np.uint64] = falling.astype(np.uint64) << np.uint64(32)
    return keys | np.arange(len(scores), dtype=np.uint64)


def _first_ids(keys: npt.NDArray[np.uint64], ranks: int) -> npt.NDArray[np.int64]:
    """Ids of the first ranks ``[ranks]``."""
    first = keys if ranks == len(keys) else np.partition(keys, ranks - 1)[:ranks]
    ids: npt.NDArray[np.uint64] = np.sort(first) & np.uint64(0xFFFFFFFF)
    return ids.astype(np.int64)


def _among(
    ids: npt.NDArray[np.int64],
    *,
    weights: FloatArray,
    distances: FloatArray,
    top_k: int,
    row: SamplingRow,
    options: HostOptions,
) -> int | None:
    """Draw by the ranks in ``ids``; None if ranks beyond them could change the result."""
    w = weights[ids].astype(np.float64)
    c = np.cumsum(w)
    total = float(c[top_k - 1] if top_k else weights.sum(dtype=np.float64))
    count = min(top_k or len(ids), int(np.count_nonzero(w)))  # a forbidden token weighs nothing
    if row.top_p < 1:
        count = min(count, max(1, int(np.count_nonzero(c - w < row.top_p * total))))
    if options.min_p > 0:
        count = min(count, int(np.count_nonzero(w >= options.min_p)))
    everything = len(ids) == len(weights)
    cut = bool(top_k) or everything or count < len(ids)
    whole = row.top_p == 1 and options.min_p == 0 and options.typical_p == 1
    if not cut and not whole:
        return None
    if options.typical_p < 1:
        ids = ids[:count][_typical(w[:count], distances[ids[:count]], options.typical_p)]
        c = np.cumsum(weights[ids], dtype=np.float64)
        count = len(ids)
        mass = float(c[-1])
    else:
        mass = total if whole else float(c[count - 1])
    place = int(np.searchsorted(c, uniform(row.seed, row.position) * mass, side="right"))  # first c above u M
    if not cut and place >= len(ids):
        return None
    return int(ids[min(place, count - 1)])


def _typical(weights: npt.NDArray[np.float64], distances: FloatArray, mass: float) -> BoolArray:
    """Which of the tokens are the most typical ones that make up ``mass``; those that tie with the last one, too.

    How far a token's information is from its mean is how far its distance from the largest logit is from that one's mean.
    """
    p = weights / weights.sum()
    deviations = np.abs(distances - np.float32((p * distances).sum()))
    order = np.argsort(deviations, kind="stable")
    last = min(int(np.count_nonzero(np.cumsum(p[order]) < mass)), len(p) - 1)
    kept: BoolArray = deviations <= deviations[order[last]]
    return kept


def _logprobs(logits: FloatArray, token_id: int, top: int) -> Logprobs:
    """Log probabilities of the raw logits ``[V]``."""
    largest = float(logits.max())
    log_total = largest + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
    ids = _first_ids(_rank_keys(logits), top) if top else np.empty(0, np.int64)
    return Logprobs(
        float(logits[token_id]) - log_total,
        tuple(ids.tolist()),
        tuple((logits[ids].astype(np.float64) - log_total).tolist()),
    )
