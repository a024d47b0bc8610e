"""Frequencies held to transformers' own functions."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from edged.models.architecture import Architecture

HEAD_DIM = 64
LONG = [1.0 + 0.5 * pair for pair in range(HEAD_DIM // 2)]
SHORT = [1.0 + 0.01 * pair for pair in range(HEAD_DIM // 2)]
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192},
    "llama3, 32 times": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 1024},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn without rounding": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "yarn with its factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 4096,
        "short_factor": SHORT,
        "long_factor": LONG,
    },
    "longrope with its factor": {
        "rope_type": "longrope",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "short_factor": SHORT,
        "long_factor": LONG,
    },
}


def config_of(parameters, theta=500000.0):
    return LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **parameters},
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("context_length", [2048, 100_000])
def test_frequencies_are_those_of_transformers(name, context_length):
    config = config_of(CASES[name])
    expected, factor = ROPE_INIT_FUNCTIONS[CASES[name]["rope_type"]](config, "cpu", seq_len=context_length)
    rope = Architecture.from_config(config.to_dict()).rope
    ours = rope.inverse_frequencies(HEAD_DIM, context_length)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected.numpy(), rtol=3e-6)  # fp32 there, rounded once here
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("theta", [10000.0, 5e6])
def test_plain_frequencies_are_powers_of_theta(theta):
    rope = Architecture.from_config(config_of({"rope_type": "default"}, theta).to_dict()).rope
    expected = [theta ** (-2 * pair / HEAD_DIM) for pair in range(HEAD_DIM // 2)]
    np.testing.assert_allclose(rope.inverse_frequencies(HEAD_DIM, 64), expected, rtol=1e-7)
    assert rope.attention_factor == 1.0


def test_longrope_switches_at_the_original_maximum_and_nowhere_else():
    rope = Architecture.from_config(config_of(CASES["longrope"]).to_dict()).rope
    at, above = rope.inverse_frequencies(HEAD_DIM, 4096), rope.inverse_frequencies(HEAD_DIM, 4097)
    np.testing.assert_allclose(
        at / above, np.array(LONG) / np.array(SHORT), rtol=3e-6
    )  # fp32 there, rounded once here
    assert (above == rope.inverse_frequencies(HEAD_DIM, 131072)).all()
