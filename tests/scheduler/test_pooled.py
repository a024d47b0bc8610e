"""Prompts that become vectors beside prompts that become answers: whose steps, whose rows, whose pages."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hand_stepped import HandStepped

from edged.decoding.pooling import Embedding, Pooling
from edged.worker.embedding import add_states, embedded


class Pooled(HandStepped):
    """Steps of vectors too. A token's hidden state is (its id, its position, 1)."""

    def __init__(self, **options):
        super().__init__(**options)
        self.kinds = []
        self.vectors = {}

    def embed(self, name, prompt, pooling, **options):
        request = self.request(name, prompt, pooling=Pooling(Embedding(pooling, normalize=False)), **options)
        request.max_tokens = 0
        self.scheduler.submit(request, self.now)
        return request

    def step(self):
        scheduler, wanted = self.scheduler, self.scheduler.next_batch
        batch = wanted(self.now)
        self.kinds.append("none" if batch is None else "vectors" if scheduler.pooled else "answers")
        if batch is None or not scheduler.pooled:
            scheduler.next_batch = lambda _: batch
            try:
                return super().step()
            finally:
                del scheduler.next_batch
        self.now += 1.0
        assert not scheduler.drawing
        hidden = np.stack([batch.token_ids, batch.positions, np.ones(len(batch.token_ids))], axis=1).astype(
            np.float32
        )
        scheduler.started = []
        scheduler.stepped()
        ended = add_states(scheduler.pooled, hidden[batch.logit_rows])
        for request in ended:
            self.vectors[request.request_id] = np.frombuffer(embedded(request, self.now).embedding, "<f4")
            scheduler.finish(request, self.now)
        scheduler.check()
        return ended


def expected(prompt, pooling):
    states = np.array([(token, position, 1.0) for position, token in enumerate(prompt)])
    return (states.mean(axis=0) if pooling == "mean" else states[-1]).astype(np.float32)


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_token_counts_once_in_any_company(seed, caches):
    rng = random.Random(seed)
    engine = Pooled(caches=caches, host_pages=8 if seed % 2 else 0)
    start = [rng.randrange(97) for _ in range(130)]
    wanted, cancelled = {}, set()
    for turn in range(60):
        if len(engine.scheduler.queue) < 6 and rng.random() < 0.5:
            prompt = start[: rng.choice([1, 64, 65, 128, 130])] + [
                rng.randrange(97) for _ in range(rng.randrange(20))
            ]
            name, priority = f"r{turn}", rng.choice([0, 0, 2])
            if rng.random() < 0.6:
                pooling = rng.choice(["last", "mean"])
                engine.embed(name, prompt, pooling, priority=priority)
                wanted[name] = expected(prompt, pooling)
            else:
                engine.submit(name, prompt, rng.randint(1, 5), priority=priority)
        if rng.random() < 0.05:
            gone = f"r{rng.randrange(turn + 1)}"
            engine.scheduler.cancel(gone, engine.now)
            cancelled.add(gone)
        engine.step()
    engine.run()
    for name, vector in wanted.items():
        if name not in cancelled or name in engine.vectors:
            np.testing.assert_allclose(engine.vectors[name], vector, rtol=1e-6)
    assert engine.holdings.pool.pages_free == 32


def test_vectors_take_turns_with_streams():
    engine = Pooled(prefill_share=1.0)
    engine.submit("stream", [1, 2, 3], 30)
    engine.embed("long", list(range(90)), "mean")
    while "long" not in engine.vectors:
        engine.step()
    kinds = engine.kinds
    assert "vectors" in kinds
    assert "answers" in kinds
    assert all(pair != ("vectors", "vectors") for pair in itertools.pairwise(kinds))


def test_a_known_prefix_is_computed_again_for_a_mean_alone():
    engine = Pooled(caches=True)
    prompt = [*list(range(70)), 3]
    engine.submit("first", prompt, 1)
    engine.run()
    for pooling, cached in (("last", 64), ("mean", 0)):
        request = engine.embed(pooling, prompt, pooling)
        engine.run()
        assert request.cached_tokens == cached
        np.testing.assert_allclose(engine.vectors[pooling], expected(prompt, pooling), rtol=1e-6)
