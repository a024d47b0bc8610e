"""Published configurations: they are read, and give the sizes that their models are known to have."""

from __future__ import annotations

import pytest

from edged.errors import CheckpointError
from edged.models.architecture import Architecture
from edged.models.weights import packed_count, parameter_count

COMMON = {"hidden_act": "silu", "torch_dtype": "bfloat16", "use_cache": True, "initializer_range": 0.02}
MINICPM = {
    **COMMON,
    "architectures": ["MiniCPMForCausalLM"],
    "model_type": "minicpm",
    "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMConfig"},
    "bos_token_id": 1,
    "eos_token_id": [2, 73440],
    "vocab_size": 73448,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "mup_denominator": 32,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "pretraining_tp": 1,
}


def longrope(pairs, original):
    factors = [1.0 + pair for pair in range(pairs)]
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "original_max_position_embeddings": original,
    }


MINICPM4_8B = {
    **MINICPM,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "rope_scaling": longrope(64, 32768),
}
MINICPM41_8B = {**MINICPM4_8B, "max_position_embeddings": 65536, "rope_scaling": longrope(64, 65536)}
MINICPM4_05B = {
    **MINICPM,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 32768,
    "rope_scaling": longrope(32, 32768),
}
BITCPM4_1B = {
    **MINICPM,
    "hidden_size": 1536,
    "intermediate_size": 3840,
    "num_hidden_layers": 52,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "rope_scaling": longrope(32, 32768),
}
MINICPM5 = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 130560,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 5000000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
MINICPM5_1B = {**MINICPM5, "hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 24}
MINICPM5_2B = {**MINICPM5, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 42}
LLAMA31_8B = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "pretraining_tp": 1,
    "attention_dropout": 0.0,
}
QWEN3_8B = {
    **COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
SMOLLM2_135M = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "rope_interleaved": False,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "is_llama_config": True,
}
GPTQ = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "damp_percent": 0.01,
    "desc_act": False,
    "group_size": 128,
    "lm_head": False,
    "model_file_base_name": None,
    "model_name_or_path": None,
    "quant_method": "gptq",
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
}
KIB = 1024


@pytest.mark.parametrize(
    ("config", "parameters", "tolerance", "kv_bytes"),
    [
        (MINICPM4_8B, 16.4e9 / 2, 0.005, 32 * KIB),
        (MINICPM41_8B, 16.4e9 / 2, 0.005, 32 * KIB),
        (MINICPM4_05B, 868e6 / 2, 0.002, 12 * KIB),
        (MINICPM5_1B, 1_080_632_832, 0, 24 * KIB),
        (MINICPM5_2B, 2_516_756_480, 0, 42 * KIB),
        (LLAMA31_8B, 8_030_261_248, 0, 128 * KIB),
        (QWEN3_8B, 8_190_735_360, 0, 144 * KIB),
        (SMOLLM2_135M, 134_515_008, 0, 2 * 30 * 192 * 2),
    ],
    ids=lambda each: each["model_type"] if isinstance(each, dict) else None,
)
def test_sizes_are_the_published_ones(config, parameters, tolerance, kv_bytes):
    a = Architecture.from_config(config)
    assert parameter_count(a) == pytest.approx(parameters, rel=tolerance, abs=0)
    assert 2 * a.layers * a.kv_width * 2 == kv_bytes


def test_mup_factors_are_the_published_ones():
    for config, depth, divisor in (
        (MINICPM4_8B, 0.24749, 16),
        (MINICPM4_05B, 0.28577, 4),
        (BITCPM4_1B, 0.19415, 6),
    ):
        a = Architecture.from_config(config)
        assert (a.embedding_scale, a.logit_divisor) == (12, divisor)
        assert a.residual_scale == pytest.approx(depth, abs=1e-5)
        assert a.rope.attention_factor == 1.0
    assert [Architecture.from_config(each).tied for each in (MINICPM4_8B, MINICPM4_05B, BITCPM4_1B)] == [
        False,
        True,
        True,
    ]


def test_every_linear_of_a_gptq_minicpm4_is_in_4_bits():
    a = Architecture.from_config({**MINICPM4_8B, "quantization_config": GPTQ})
    assert packed_count(a) == 32 * (4096 * (4096 + 512) + 4096 * 4096 + 3 * 4096 * 16384)


def test_what_is_of_another_kind_is_refused_by_name():
    with pytest.raises(CheckpointError, match="model_type 'minicpm_sala' is not supported"):
        Architecture.from_config({**MINICPM4_8B, "model_type": "minicpm_sala"})
    with pytest.raises(CheckpointError, match="num_experts"):
        Architecture.from_config({**QWEN3_8B, "num_experts": 128})
