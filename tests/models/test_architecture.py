from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.errors import CheckpointError
from edged.models.architecture import FAMILIES, Architecture
from edged.models.rope import KINDS

LLAMA = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
}
MINICPM4_8B = {
    "architectures": ["MiniCPMForCausalLM"],
    "model_type": "minicpm",
    "vocab_size": 73448,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 64,
        "long_factor": [2.0] * 64,
        "original_max_position_embeddings": 32768,
    },
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "mup_denominator": 32,
    "tie_word_embeddings": False,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
NEEDED = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
)


def refusal(config):
    with pytest.raises(CheckpointError) as caught:
        Architecture.from_config(config)
    return caught.value


def test_a_llama_config_gives_its_sizes():
    a = Architecture.from_config(LLAMA)
    assert (a.hidden, a.intermediate, a.layers, a.vocabulary) == (576, 1536, 30, 49152)
    assert (a.heads, a.kv_heads, a.head_dim, a.group) == (9, 3, 64, 3)
    assert (a.q_width, a.kv_width, a.qkv_width) == (576, 192, 960)
    assert (a.rope.theta, a.rope.kind, a.norm_eps, a.max_position) == (100000.0, "default", 1e-5, 8192)
    assert (a.tied, a.qk_norm, a.qkv_bias, a.output_bias, a.mlp_bias) == (False,) * 5
    assert (a.embedding_scale, a.residual_scale, a.logit_divisor) == (1.0, 1.0, 1.0)


def test_minicpm4_8b_gives_its_mup_factors():
    a = Architecture.from_config(MINICPM4_8B)
    assert a.embedding_scale == 12
    assert a.residual_scale == pytest.approx(0.24749, abs=1e-5)
    assert a.logit_divisor == 16
    assert (a.q_width, a.kv_width, a.tied) == (4096, 256, False)


@pytest.mark.parametrize("max_position", [32768, 131072])
def test_minicpm_never_scales_cos_and_sin(max_position):
    """The usual formula gives 1.064 when only the maximum position is raised to 128K."""
    a = Architecture.from_config({**MINICPM4_8B, "max_position_embeddings": max_position})
    assert a.rope.attention_factor == 1.0
    other = {**MINICPM4_8B, "model_type": "llama", "max_position_embeddings": 131072}
    assert Architecture.from_config(other).rope.attention_factor == pytest.approx(1.0646, abs=1e-3)


def test_minicpm_is_tied_unless_it_says_otherwise():
    config = {key: value for key, value in MINICPM4_8B.items() if key != "tie_word_embeddings"}
    assert Architecture.from_config(config).tied


def test_qwen2_has_biases_that_no_key_names_and_qwen3_has_norms():
    qwen2 = Architecture.from_config({**LLAMA, "model_type": "qwen2"})
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = Architecture.from_config({**LLAMA, "model_type": "qwen3", "head_dim": 128})
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)
    assert qwen3.q_width == 9 * 128


@pytest.mark.parametrize("key", NEEDED)
@pytest.mark.parametrize("absent", ["missing", None])
def test_a_needed_key_that_is_missing_is_named(key, absent):
    config = {**LLAMA, key: None} if absent is None else {k: v for k, v in LLAMA.items() if k != key}
    error = refusal(config)
    assert error.field == key
    assert f"{key} is missing" in error.message


@pytest.mark.parametrize("key", ["scale_emb", "scale_depth", "dim_model_base"])
def test_minicpm_needs_its_mup_keys(key):
    assert refusal({k: v for k, v in MINICPM4_8B.items() if k != key}).field == key


@pytest.mark.parametrize(
    ("model_type", "key"), [("qwen3", "head_dim"), ("qwen2", "rope_theta"), ("qwen3", "rope_theta")]
)
def test_a_family_needs_what_its_own_defaults_would_hide(model_type, key):
    config = {**LLAMA, "model_type": model_type, "head_dim": 64}
    assert refusal({k: v for k, v in config.items() if k != key}).field == key


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 2}, "num_attention_heads"),
        ({"hidden_size": 577}, "hidden_size"),
        ({"head_dim": 63}, "head_dim"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 576.0}, "hidden_size"),
        ({"vocab_size": 2**40}, "vocab_size"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"num_hidden_layers": 2**20}, "num_hidden_layers"),
        ({"quantization_config": 4}, "quantization_config"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.bits"),
        ({"quantization_config": {**GPTQ, "bits": 8}}, "quantization_config.bits"),
        ({"quantization_config": {**GPTQ, "group_size": 128}}, "quantization_config.group_size"),
        ({"quantization_config": {**GPTQ, "group_size": 0}}, "quantization_config.group_size"),
        ({"quantization_config": {**GPTQ, "group_size": 12}}, "quantization_config.group_size"),
        ({"quantization_config": {**GPTQ, "group_size": "64"}}, "quantization_config.group_size"),
        ({"quantization_config": {**GPTQ, "desc_act": 1}}, "quantization_config.desc_act"),
        (
            {"quantization_config": {**GPTQ, "checkpoint_format": "marlin"}},
            "quantization_config.checkpoint_format",
        ),
        ({"quantization_config": {**GPTQ, "is_marlin_format": True}}, "quantization_config.is_marlin_format"),
        ({"quantization_config": {**GPTQ, "dynamic": {"-:.*": {}}}}, "quantization_config.dynamic"),
        (
            {"quantization_config": {**GPTQ, "lm_head": True}, "tie_word_embeddings": True},
            "quantization_config.lm_head",
        ),
        (
            {"quantization_config": {**GPTQ, "modules_to_not_convert": "mlp"}},
            "quantization_config.modules_to_not_convert",
        ),
        ({"quantization_config": {**AWQ, "version": "gemv"}}, "quantization_config.version"),
        ({"quantization_config": {**AWQ, "zero_point": False}}, "quantization_config.zero_point"),
        ({"quantization_config": GPTQ, "intermediate_size": 1504}, "quantization_config.group_size"),
        (
            {"quantization_config": {**GPTQ, "group_size": -1}, "intermediate_size": 1540},
            "quantization_config.group_size",
        ),
        ({"num_experts": 8}, "num_experts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"type": "su"}}, "rope_scaling.type"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings"),
        (
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 64,
                    "short_factor": [1.0] * 31,
                    "long_factor": [1.0] * 32,
                }
            },
            "rope_scaling.short_factor",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 64,
                    "short_factor": [1.0] * 32,
                    "long_factor": [0.0] * 32,
                }
            },
            "rope_scaling.long_factor",
        ),
        *(
            (
                {
                    "rope_scaling": {
                        "rope_type": "longrope",
                        "original_max_position_embeddings": 64,
                        "short_factor": [1.0] * 31 + [bad],
                        "long_factor": [1.0] * 32,
                    }
                },
                "rope_scaling.short_factor",
            )
            for bad in (10**400, float("nan"), float("inf"), -1.0, "1", True, None, [])
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, "rope_parameters.rope_theta"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(change, field):
    error = refusal({**LLAMA, **change})
    assert error.field == field
    assert field in error.message


def test_messages_name_what_is_supported():
    assert all(name in refusal({**LLAMA, "model_type": "gemma"}).message for name in FAMILIES)
    kinds = refusal({**LLAMA, "rope_scaling": {"rope_type": "mrope"}}).message
    assert all(kind in kinds for kind in KINDS)


def test_both_spellings_of_the_rope_keys_are_one():
    old = Architecture.from_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100000.0}
    assert Architecture.from_config(new) == old


def test_reading_a_folder_names_the_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: this file is missing"):
        Architecture.read(tmp_path)
    file = tmp_path / "config.json"
    for content, why in (
        ("{", "cannot be read"),
        ("[]", "JSON object"),
        ("\xff", "cannot be read"),
        ("{}", "missing"),
    ):
        file.write_text(content, "latin-1")
        with pytest.raises(CheckpointError, match=why) as caught:
            Architecture.read(tmp_path)
        assert str(file) in caught.value.message
    file.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Architecture.read(tmp_path)
    file.write_text(json.dumps(LLAMA))
    assert Architecture.read(tmp_path) == Architecture.from_config(LLAMA)


def test_a_gptq_configuration_says_what_is_quantized():
    a = Architecture.from_config(
        {
            **LLAMA,
            "quantization_config": {
                **GPTQ,
                "desc_act": True,
                "modules_to_not_convert": ["layers.3.", "o_proj"],
            },
        }
    )
    q = a.quantization
    assert (q.method, q.group, q.act_order, q.zero_offset, q.head) == ("gptq", 64, True, 1, False)
    assert q.covers("model.layers.2.mlp.up_proj")
    assert not any(
        map(q.covers, ("model.layers.3.mlp.up_proj", "model.layers.2.self_attn.o_proj", "lm_head"))
    )
    for key in ("checkpoint_format", "format"):
        second = Architecture.from_config({**LLAMA, "quantization_config": {**GPTQ, key: "gptq_v2"}})
        assert second.quantization.zero_offset == 0
    awq = Architecture.from_config({**LLAMA, "quantization_config": AWQ}).quantization
    assert (awq.method, awq.group, awq.zero_offset) == ("awq", 64, 0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(string.printable, max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(sorted(MINICPM4_8B)), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from([*MINICPM4_8B, "rope_parameters", "layer_types", "mlp_bias", "quantization_config"]),
        JSON,
        max_size=6,
    )
)
def test_no_content_breaks_the_reader(change):
    try:
        Architecture.from_config({**MINICPM4_8B, **change})
    except CheckpointError as error:
        assert error.message  # noqa: PT017 - any other exception fails the test


def test_a_file_where_a_folder_should_be_says_how_to_make_one(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        CheckpointError, match=r"model\.gguf: is a file, and a model is a folder.*edgectl import"
    ):
        Architecture.read(tmp_path / "model.gguf")
