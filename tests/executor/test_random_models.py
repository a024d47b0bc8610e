"""Small random models of every family, saved by transformers and held to it; float64, so that rounding hides nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from executor_runner import Runner, assert_greedy, load, reference_logits
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from edged.errors import CheckpointError

HALF = 16
COMMON = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2 * HALF,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}


def rope(kind, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


LONG = [1.0 + 0.7 * pair for pair in range(HALF)]
SHORT = [1.0 + 0.1 * pair for pair in range(HALF)]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "untied, with biases": LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "one KV head": LlamaConfig(**{**COMMON, "num_key_value_heads": 1}),
    "as many KV heads as heads": LlamaConfig(**{**COMMON, "num_key_value_heads": 4}),
    "linear rope": LlamaConfig(**COMMON, **rope("linear", factor=4.0)),
    "llama3 rope": LlamaConfig(**COMMON, **rope("llama3", original_max_position_embeddings=64, **LLAMA3)),
    "yarn rope": LlamaConfig(**COMMON, **rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "longrope": LlamaConfig(
        **COMMON,
        **rope("longrope", original_max_position_embeddings=64, short_factor=SHORT, long_factor=LONG),
    ),
    "qwen2": Qwen2Config(**{key: value for key, value in COMMON.items() if key != "head_dim"}),
    "qwen3": Qwen3Config(**COMMON, attention_bias=True),
}


def randomize(model):
    """Norms and biases start as ones and zeros, which would hide a weight that is not used."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)


def save(config, folder):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    randomize(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_tokens_are_those_of_transformers(name, tmp_path):
    model = save(MODELS[name], tmp_path)
    executor = load(tmp_path, dtype="float64", context_length=512, max_sequences=3, prefill_chunk=64)
    runner = Runner(executor)
    ids = np.random.default_rng(1).integers(0, 211, 200).tolist()
    expected = reference_logits(model, ids)
    ours = runner.prefill(runner.sequence(ids), 50)
    scale = np.abs(expected).max()
    assert (
        np.abs(ours - expected).max() / scale < 5e-5
    )  # logits() returns fp32, and fp32 rope tables round differently
    answer = runner.generate([runner.sequence(ids, room=32)], 32)[0]
    assert_greedy(model, ids, answer)
    with torch.inference_mode():
        states = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()
    found = runner.hidden_states(runner.sequence(ids), 60)
    assert np.abs(found - states).max() / np.abs(states).max() < 5e-5


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 2, 128), (16, 2, 64), (24, 8, 64), (16, 2, 128), (9, 3, 64)]
)
def test_real_head_layouts_in_fp32(heads, kv_heads, head_dim, tmp_path):
    config = LlamaConfig(
        **{
            **COMMON,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "hidden_size": 8 * heads,
            "num_hidden_layers": 2,
            **rope("llama3", original_max_position_embeddings=64, **LLAMA3),
        }
    )
    model = save(config, tmp_path).float()
    runner = Runner(load(tmp_path, dtype="float32", context_length=256, max_sequences=2, prefill_chunk=100))
    ids = np.random.default_rng(2).integers(0, 211, 130).tolist()
    expected = reference_logits(model, ids)
    ours = runner.prefill(runner.sequence(ids), 100)
    for position in (1, 100, 129):  # the last is past the original maximum
        error = np.abs(ours[position] - expected[position]).max() / np.abs(expected[position]).max()
        assert error < 1e-4


def test_minicpm_is_llama_with_the_mup_factors_folded_in(tmp_path):
    """Exact algebra: embedding x 12, branches x scale_depth / sqrt(layers), LM head / (hidden / dim_model_base)."""
    scale_emb, scale_depth, base, layers = 12, 1.4, 16, 3
    torch.manual_seed(5)
    config = LlamaConfig(
        **COMMON,
        **rope("longrope", original_max_position_embeddings=2048, short_factor=SHORT, long_factor=SHORT),
    )
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    randomize(plain)
    plain.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    written = json.loads(file.read_text())
    written.update(
        model_type="minicpm",
        scale_emb=scale_emb,
        scale_depth=scale_depth,
        dim_model_base=base,
        tie_word_embeddings=False,
    )
    file.write_text(json.dumps(written))
    with torch.no_grad():
        plain.model.embed_tokens.weight *= scale_emb
        plain.lm_head.weight /= COMMON["hidden_size"] / base
        for layer in plain.model.layers:
            layer.self_attn.o_proj.weight *= scale_depth / layers**0.5
            layer.mlp.down_proj.weight *= scale_depth / layers**0.5
    runner = Runner(load(tmp_path, dtype="float64", context_length=512, max_sequences=2, prefill_chunk=64))
    ids = np.random.default_rng(3).integers(0, 211, 150).tolist()
    expected = reference_logits(plain, ids)
    ours = runner.prefill(runner.sequence(ids), 64)
    assert np.abs(ours - expected).max() / np.abs(expected).max() < 1e-5


def test_longrope_keeps_the_table_that_the_context_length_chose(tmp_path):
    """A short prompt in a long context uses the long factors at once: later tokens never change earlier keys."""
    model = save(MODELS["longrope"], tmp_path)
    long = Runner(load(tmp_path, dtype="float64", context_length=512, max_sequences=1, prefill_chunk=200))
    short = Runner(load(tmp_path, dtype="float64", context_length=64, max_sequences=1, prefill_chunk=64))
    ids = np.random.default_rng(4).integers(0, 211, 120).tolist()
    expected = reference_logits(
        model, ids
    )  # longer than 64: transformers takes the long factors for all of it
    ours = long.prefill(long.sequence(ids[:60]), 60)
    assert np.abs(ours - expected[:60]).max() / np.abs(expected).max() < 1e-5
    expected = reference_logits(model, ids[:60])
    ours = short.prefill(short.sequence(ids[:60]), 60)
    assert np.abs(ours - expected).max() / np.abs(expected).max() < 1e-5


def test_a_tied_checkpoint_may_repeat_its_head(tmp_path):
    from safetensors.torch import load_file, save_file

    save(MODELS["llama"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path, dtype="float32", context_length=64, max_sequences=1, prefill_chunk=8).close()


def test_weights_that_do_not_fit_are_refused_and_listed(tmp_path):
    from safetensors.torch import load_file, save_file

    save(MODELS["llama"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.surprise"] = torch.zeros(3)
    tensors["model.norm.weight"] = torch.ones(63)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, dtype="float32", context_length=64, max_sequences=1, prefill_chunk=8)
    for name in (
        "layers.1.mlp.up_proj.weight",
        "layers.2.mlp.surprise",
        "model.norm.weight is [63] instead of [64]",
    ):
        assert name in caught.value.message


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_is_refused_by_name(tmp_path, bad):
    from safetensors.torch import load_file, save_file

    save(MODELS["llama"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][5] = bad
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.input_layernorm\.weight.*NaN or infinity"):
        load(tmp_path, dtype="float32", context_length=64, max_sequences=1, prefill_chunk=8)


def test_a_weight_that_float16_cannot_hold_is_refused_by_name(tmp_path):
    from safetensors.torch import load_file, save_file

    save(MODELS["llama"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"][3, 3] = 1e6
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"k_proj\.weight.*float16"):
        load(tmp_path, dtype="float16", context_length=64, max_sequences=1, prefill_chunk=8)
    load(tmp_path, dtype="bfloat16", context_length=64, max_sequences=1, prefill_chunk=8).close()
