"""Sequences side by side: the executor's logits, for every family and every packed form, prefilled or token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from executor_runner import Runner, load
from packed_models import MODELS as PACKED
from packed_models import write_packed
from test_quantized_models import CASES, quantized
from test_random_models import MODELS, save

from edged.errors import UnsupportedError
from edged.executor.torch_batch import BatchModel


@torch.inference_mode()
def check(folder, vocabulary, tolerance=2e-5):
    """A batch of three against the executor, one by one; the last tokens are decoded."""
    ids = np.random.default_rng(1).integers(0, vocabulary, (3, 40))
    executor = load(folder, dtype="float32", context_length=64, max_sequences=3, prefill_chunk=64)
    runner = Runner(executor)
    expected = np.stack([runner.prefill(runner.sequence(row), 64) for row in ids])  # [3, 40, V]
    model = BatchModel(folder, device="cpu", dtype=torch.float32, sequences=3, length=40)
    model.load(lambda *_: None)
    tokens = torch.from_numpy(ids)
    scale = np.abs(expected).max()
    whole = model.logits(model.read(tokens))
    assert np.abs(whole.numpy() - expected).max() < tolerance * scale
    model.kv.fill_(torch.nan)  # what is not stored must not be looked at
    model.read(tokens[:, :37])
    for position in range(37, 40):
        last = model.decode(tokens[:, position], position)
        assert np.abs(last.numpy() - expected[:, position]).max() < tolerance * scale


@pytest.mark.parametrize(
    "name", ["llama", "untied, with biases", "one KV head", "yarn rope", "qwen2", "qwen3"]
)
def test_families(name, tmp_path):
    save(MODELS[name], tmp_path)
    check(tmp_path, 211, 1e-4)


@pytest.mark.parametrize(
    "name", ["gptq with its head", "awq, group 128", "marlin, group 128", "ternary, group 32, biases"]
)
def test_packed_weights_are_widened(name, tmp_path):
    write_packed(tmp_path, *PACKED[name])
    check(tmp_path, 264)


@pytest.mark.parametrize("name", ["gptq_v2", "gptq, act-order", "gptq, an act-order each"])
def test_every_order_of_inputs(name, tmp_path):
    quantized(tmp_path, **CASES[name])
    check(tmp_path, 192)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused(tmp_path):
    save(MODELS["llama"], tmp_path)
    with pytest.raises(UnsupportedError, match="finds 0 CUDA devices here, and cuda was asked for"):
        BatchModel(tmp_path, device="cuda", dtype=torch.bfloat16, sequences=1, length=8)


@pytest.mark.gpu
@torch.inference_mode()
def test_a_recorded_step_decodes_as_reading_does(tmp_path):
    save(MODELS["qwen3"], tmp_path)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 211, (3, 40))).cuda()
    model = BatchModel(tmp_path, device="cuda", dtype=torch.float32, sequences=3, length=40)
    model.load(lambda *_: None)
    expected = model.logits(model.read(tokens))
    model.kv.zero_()
    model.read(tokens[:, :20])
    for position in range(20, 40):
        torch.testing.assert_close(
            model.decode(tokens[:, position], position), expected[:, position], rtol=0, atol=2e-3
        )
