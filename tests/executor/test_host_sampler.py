"""The host's sampler, held to transformers' logits processors, to the torch reference and to exact distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as processors

from edged.executor.base import SamplingRow
from edged.executor.host_sampler import NO_TOKEN, HostOptions, HostSampler, draw
from plugins_trt.sample.philox import uniform
from plugins_trt.sample.reference import sample

VOCABULARY = 400


def random_logits(seed, vocabulary=VOCABULARY, spread=3.0):
    """Logits without two equal ones, which transformers' top_k and sorts treat in ways of their own."""
    generator = np.random.default_rng(seed)
    while True:
        values = generator.normal(0, spread, vocabulary).astype(np.float32)
        if vocabulary > VOCABULARY or len(np.unique(values)) == vocabulary:
            return values


def processed_by_transformers(logits, history, answer, options):
    """Scores ``[1, V]`` as transformers' processors change them, in the order of its generate; OpenAI's two penalties,
    which it has not, after its own."""
    ids = torch.tensor([history + answer])
    scores = torch.tensor(logits)[None]
    if options.logit_bias:
        bias = {(token,): value for token, value in options.logit_bias}
        scores = processors.SequenceBiasLogitsProcessor(bias)(ids, scores)
    window = options.penalty_window
    scores = processors.RepetitionPenaltyLogitsProcessor(options.repetition_penalty)(ids[:, -window:], scores)
    for token in answer[-window:]:
        scores[0, token] -= options.frequency_penalty
    for token in set(answer[-window:]):
        scores[0, token] -= options.presence_penalty
    if options.bad_sequences:
        bad = [list(sequence) for sequence in options.bad_sequences]
        scores = processors.NoBadWordsLogitsProcessor(bad)(ids, scores)
    ends = list(options.end_token_ids)
    if options.min_tokens:
        least = processors.MinNewTokensLengthLogitsProcessor(
            len(history), options.min_tokens, ends, device="cpu"
        )
        scores = least(ids, scores)
    return scores


def warped_by_transformers(scores, options, *, temperature, top_k, top_p):
    """Probabilities after transformers' warpers, in the order of its generate, fp64 [V]."""
    warpers = [processors.TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(processors.TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(processors.TopPLogitsWarper(top_p))
    if options.min_p:
        warpers.append(processors.MinPLogitsWarper(options.min_p))
    if options.typical_p < 1:
        warpers.append(processors.TypicalLogitsWarper(options.typical_p))
    for warper in warpers:
        scores = warper(None, scores)
    return scores[0].softmax(0).double().numpy()


def sampler_of(options, history, answer, constraint=None):
    sampler = HostSampler(options, history, constraint)
    for token in answer:
        sampler.accept(token)
    return sampler


def support(sampler, logits, **row):
    """Ids that come in many draws."""
    return {sampler.draw(logits, SamplingRow(seed=seed, host=sampler, **row)) for seed in range(500)}


tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=40)
options = st.builds(
    HostOptions,
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    typical_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.1, 1.7, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25, 2.0]),
    penalty_window=st.sampled_from([0, 1, 5, 30]),
    logit_bias=st.dictionaries(
        st.integers(0, VOCABULARY - 1), st.sampled_from([-math.inf, -5.0, 4.0]), max_size=8
    ).map(lambda bias: tuple(sorted(bias.items()))),
    bad_sequences=st.lists(
        st.lists(st.integers(0, 20), min_size=1, max_size=3).map(tuple), max_size=6, unique=True
    ).map(tuple),
    min_tokens=st.sampled_from([0, 3, 50]),
    end_token_ids=st.just((2, 7)),
)


@given(
    seed=st.integers(0, 2**32 - 1),
    options=options,
    history=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    answer=st.lists(st.integers(0, 30), max_size=40),
    warp=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.3, 1.0, 1.7]),
            "top_k": st.sampled_from([0, 1, 20, 300]),
            "top_p": st.sampled_from([1.0, 0.95, 0.5]),
        }
    ),
)
@settings(max_examples=150, deadline=None)
def test_the_distribution_is_that_of_transformers_processors(seed, options, history, answer, warp):
    logits = random_logits(seed)
    wanted = warped_by_transformers(
        processed_by_transformers(logits, history, answer, options), options, **warp
    )
    sampler = sampler_of(options, history, answer)
    # The draw inverts the cumulative distribution in the order of the ranks, so the draw at u tells where it stands:
    # by rank, the token drawn at u is the first whose cumulative probability exceeds u.
    order = np.lexsort((np.arange(VOCABULARY), -sampler._processed(logits)))
    cumulative = np.cumsum(wanted[order])
    for draw_seed in range(12):
        row = SamplingRow(**warp, seed=draw_seed, position=5, host=sampler)
        u = uniform(draw_seed, 5) * cumulative[-1]
        token = sampler.draw(logits, row)
        assert wanted[token] > 0
        place = int(np.flatnonzero(order == token)[0])
        assert cumulative[place] > u - 1e-5
        assert cumulative[place] - wanted[token] < u + 1e-5


@given(
    seed=st.integers(0, 2**32 - 1),
    options=options,
    history=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    answer=st.lists(st.integers(0, 30), max_size=40),
)
@settings(max_examples=150, deadline=None)
def test_every_processor_changes_the_logits_as_transformers_does(seed, options, history, answer):
    plain = HostOptions(
        **{**options.__dict__, "min_p": 0.0, "typical_p": 1.0}
    )  # what is left changes logits; the others only cut
    logits = random_logits(seed)
    wanted = processed_by_transformers(logits, history, answer, plain)[0].softmax(0).numpy()
    ours = torch.tensor(sampler_of(plain, history, answer)._processed(logits)).softmax(0).numpy()
    np.testing.assert_allclose(ours, wanted, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("vocabulary", [7, 300, 5000])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (0.0, 0, 1.0),
        (1.0, 0, 1.0),
        (1.5, 5, 1.0),
        (0.7, 0, 0.9),
        (3.0, 280, 0.99),
        (1.0, 1, 0.1),
        (9.0, 0, 0.999),
    ],
)
def test_simple_rows_are_drawn_as_the_reference_draws_them(vocabulary, temperature, top_k, top_p):
    rows = 64
    logits = np.stack([random_logits(seed, vocabulary) for seed in range(rows)])
    logits[::3] = np.round(logits[::3])  # many ties
    given = [SamplingRow(temperature, top_k, top_p, 2**63 + row, 11 * row) for row in range(rows)]
    wanted = sample(
        torch.tensor(logits),
        temperatures=[temperature] * rows,
        top_ks=[top_k] * rows,
        top_ps=[top_p] * rows,
        seeds=[row.seed for row in given],
        positions=[row.position for row in given],
    )
    assert draw(logits, given).tolist() == wanted.tolist()


def chi_square(counts, probabilities, draws):
    """The statistic and its degrees of freedom, over the tokens that are expected at least five times."""
    expected = probabilities * draws
    common = expected >= 5
    statistic = float(((counts[common] - expected[common]) ** 2 / expected[common]).sum())
    rest = draws - counts[common].sum(), draws - expected[common].sum()
    if rest[1] >= 5:
        statistic += float((rest[0] - rest[1]) ** 2 / rest[1])
    return statistic, int(common.sum())


@pytest.mark.parametrize(
    "options",
    [
        HostOptions(logprobs=0),
        HostOptions(min_p=0.05),
        HostOptions(typical_p=0.7),
        HostOptions(repetition_penalty=1.8, presence_penalty=0.6, frequency_penalty=0.3),
        HostOptions(
            logit_bias=((1, 2.0), (2, -math.inf)), bad_sequences=((3, 4), (5,)), typical_p=0.95, min_p=0.01
        ),
    ],
)
def test_draws_follow_the_exact_distribution(options):
    logits = random_logits(3, 40, spread=1.5)
    history, answer = [1, 2, 3, 3], [4, 4, 3]
    changed = processed_by_transformers(logits, history, answer, options)
    wanted = warped_by_transformers(changed, options, temperature=1.3, top_k=0, top_p=0.98)
    draws = 20_000
    sampler = sampler_of(options, history, answer)
    counts = np.bincount(
        [sampler.draw(logits, SamplingRow(1.3, 0, 0.98, 42, position)) for position in range(draws)],
        minlength=40,
    )
    assert not counts[wanted == 0].any()
    statistic, freedom = chi_square(counts, wanted, draws)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 8


def test_the_chi_square_test_sees_a_wrong_distribution():
    wanted = np.full(10, 0.1)
    counts = np.array([1100, 900] * 5)
    statistic, freedom = chi_square(counts, wanted, 10_000)
    assert statistic > freedom + 4 * math.sqrt(2 * freedom) + 8


def test_a_window_forgets_what_left_it():
    options = HostOptions(repetition_penalty=2.0, presence_penalty=1.0, penalty_window=3)
    logits = np.zeros(10, np.float32) + 4
    sampler = sampler_of(options, [9, 8, 7], [1, 1, 2])
    processed = sampler._processed(logits)
    assert processed.tolist() == [4, 1, 1, 4, 4, 4, 4, 4, 4, 4]
    sampler.accept(3)
    assert sampler._processed(logits).tolist() == [4, 1, 1, 1, 4, 4, 4, 4, 4, 4]
    sampler.accept(3)
    assert sampler._processed(logits).tolist() == [4, 4, 1, 1, 4, 4, 4, 4, 4, 4]


@given(st.lists(st.integers(0, 12), max_size=60), st.integers(0, 7), st.integers(0, 30))
def test_a_tally_counts_the_last_tokens(tokens, window, first):
    from edged.executor.tallies import Tally

    tally = Tally(window, np.array(tokens[:first], np.int64))
    for token in tokens[first:]:
        tally.add(token)
    counted = tokens[-window:]
    assert dict(zip(tally.ids.tolist(), tally.counts.tolist(), strict=True)) == {
        token: counted.count(token) for token in set(counted)
    }


class Allowing:
    def __init__(self, mask):
        self.mask = mask

    def allowed(self):
        return self.mask

    def allowed_bits(self):
        return np.packbits(self.mask, bitorder="little").tobytes()


def test_a_constraint_leaves_its_tokens_alone():
    mask = np.zeros(VOCABULARY, bool)
    mask[[5, 17, 300]] = True
    logits = random_logits(1)
    sampler = HostSampler(HostOptions(), [], Allowing(mask))
    assert support(sampler, logits, temperature=5.0) == {5, 17, 300}
    assert support(sampler, logits, temperature=5.0, top_k=350, top_p=0.9999) == {5, 17, 300}
    best = max((5, 17, 300), key=lambda token: logits[token])
    assert sampler.draw(logits, SamplingRow(host=sampler)) == best


def test_where_all_is_forbidden_no_token_is_drawn():
    sampler = HostSampler(HostOptions(logit_bias=((5, -math.inf),)), [], Allowing(np.arange(10) == 5))
    logits = np.zeros((1, 10), np.float32)
    assert draw(logits, [SamplingRow(0.0, host=sampler)]).tolist() == [NO_TOKEN]
    assert draw(logits, [SamplingRow(1.0, host=sampler)]).tolist() == [NO_TOKEN]


def test_log_probabilities_are_those_of_the_raw_logits():
    logits = random_logits(8)
    options = HostOptions(logprobs=5, logit_bias=((3, 50.0),), repetition_penalty=1.5)
    sampler = HostSampler(options, [1, 2, 3])
    token = sampler.draw(logits, SamplingRow(0.5, host=sampler))
    wanted = torch.tensor(logits).double().log_softmax(0)
    assert token == 3
    assert sampler.logprobs.chosen == pytest.approx(wanted[3].item(), abs=1e-5)
    top = wanted.topk(5)
    assert sampler.logprobs.top_ids == tuple(top.indices.tolist())
    assert sampler.logprobs.top == pytest.approx(top.values.tolist(), abs=1e-5)
    assert logits.tolist() == random_logits(8).tolist(), "the logits are the executor's own"


def test_a_draw_is_the_same_in_any_company():
    logits = np.stack([random_logits(seed, 3000) for seed in range(6)])
    samplers = [HostSampler(HostOptions(min_p=0.02, typical_p=0.9, logprobs=3), [row]) for row in range(6)]
    rows = [SamplingRow(1.2, 0, 0.97, row, 40 + row, samplers[row]) for row in range(6)]
    together = draw(logits, rows).tolist()
    alone = [int(draw(logits[row : row + 1], [rows[row]])[0]) for row in (5, 0, 3, 1, 4, 2)]
    assert [alone[(5, 0, 3, 1, 4, 2).index(row)] for row in range(6)] == together
