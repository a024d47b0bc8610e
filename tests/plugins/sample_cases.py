"""Rows of logits with everything that a request can say about them, for the tests of `sample`."""

import random

import numpy as np
import torch

from plugins_trt.sample.rows import LOGPROBS, MOST_LOGPROBS, UNIT, Terms

KINDS = ["spread", "peaked", "bfloat16", "coarse", "equal", "nearly equal", "forbidden", "signed zeros"]


def logits_of(kind, rows, vocabulary, generator):
    """fp32 ``[rows, V]`` on the generator's device."""
    normal = torch.randn(rows, vocabulary, generator=generator, device=generator.device)
    return {
        "spread": 3.0 * normal,
        "peaked": 10.0 * normal,
        "bfloat16": (2.0 * normal).bfloat16().float(),  # with many ties
        "coarse": (2.0 * normal).round(),
        "equal": torch.ones_like(normal),
        "nearly equal": 1.0 + 1e-3 * normal,
        "forbidden": torch.where(normal > 0.5, normal, -torch.inf),
        "signed zeros": torch.where(normal > 0, 0.0, -0.0) + (normal > 2.5),
    }[kind]


def random_terms(vocabulary, rng: random.Random) -> Terms:
    """Some of the terms that a request may have."""

    def some(most):
        ids = rng.sample(range(vocabulary), min(vocabulary, rng.randint(1, most)))
        return np.array(ids, np.int64)

    def maybe(value, default, chance=0.4):
        return value if rng.random() < chance else default

    none = np.empty(0, np.int64)
    bias_ids, answered = maybe(some(20), none), maybe(some(50), none)
    mask = None
    if rng.random() < 0.4:
        bits = np.random.default_rng(rng.randrange(2**32)).random(vocabulary) < 0.3
        bits[rng.randrange(vocabulary)] = True
        mask = np.packbits(bits, bitorder="little").tobytes()
    return Terms(
        min_p=maybe(rng.choice([0.001, 0.1, 1.0]), 0.0),
        typical_p=maybe(rng.choice([0.2, 0.9, 0.999]), 1.0),
        repetition=rng.choice([0.5, 1.3]),
        presence=rng.choice([-1.0, 0.3]),
        frequency=rng.choice([0.0, 0.7]),
        bias_ids=bias_ids,
        biases=np.array([rng.choice([-np.inf, -3.5, 2.25]) for _ in bias_ids], np.float32),
        seen=maybe(some(300), none),
        answered=answered,
        counts=np.array([rng.randint(1, 9) for _ in answered], np.int64),
        forbidden=maybe(some(30), none),
        mask=mask,
        logprobs=maybe(rng.choice([0, 1, 5, min(vocabulary, MOST_LOGPROBS)]), -1),
    )


def check_logprobs(words, drawn, terms):
    """Hold one row of what the kernel recorded to the reference."""
    found = words.view(LOGPROBS)[0]
    total = float(found["largest"]) + np.log(float(found["total"]) / UNIT)
    assert abs(float(found["chosen"]) - total - drawn.logprob) < 1e-4
    assert found["ids"][: terms.logprobs].tolist() == drawn.top_ids
    np.testing.assert_allclose(found["values"][: terms.logprobs] - total, drawn.top_logprobs, atol=1e-4)
