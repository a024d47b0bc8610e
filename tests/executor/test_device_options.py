"""What a request says about single tokens, drawn on the device, held to the host's sampler on the same logits."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from cuda_models import SMALL, write_model
from executor_runner import Runner
from host_device import HostDevice

from edged.config import ModelConfig
from edged.executor.base import SamplingRow
from edged.executor.cuda_executor import CudaExecutor
from edged.executor.host_sampler import NO_TOKEN, HostOptions, HostSampler, draw
from edged.memory import sample_buffers

VOCABULARY = SMALL["vocab_size"]


class Allowing:
    """A constraint that allows some tokens, others at each step."""

    def __init__(self, seed):
        self.masks = np.random.default_rng(seed).random((64, VOCABULARY)) < 0.4
        self.step = 0

    def allowed(self):
        return self.masks[self.step]

    def allowed_bits(self):
        return np.packbits(self.masks[self.step], bitorder="little").tobytes()


@pytest.fixture(scope="module", params=["references", pytest.param("kernels", marks=pytest.mark.gpu)])
def executor(request, tmp_path_factory):
    config = ModelConfig(
        name="m",
        path=write_model(tmp_path_factory.mktemp("models") / "small", SMALL),
        device="cuda",
        dtype="float16",
        context_length=128,
        max_sequences=6,
        prefill_chunk=128,
    )
    executor = CudaExecutor(config, HostDevice if request.param == "references" else None)
    executor.load(lambda *_: None)
    yield executor
    executor.close()


def options_of(rng):
    def maybe(value, default):
        return value if rng.random() < 0.4 else default

    ids = rng.sample(range(VOCABULARY), 40)
    return HostOptions(
        min_p=maybe(0.02, 0.0),
        typical_p=maybe(0.8, 1.0),
        repetition_penalty=maybe(1.4, 1.0),
        presence_penalty=maybe(0.7, 0.0),
        frequency_penalty=maybe(0.4, 0.0),
        penalty_window=maybe(5, 0),
        logit_bias=maybe(((ids[0], 3.0), (ids[1], -np.inf), (ids[2], -1.5)), ()),
        bad_sequences=maybe(
            ((ids[3],), (ids[4], ids[5]), *((one, two) for one in ids for two in ids[:9])), ()
        ),
        min_tokens=maybe(4, 0),
        end_token_ids=(ids[6], ids[7]),
        logprobs=rng.choice([-1, 0, 5, 20]),
    )


def row_of(rng, host, position):
    temperature, top_k, top_p = rng.choice([(0.0, 0, 1.0), (1.0, 0, 1.0), (1.3, 20, 0.9), (0.8, 0, 0.95)])
    return SamplingRow(temperature, top_k, top_p, rng.getrandbits(40), position, host)


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_drawn_as_the_host_draws_them(executor, seed):
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(3, 20))] for _ in range(6)]
    runner = Runner(executor)
    sequences = [runner.sequence(prompt, room=20) for prompt in prompts]
    made = []
    for prompt in prompts:
        options = options_of(rng)
        constraint = [Allowing(rng.randrange(1000))] * 2 if rng.random() < 0.5 else [None] * 2
        made.append([HostSampler(options, prompt, each) for each in constraint])
    for step in range(8):
        parts = [(sequence, len(sequence.tokens) - sequence.stored) for sequence in sequences]
        batch = runner.batch(parts)
        rows = []
        for (on_device, on_host), sequence in zip(made, sequences, strict=True):
            row = row_of(rng, on_device, len(sequence.tokens))
            rows.append((row, replace(row, host=on_host)))
        logits = executor.logits(batch)
        found = executor.step(replace(batch, sampling=tuple(row for row, _ in rows))).tolist()
        assert found == draw(logits, [row for _, row in rows]).tolist()
        for (on_device, on_host), sequence, token in zip(made, sequences, found, strict=True):
            assert (on_device.logprobs is None) == (on_host.logprobs is None)
            if on_host.logprobs is not None:
                assert on_device.logprobs.top_ids == on_host.logprobs.top_ids
                np.testing.assert_allclose(on_device.logprobs.top, on_host.logprobs.top, atol=1e-4)
                assert abs(on_device.logprobs.chosen - on_host.logprobs.chosen) < 1e-4
            sequence.stored = len(sequence.tokens)
            sequence.tokens.append(max(token, 0))
            for sampler in {id(on_device): on_device, id(on_host): on_host}.values():
                sampler.accept(max(token, 0))
            if on_device.constraint is not None:
                on_device.constraint.step = step + 1


def test_no_token_is_drawn_where_all_is_forbidden(executor):
    nothing = Allowing(0)
    nothing.masks[:] = False
    runner = Runner(executor)
    batch = runner.batch([(runner.sequence([1, 2, 3]), 3)] * 1)
    for temperature in (0.0, 1.0):
        row = SamplingRow(temperature, host=HostSampler(HostOptions(logprobs=3), [1, 2, 3], nothing))
        assert executor.step(replace(batch, sampling=(row,))).tolist() == [NO_TOKEN]
        assert row.host.logprobs is None


def test_what_names_too_many_tokens_is_drawn_on_the_host(executor, monkeypatch):
    options = HostOptions(logit_bias=tuple((token, 0.5 * (token % 3)) for token in range(250)), logprobs=2)
    runner = Runner(executor)
    prompt = list(range(40))
    batch = runner.batch([(runner.sequence(prompt), 40)])
    tokens = {}
    for place, room in (("device", 65536), ("host", 100)):
        monkeypatch.setattr(executor._options._writer, "room", lambda terms, room=room: terms.entries <= room)
        row = SamplingRow(1.0, seed=3, position=40, host=HostSampler(options, prompt))
        tokens[place] = executor.step(replace(batch, sampling=(row,))).tolist(), row.host.logprobs.top_ids
    assert tokens["device"] == tokens["host"]


def test_the_plan_has_room_for_what_it_says(executor):
    assert executor.buffers["sample_entries"].shape[0] == 4 * sample_buffers.ROW_ENTRIES
    assert executor.buffers["sample_masks"].shape == (8, -(-VOCABULARY // 32))
