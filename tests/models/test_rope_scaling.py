"""The configuration's `rope_scaling` in the place of a model's own."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_architecture import LLAMA, MINICPM4_8B

from edged.config import ModelConfig, RopeScalingConfig
from edged.errors import CheckpointError
from edged.models.architecture import Architecture
from edged.models.rope_scaling import PRESETS


def test_the_presets_are_those_that_the_configuration_names():
    assert tuple(PRESETS) == RopeScalingConfig.__dataclass_fields__["preset"].metadata["choices"]


def test_a_preset_makes_a_128k_model_of_minicpm4():
    own = Architecture.from_config(MINICPM4_8B)
    a = Architecture.from_config(MINICPM4_8B, rope_scaling=RopeScalingConfig(preset="minicpm4-128k"))
    assert (a.max_position, a.rope.original_max_position, a.rope.attention_factor) == (131072, 32768, 1.0)
    assert own.max_position == 32768
    factors = np.array(a.rope.long_factor)
    assert len(factors) == 64
    assert a.rope.short_factor == a.rope.long_factor
    assert (np.diff(factors) > 0).all()
    # As published: the first, where it leaves the list for 32K, and the last.
    assert (factors[0], factors[21], factors[63]) == (
        0.9977997200264581,
        4.752651957515948,
        124.09569231686116,
    )
    plain = 10000.0 ** (-np.arange(64) / 64)
    for context in (4096, 131072):  # one list for every length
        assert np.allclose(a.rope.inverse_frequencies(128, context), plain / factors, rtol=1e-6)


def test_the_preset_of_minicpm4_1():
    config = json.loads(json.dumps(MINICPM4_8B))
    config["max_position_embeddings"] = 65536
    config["rope_scaling"]["original_max_position_embeddings"] = 65536
    a = Architecture.from_config(config, rope_scaling=RopeScalingConfig(preset="minicpm4.1-128k"))
    assert (a.max_position, a.rope.original_max_position, a.rope.attention_factor) == (131072, 65536, 1.0)
    assert (a.rope.long_factor[0], a.rope.long_factor[63]) == (0.9982316082870437, 126.01712561287873)


def test_a_preset_scales_no_angles_in_a_model_with_folded_factors():
    """CPM.cu's converter makes a llama of a minicpm; the usual formula would scale it by 1.064."""
    a = Architecture.from_config(
        {**LLAMA, "head_dim": 128}, rope_scaling=RopeScalingConfig(preset="minicpm4-128k")
    )
    assert a.rope.attention_factor == 1.0


def test_a_preset_for_other_heads_is_refused_by_name():
    with pytest.raises(CheckpointError, match="has 64; it must list 32 numbers") as caught:
        Architecture.from_config(LLAMA, rope_scaling=RopeScalingConfig(preset="minicpm4-128k"))
    assert caught.value.field == "rope_scaling.short_factor"


@pytest.mark.parametrize("spelling", ["rope_theta", "rope_parameters"])
def test_the_models_own_base_stays(spelling):
    config = {**LLAMA, "rope_theta": 777.0}
    if spelling == "rope_parameters":
        del config["rope_theta"]
        config["rope_parameters"] = {"rope_type": "linear", "factor": 9.0, "rope_theta": 777.0}
    yarn = RopeScalingConfig(type="yarn", factor=4.0)
    a = Architecture.from_config(config, rope_scaling=yarn)
    assert (a.rope.kind, a.rope.theta, a.rope.factor, a.rope.original_max_position) == (
        "yarn",
        777.0,
        4.0,
        8192,
    )
    assert a.max_position == 4 * 8192
    assert (
        Architecture.from_config(config, rope_scaling=RopeScalingConfig(type="default")).rope.kind
        == "default"
    )
    linear = Architecture.from_config(config, rope_scaling=RopeScalingConfig(type="linear", factor=2.0))
    assert (linear.rope.kind, linear.rope.factor, linear.max_position) == ("linear", 2.0, 16384)


def test_what_the_override_leaves_out_of_training_the_model_says():
    factors = tuple(1.0 + pair for pair in range(64))
    a = Architecture.from_config(
        MINICPM4_8B, rope_scaling=RopeScalingConfig(type="longrope", long_factor=factors)
    )
    assert a.rope.original_max_position == 32768
    assert a.rope.short_factor == a.rope.long_factor == factors
    top = {**MINICPM4_8B, "original_max_position_embeddings": 100}
    scaling = RopeScalingConfig(type="longrope", long_factor=factors, original_max_position_embeddings=200)
    assert Architecture.from_config(top, rope_scaling=scaling).rope.original_max_position == 200


def test_minicpm_takes_no_attention_factor():
    scaling = RopeScalingConfig(type="yarn", factor=4.0, attention_factor=1.1)
    with pytest.raises(CheckpointError, match=r"attention_factor 1\.1") as caught:
        Architecture.from_config(MINICPM4_8B, rope_scaling=scaling)
    assert caught.value.field == "rope_scaling.attention_factor"
    yarn = Architecture.from_config(MINICPM4_8B, rope_scaling=RopeScalingConfig(type="yarn", factor=4.0))
    assert yarn.rope.attention_factor == 1.0


def test_a_parameter_that_is_missing_is_named():
    with pytest.raises(CheckpointError) as caught:
        Architecture.from_config(LLAMA, rope_scaling=RopeScalingConfig(type="llama3", factor=8.0))
    assert caught.value.field == "original_max_position_embeddings"


def test_the_configured_model_has_the_scaling(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MINICPM4_8B))
    scaling = RopeScalingConfig(preset="minicpm4-128k")
    model = ModelConfig(name="m", path=tmp_path, rope_scaling=scaling)
    assert Architecture.of(model) == Architecture.from_config(MINICPM4_8B, rope_scaling=scaling)
    assert Architecture.of(ModelConfig(name="m", path=tmp_path)) == Architecture.read(tmp_path)
