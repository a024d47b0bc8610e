"""Sampling in torch, exactly defined, so that every back end draws the same token.

For a row of logits l over V token ids, with temperature t, top_k, top_p and a number u in [0, 1):

1. t = 0 (or below fp32's smallest normal number): the largest logit; on a tie, the smallest id.
2. Ids are ranked by falling logit; ids with equal logits by rising id. Rank r has the weight
   ``w[r] = exp((l[r] - l[0]) / t)``, computed in fp32. Sums of weights are taken in fp64; ``c[r] = w[0] + .. + w[r]``.
3. top_k: only ranks below k can be drawn (k = 0, or k > V: all). Their total is Z (for k < V, ``c[k - 1]``).
4. top_p: of these, rank r can be drawn if the ranks before it do not reach p: ``c[r] - w[r] < p * Z``
   (p = 1: all of them). Rank 0 always can. The total of what is left is M.
5. The token is that of the first rank with ``c[r] > u * M`` (the last that can be drawn, if rounding leaves none).

u comes from :mod:`plugins_trt.sample.philox`, keyed by the request's seed and the token's position.

Rows with :class:`plugins_trt.sample.rows.Terms` are drawn by :func:`draw_with_terms`. Before step 1 their logits change:
``l + bias``; tokens seen: ``l r`` where l is negative, else ``l / r``; tokens answered: ``l - (presence + count frequency)``;
forbidden ones: minus infinity. After step 4, with w as it is there:

4a. min_p: rank r can be drawn if also ``w[r] >= min_p``.
4b. typical_p (arXiv 2202.00666): let ``d = (l[0] - l) / t``, m its mean over what is left, weighted by w, and M that
    total. The tokens are taken by rising ``|d - m|`` until their weights reach ``typical_p M``; those that are as far from
    m as the last one are left with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from plugins_trt.sample.philox import uniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugins_trt.sample.rows import Terms

ROWS = 8
"""Rows that are drawn together; bounds the scratch to this many rows of the vocabulary."""

FIRST_RANKS = 256
"""Ranks looked at first. A draw that needs more looks at all; the result is the same."""

SMALLEST_TEMPERATURE = 2.0**-126
"""Below it a temperature is 0."""


def sample(
    logits: torch.Tensor,
    *,
    temperatures: Sequence[float],
    top_ks: Sequence[int],
    top_ps: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> torch.Tensor:
    """Draw one token id for each row.

    Args:
        logits: ``[R, V]``, any float type and layout.
        temperatures: R numbers of 0 or more.
        top_ks: R numbers; 0 allows every token.
        top_ps: R numbers above 0, up to 1.
        seeds: R unsigned 64-bit numbers.
        positions: Positions of the tokens to be drawn.

    Returns:
        int32 ``[R]``, on the device of the logits.
    """
    drawn = logits.argmax(dim=1)  # [R]; the first of equal values
    warm = [row for row, t in enumerate(temperatures) if t >= SMALLEST_TEMPERATURE]
    for start in range(0, len(warm), ROWS):
        rows = warm[start : start + ROWS]

        def pick(values: Sequence[float], dtype: torch.dtype, rows: list[int] = rows) -> torch.Tensor:
            return torch.tensor([values[row] for row in rows], dtype=dtype, device=logits.device)

        numbers = [uniform(seeds[row], positions[row]) for row in rows]
        drawn[rows] = draw(
            logits[rows].float(),
            temperatures=pick(temperatures, torch.float32),
            top_ks=pick(top_ks, torch.int64),
            top_ps=pick(top_ps, torch.float64),
            numbers=torch.tensor(numbers, dtype=torch.float64, device=logits.device),
        )
    return drawn.to(torch.int32)


class Rows(NamedTuple):
    """Rows with a temperature, as far as step 2."""

    logits: torch.Tensor  # fp32 [n, V]
    weights: torch.Tensor  # w in the order of the ids, fp32 [n, V]
    totals: torch.Tensor  # sum of all weights, fp64 [n]
    limits: torch.Tensor  # ranks that top_k leaves, int64 [n]
    top_ps: torch.Tensor  # fp64 [n]
    numbers: torch.Tensor  # u, fp64 [n]

    def only(self, mask: torch.Tensor) -> Rows:
        """Some of the rows."""
        return Rows(*(part[mask] for part in self))


def draw(
    logits: torch.Tensor,
    *,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    numbers: torch.Tensor,
) -> torch.Tensor:
    """Steps 2 to 5 for rows with a temperature.

    Args:
        logits: fp32 ``[n, V]``.
        temperatures: fp32 ``[n]``.
        top_ks: int64 ``[n]``.
        top_ps: fp64 ``[n]``.
        numbers: u, fp64 ``[n]``.

    Returns:
        int64 ``[n]``.
    """
    vocabulary = logits.shape[1]
    rows = _weigh(logits, temperatures, top_ks, top_ps, numbers)
    cutting = torch.where(rows.limits < vocabulary, rows.limits, 0)
    ids, certain = _among_first(rows, min(vocabulary, max(FIRST_RANKS, int(cutting.max()))))
    if not bool(certain.all()):
        ids[~certain] = _among_first(rows.only(~certain), vocabulary)[0]
    return ids


def _weigh(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    numbers: torch.Tensor,
) -> Rows:
    """Step 2, and how many ranks top_k leaves."""
    vocabulary = logits.shape[1]
    limits = torch.where(top_ks == 0, vocabulary, top_ks.clamp(max=vocabulary))  # [n]
    weights = torch.exp((logits - logits.amax(dim=1, keepdim=True)) / temperatures[:, None])  # [n, V]
    return Rows(logits, weights, weights.sum(dim=1, dtype=torch.float64), limits, top_ps, numbers)


def _among_first(rows: Rows, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw by the first ``ranks`` ranks; also says which draws more ranks could not change."""
    vocabulary = rows.logits.shape[1]
    ids = _ranked(rows.logits, ranks)  # [n, ranks]
    weights = rows.weights.gather(1, ids).double()  # [n, ranks]
    sums = weights.cumsum(dim=1)  # c, [n, ranks]
    cut = rows.limits < vocabulary
    at_limit = sums.gather(1, (rows.limits.clamp(max=ranks) - 1)[:, None]).squeeze(1)
    totals = torch.where(cut, at_limit, rows.totals)  # Z, [n]
    whole = rows.top_ps == 1.0
    allowed = (sums - weights < (rows.top_ps * totals)[:, None]) | whole[:, None]
    allowed &= torch.arange(ranks, device=ids.device) < rows.limits[:, None]
    allowed[:, 0] = True
    count = allowed.sum(dim=1)  # ranks that can be drawn, as far as they were looked at
    masses = torch.where(whole, totals, sums.gather(1, (count - 1)[:, None]).squeeze(1))  # M, [n]
    place = (sums <= (rows.numbers * masses)[:, None]).sum(dim=1)  # first rank above u M
    chosen = torch.minimum(place, count - 1)[:, None]
    result = ids.gather(1, chosen).squeeze(1)
    if ranks == vocabulary:
        return result, torch.ones_like(cut)
    # A rank that ties with the last one looked at may belong to an id that was not looked at.
    values = rows.logits.gather(1, ids)
    clear = values.gather(1, chosen).squeeze(1) > values[:, -1]
    mass_known = cut | whole | (count < ranks)
    return result, clear & mass_known & ((place < ranks) | cut)


def _ranked(logits: torch.Tensor, ranks: int) -> torch.Tensor:
    """Ids of the first ranks, ``[n, ranks]``; which of the ids that tie with the last one are among them is open."""
    if ranks == logits.shape[1]:
        return logits.sort(dim=1, descending=True, stable=True).indices
    ids = logits.topk(ranks, dim=1).indices.sort(dim=1).values
    order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)


class Drawn(NamedTuple):
    """A token drawn with terms: -1 where all are forbidden; log probabilities of the raw logits where they are asked for."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


def draw_with_terms(
    raw: torch.Tensor, terms: Terms, *, temperature: float, top_k: int, top_p: float, number: float
) -> Drawn:
    """Draw one token with all that a request can say, by sorting everything.

    Args:
        raw: fp32 ``[V]``.
        terms: What it says beyond the rest.
        temperature: 0 or more.
        top_k: 0 allows every token.
        top_p: Above 0, up to 1.
        number: u.
    """
    scores = _processed(raw, terms)
    ids = scores.sort(descending=True, stable=True).indices  # [V], in rank order
    best = float(scores[ids[0]])
    if best == -torch.inf:
        return Drawn(-1, 0.0, [], [])
    token = int(ids[0])
    if temperature >= SMALLEST_TEMPERATURE:
        distances = (scores[ids[0]] - scores[ids]) / torch.tensor(temperature, dtype=torch.float32)  # [V]
        token = int(ids[_rank(distances, terms, top_k=top_k, top_p=top_p, number=number)])
    if terms.logprobs < 0:
        return Drawn(token, 0.0, [], [])
    logprobs = raw.double().log_softmax(0)  # [V]
    top = raw.sort(descending=True, stable=True).indices[: terms.logprobs]
    return Drawn(token, float(logprobs[token]), top.tolist(), logprobs[top].tolist())


def _processed(raw: torch.Tensor, terms: Terms) -> torch.Tensor:
    """What comes before step 1, fp32 ``[V]``."""
    scores = raw.clone()

    def ids(values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64)

    def number(value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float32)

    scores[ids(terms.bias_ids)] += torch.as_tensor(terms.biases, dtype=torch.float32)
    seen, repetition = ids(terms.seen), number(terms.repetition)
    values = scores[seen]
    scores[seen] = torch.where(values < 0, values * repetition, values / repetition)
    counts = torch.as_tensor(terms.counts, dtype=torch.float32)
    scores[ids(terms.answered)] -= number(terms.presence) + counts * number(terms.frequency)
    scores[ids(terms.forbidden)] = -torch.inf
    if terms.mask is not None:
        words = torch.frombuffer(bytearray(terms.mask), dtype=torch.uint8)
        bits = (words[:, None] >> torch.arange(8) & 1).flatten()[: len(scores)]
        scores[: len(bits)][bits == 0] = -torch.inf
        scores[len(bits) :] = -torch.inf
    return scores


def _rank(distances: torch.Tensor, terms: Terms, *, top_k: int, top_p: float, number: float) -> int:
    """Steps 2 to 5 for one row; ``distances`` are in rank order, fp32 ``[V]``."""
    weights = torch.exp(-distances).double()  # w
    left = weights > 0
    if top_k:
        left[top_k:] = False
    total = float(weights[left].sum())  # Z
    if top_p < 1:
        sums = weights.cumsum(0)
        left &= sums - weights < top_p * total
        left[0] = True
    left &= weights >= terms.min_p
    if terms.typical_p < 1:
        mean = ((weights * distances)[left].sum() / weights[left].sum()).float()
        deviations = (distances - mean).abs()
        places = left.nonzero().flatten()
        order = places[deviations[places].sort(stable=True).indices]
        reached = weights[order].cumsum(0) >= terms.typical_p * weights[left].sum()
        last = order[min(int((~reached).sum()), len(order) - 1)]
        left &= deviations <= deviations[last]
    places = left.nonzero().flatten()
    sums = weights[places].cumsum(0)
    return int(places[min(int((sums <= number * sums[-1]).sum()), len(places) - 1)])
