"""The sampling reference: known numbers, the exact distribution, and transformers' own filters."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from plugins_trt.sample import reference
from plugins_trt.sample.philox import philox, uniform, uniforms
from plugins_trt.sample.reference import sample


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known-answer tests that come with Random123
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, key, expected):
    assert philox(counter, key) == expected


def test_numbers_depend_on_every_bit_of_seed_and_position():
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1]
    positions = [0, 1, 2**31, 2**32, 2**40]
    numbers = {uniform(seed, position) for seed, position in itertools.product(seeds, positions)}
    assert len(numbers) == 25
    assert all(0 <= number < 1 for number in numbers)
    assert uniform(0, 0) == 0x6627E8D5 / 2**32


def draw_many(logits, count, seed=5, **settings):
    """``count`` draws from one row, at positions 0, 1, .."""
    drawn = []
    for start in range(0, count, 500):
        rows = min(500, count - start)
        drawn.append(
            sample(
                logits.expand(rows, -1),
                temperatures=[settings.get("temperature", 1.0)] * rows,
                top_ks=[settings.get("top_k", 0)] * rows,
                top_ps=[settings.get("top_p", 1.0)] * rows,
                seeds=[seed] * rows,
                positions=list(range(start, start + rows)),
            )
        )
    return torch.cat(drawn)


def filtered(logits, temperature=1.0, top_k=0, top_p=1.0):
    """transformers' distribution, fp64 ``[V]``."""
    scores = TemperatureLogitsWarper(temperature)(None, logits.double()[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(dim=1)[0]


SETTINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.6, "top_k": 7},
    {"top_p": 0.8},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_follow_the_exact_distribution(settings):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 1.5
    expected = filtered(logits, **settings)
    count = 20_000
    seen = torch.bincount(draw_many(logits, count, **settings), minlength=40)
    assert (seen[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = ((seen[kept] - count * expected[kept]) ** 2 / (count * expected[kept])).sum().item()
    freedom = int(kept.sum()) - 1
    # The chi-square's 99.99 % point by Wilson and Hilferty; the draws are fixed, so this passes always or never.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert chi_square < bound


@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.01, 1.0),
)
def test_what_can_be_drawn_is_what_transformers_keeps(seed, temperature, top_k, top_p):
    logits = torch.randn(50, generator=torch.Generator().manual_seed(seed)) * 2
    expected = filtered(logits, temperature, min(top_k, 50), top_p)
    cumulative = expected.sort(descending=True).values.cumsum(0)
    unclear = bool(
        (
            (
                filtered(logits, temperature, min(top_k, 50)).sort(descending=True).values.cumsum(0) - top_p
            ).abs()
            < 1e-6
        ).any()
    )
    token = int(
        sample(
            logits[None],
            temperatures=[temperature],
            top_ks=[top_k],
            top_ps=[top_p],
            seeds=[seed],
            positions=[3],
        )[0]
    )
    assert cumulative[-1] == pytest.approx(1.0)
    if not unclear:  # the nucleus ends within rounding of top_p: either end is right
        assert expected[token] > 0
        # And it is the one whose part of [0, 1) the number falls in.
        order = logits.sort(descending=True, stable=True).indices
        place = order.tolist().index(token)
        number = uniform(seed, 3)
        below = float(expected[order[:place]].sum())
        assert below - 1e-6 <= number <= below + float(expected[token]) + 1e-6


def test_greedy_takes_the_smallest_id_of_equal_logits():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    zero = {"top_ks": [1, 0], "top_ps": [0.5, 1.0], "seeds": [1, 2], "positions": [0, 0]}
    assert sample(logits, temperatures=[0.0, 0.0], **zero).tolist() == [1, 0]
    assert sample(logits, temperatures=[1e-310, 1e-40], **zero).tolist() == [1, 0]


def test_equal_logits_rank_by_rising_id():
    logits = torch.zeros(1, 1000)
    for top_k in (1, 10, 400, 1000, 0):
        for position in range(20):
            token = sample(
                logits, temperatures=[1.0], top_ks=[top_k], top_ps=[1.0], seeds=[9], positions=[position]
            )
            count = top_k or 1000
            assert token.item() == int(uniform(9, position) * count)


@given(seed=st.integers(0, 2**32), data=st.data())
def test_looking_at_the_first_ranks_changes_nothing(seed, data):
    """The short cut over few ranks draws what the whole vocabulary draws, ties and long tails included."""
    generator = torch.Generator().manual_seed(seed)
    rows = 6
    logits = torch.randn(rows, 400, generator=generator) * data.draw(st.sampled_from([0.01, 1.0, 6.0]))
    if data.draw(st.booleans()):
        logits = (logits * 2).round() / 2
    settings = {
        "temperatures": data.draw(st.lists(st.floats(0.1, 4), min_size=rows, max_size=rows)),
        "top_ks": data.draw(
            st.lists(st.sampled_from([0, 1, 3, 30, 50, 399, 400]), min_size=rows, max_size=rows)
        ),
        "top_ps": data.draw(st.lists(st.sampled_from([1.0, 0.999, 0.9, 0.3]), min_size=rows, max_size=rows)),
        "seeds": [seed] * rows,
        "positions": list(range(rows)),
    }
    results = []
    for ranks in (16, 256, 400):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "FIRST_RANKS", ranks)
            results.append(sample(logits, **settings).tolist())
    assert results[0] == results[1] == results[2]


def test_a_row_draws_the_same_alone_and_among_others():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(20, 300, generator=generator)
    settings = [
        {
            "temperatures": 0.5 + row / 10,
            "top_ks": row % 4 * 20,
            "top_ps": 1 - row % 3 / 10,
            "seeds": row,
            "positions": row,
        }
        for row in range(20)
    ]
    settings[4]["temperatures"] = 0.0
    together = sample(logits, **{key: [row[key] for row in settings] for key in settings[0]})
    alone = [
        sample(logits[i : i + 1], **{k: [v] for k, v in row.items()}).item() for i, row in enumerate(settings)
    ]
    assert together.tolist() == alone
    assert together.dtype == torch.int32
    transposed = logits.t().contiguous().t()
    assert (
        sample(transposed, **{key: [row[key] for row in settings] for key in settings[0]}).tolist() == alone
    )


def test_many_numbers_are_those_of_one_by_one():
    seeds = [0, 1, 2**32 - 1, 2**32, 2**63 + 5, 2**64 - 1, 123456789] * 3
    positions = [*range(7), *range(2**32 - 3, 2**32 + 4), *range(10**6, 10**6 + 7)]
    assert uniforms(seeds, positions).tolist() == [
        uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)
    ]
