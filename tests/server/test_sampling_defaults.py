"""What model folders say about sampling."""

from __future__ import annotations

import json

import pytest

from edged.errors import CheckpointError
from edged.server.sampling_defaults import read_sampling_defaults


def read(folder, content=None):
    if content is not None:
        (folder / "generation_config.json").write_text(json.dumps(content))
    sampling = read_sampling_defaults(folder, 100)
    return sampling.temperature, sampling.top_k, sampling.top_p


def test_a_silent_folder_is_greedy(tmp_path):
    assert read(tmp_path) == (0.0, 0, 1.0)
    assert read(tmp_path, {}) == (0.0, 0, 1.0)


def test_a_model_that_samples(tmp_path):
    content = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9}
    assert read(tmp_path, content) == (0.6, 20, 0.9)


def test_sampling_without_a_temperature_is_one(tmp_path):
    assert read(tmp_path, {"do_sample": True, "temperature": None}) == (1.0, 0, 1.0)


def test_do_sample_false_is_greedy_whatever_the_temperature(tmp_path):
    assert read(tmp_path, {"do_sample": False, "temperature": 0.6, "top_k": 5}) == (0.0, 5, 1.0)


def test_top_k_beyond_the_vocabulary_is_all(tmp_path):
    assert read(tmp_path, {"do_sample": True, "top_k": 5000}) == (1.0, 100, 1.0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"do_sample": True, "temperature": "hot"}, "temperature"),
        ({"do_sample": True, "temperature": True}, "temperature"),
        ({"do_sample": True, "temperature": -1}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -1}, "top_k"),
        ([], "object"),
    ],
)
def test_bad_values_name_their_key(tmp_path, content, said):
    with pytest.raises(CheckpointError, match=said):
        read(tmp_path, content)
