"""What model folders say about generation."""

from __future__ import annotations

import json

import pytest

from edged.errors import CheckpointError
from edged.server.generation_defaults import GenerationDefaults


def load(folder, model=None, generation=None):
    (folder / "config.json").write_text(json.dumps({"vocab_size": 100} if model is None else model))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return GenerationDefaults.load(folder)


def test_a_silent_folder_is_greedy(tmp_path):
    defaults = load(tmp_path)
    assert (defaults.sampling.temperature, defaults.sampling.top_k, defaults.sampling.top_p) == (0.0, 0, 1.0)
    assert defaults.eos_token_ids == ()
    assert defaults.vocabulary == 100


def test_a_model_that_samples(tmp_path):
    defaults = load(tmp_path, generation={"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9})
    assert (defaults.sampling.temperature, defaults.sampling.top_k, defaults.sampling.top_p) == (0.6, 20, 0.9)


def test_sampling_without_a_temperature_is_one(tmp_path):
    assert load(tmp_path, generation={"do_sample": True}).sampling.temperature == 1.0


def test_do_sample_false_is_greedy_whatever_the_temperature(tmp_path):
    assert load(tmp_path, generation={"do_sample": False, "temperature": 0.6}).sampling.temperature == 0.0


def test_top_k_beyond_the_vocabulary_is_all(tmp_path):
    assert load(tmp_path, generation={"do_sample": True, "top_k": 5000}).sampling.top_k == 100


@pytest.mark.parametrize(("value", "ids"), [(2, (2,)), ([2, 0], (2, 0)), (None, ())])
def test_ends_of_sequence(tmp_path, value, ids):
    assert load(tmp_path, generation={"eos_token_id": value}).eos_token_ids == ids


def test_ends_come_from_the_model_where_generation_is_silent(tmp_path):
    assert load(tmp_path, model={"vocab_size": 10, "eos_token_id": 3}, generation={}).eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("model", "generation", "said"),
    [
        ({}, None, "vocab_size"),
        ({"vocab_size": "many"}, None, "vocab_size"),
        ([], None, "object"),
        (None, {"do_sample": True, "temperature": "hot"}, "temperature"),
        (None, {"do_sample": True, "temperature": -1}, "temperature"),
        (None, {"top_p": 2.0}, "top_p"),
        (None, {"eos_token_id": 100}, "eos_token_id"),
        (None, {"eos_token_id": [True]}, "eos_token_id"),
    ],
)
def test_bad_values_name_their_key(tmp_path, model, generation, said):
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path, model=model, generation=generation)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        GenerationDefaults.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        GenerationDefaults.load(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is not JSON"):
        GenerationDefaults.load(tmp_path)
