"""Embeddings through the real daemon, held to the hidden states of the same model in one piece."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import tokenizers

from edged.client import AsyncClient
from edged.config import ModelConfig
from edged.errors import DeadlineError, InvalidArgumentError, NotFoundError, UnsupportedError
from edged.executor.base import StepBatch
from edged.executor.torch_executor import TorchExecutor
from edged.v1 import inference_pb2

TEXTS = [
    "The robot opens the door.",
    "机器人打开了门。",
    "a",
    "On day one the robot drove three metres and met two people. " * 9,  # several chunks, several pages
]


@pytest.fixture(scope="module")
def states(demo_model):
    """The final norm's output at every token of each text, fp32 [n, H], in one piece.

    ``tests/executor/test_demo_model.py`` holds the same to transformers.
    """
    config = ModelConfig("m", demo_model, context_length=256, prefill_chunk=256, threads=1)
    executor = TorchExecutor(config)
    executor.load(lambda *_: None)
    tokenizer = tokenizers.Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    found = []
    for text in TEXTS:
        ids = np.array(tokenizer.encode(text).ids, np.int32)
        count = len(ids)
        batch = StepBatch(
            token_ids=ids,
            positions=np.arange(count, dtype=np.int32),
            sequence_starts=np.array([0, count], np.int32),
            lengths=np.zeros(1, np.int32),
            page_tables=[np.arange(4, dtype=np.int32)],
            logit_rows=np.arange(count, dtype=np.int32),
        )
        found.append(executor.hidden_states(batch))
    executor.close()
    return found


def normalized(vector):
    return vector / np.linalg.norm(vector)


def test_means_are_those_of_the_states(client, states):
    vectors = np.array(client.embed(TEXTS))
    for vector, state in zip(vectors, states, strict=True):
        np.testing.assert_allclose(vector, normalized(state.mean(axis=0)), atol=2e-4)
    plain = np.array(client.embed(TEXTS, normalize=False))
    for vector, state in zip(plain, states, strict=True):
        np.testing.assert_allclose(vector, state.mean(axis=0), atol=5e-3 * np.abs(state).max())


def test_last_tokens_are_those_of_the_states_cached_or_not(client, states):
    for _ in range(2):
        vectors = np.array(client.embed(TEXTS, pooling="last"))
        for vector, state in zip(vectors, states, strict=True):
            np.testing.assert_allclose(vector, normalized(state[-1]), atol=2e-4)


def test_a_mean_counts_what_the_cache_knows(client, states):
    client.generate(TEXTS[3], max_tokens=1).answer()
    np.testing.assert_allclose(client.embed(TEXTS[3:])[0], normalized(states[3].mean(axis=0)), atol=2e-4)


def test_token_ids_are_texts_that_were_cut_elsewhere(client):
    ids = client.tokenize(TEXTS[0])
    np.testing.assert_allclose(client.embed([ids]), client.embed(TEXTS[:1]), atol=1e-5)


def test_many_inputs_come_back_in_their_order_beside_a_stream(client):
    texts = [f"The robot counts to {number}." for number in range(10)]
    alone = {text: client.embed([text])[0] for text in texts[:3]}
    stream = iter(client.generate("Once upon a time", temperature=0.0, max_tokens=16, ignore_eos=True))
    next(stream)
    vectors = client.embed(texts)
    for text, vector in zip(texts, vectors, strict=False):
        if text in alone:
            np.testing.assert_allclose(vector, alone[text], atol=1e-5)
    assert len(set(vectors)) == len(texts)
    together = "".join(getattr(event, "text", "") for event in stream)
    assert (
        together
        == client.generate("Once upon a time", temperature=0.0, max_tokens=16, ignore_eos=True).answer().text
    )


def test_asyncio(daemon, client):
    async def embed():
        async with AsyncClient(daemon.address) as other:
            return await other.embed(TEXTS[:2], pooling="mean")

    np.testing.assert_allclose(asyncio.run(embed()), client.embed(TEXTS[:2]), atol=1e-5)


def test_what_cannot_work_is_refused(client):
    def refused(kind, match, inputs, **options):
        with pytest.raises(kind, match=match) as caught:
            client.embed(inputs, **options)
        return caught.value

    refused(InvalidArgumentError, "inputs has 0 entries; give 1 to 256", [])
    refused(InvalidArgumentError, "inputs has 257 entries", ["a"] * 257)
    error = refused(InvalidArgumentError, r"inputs\[1\] has 0 tokens", ["a", ""])
    assert error.field == "inputs[1].text"
    error = refused(InvalidArgumentError, r"inputs\[1\].*ids go from 0 to 49151", ["a", [5, 49152]])
    assert error.field == "inputs[1].token_ids.ids[1]"
    refused(InvalidArgumentError, r"inputs\[0\] has 1025 tokens.*at most 1024", [[7] * 1025])
    refused(InvalidArgumentError, "priority is 101", ["a"], priority=101)
    refused(InvalidArgumentError, "pooling is 'max'", ["a"], pooling="max")
    refused(InvalidArgumentError, "one text; give a list", "a")
    refused(NotFoundError, "there is no model", ["a"], model="other")
    refused(DeadlineError, "deadline|within the timeout", [TEXTS[3]] * 40, timeout=0.05)
    request = inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="a")], pooling=9)
    with client._failures(None), pytest.raises(InvalidArgumentError, match="pooling is 9"):
        _call(client, request)
    with pytest.raises(InvalidArgumentError, match=r"inputs\[0\] is empty; set text or token_ids"):
        _call(client, inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput()]))


def _call(client, request):
    with client._failures(None):
        return client._inference.Embed(request)


def test_a_model_that_is_not_set_up_for_it_says_so(start_daemon):
    with (
        start_daemon(fake={}).client() as client,
        pytest.raises(
            UnsupportedError, match=r"serves no embeddings: set models\[\]\.embeddings to last or mean"
        ),
    ):
        client.embed(["a"])
