"""The architectures of GGUF files beyond llama: a model as llama.cpp's converter would write it comes back as it was."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_gguf_import import permuted
from test_gguf_import_refusals import refused

from edged.checkpoint.gguf_import import import_gguf
from edged.models.architecture import Architecture
from edged.models.folder import check_folder

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 64
FACTORS = [1.0 + 0.5 * pair for pair in range(HEAD_DIM // 2)]
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "minicpm": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
# llama_model_rope_type() of llama.cpp: NORM for these, whose converters permute q and k; NEOX for the others.
PERMUTED = ("llama", "minicpm")


def random_model(architecture: str, vocabulary: int, *, tied: bool) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[architecture](
        vocab_size=vocabulary,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
    )
    loader: Any = transformers.AutoModelForCausalLM
    model = loader.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
    return model


def as_converted(recipe: Any, architecture: str, model: Any, *, tied: bool) -> Any:
    """The recipe with the metadata and the tensors that llama.cpp's converter writes."""
    recipe.architecture = architecture
    recipe.metadata = {
        key.replace("llama.", f"{architecture}.", 1): value for key, value in recipe.metadata.items()
    } | {
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{architecture}.rope.freq_base": 10000.0,
    }
    if architecture == "qwen3":
        recipe.metadata |= {"qwen3.attention.key_length": HEAD_DIM, "qwen3.attention.value_length": HEAD_DIM}
    kinds = {"llama": "LLAMA", "minicpm": "MINICPM", "qwen2": "QWEN2", "qwen3": "QWEN3"}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kinds[architecture]], LAYERS)
    recipe.tensors = {}
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        array = tensor.numpy()
        if architecture in PERMUTED and ".q_proj." in name:
            array = permuted(array, HEADS)
        elif architecture in PERMUTED and ".k_proj." in name:
            array = permuted(array, KV_HEADS)
        stem, suffix = name.rsplit(".", 1)
        recipe.tensors[f"{names.get_name(stem)}.{suffix}"] = array
    return recipe


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", list(CONFIGS))
def test_a_converted_model_comes_back_as_it_was(
    tmp_path: Path, recipe: Any, architecture: str, tied: bool
) -> None:
    model = random_model(architecture, len(recipe.metadata["tokenizer.ggml.tokens"]), tied=tied)
    as_converted(recipe, architecture, model, tied=tied)
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    expected = {
        name: item for name, item in model.state_dict().items() if not tied or name != "lm_head.weight"
    }
    assert set(weights) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
    check_folder(tmp_path / "model")
    assert Architecture.read(tmp_path / "model").tied == tied
    if architecture != "minicpm":  # which transformers does not have
        loader: Any = transformers.AutoModelForCausalLM
        loaded = loader.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
        ids = torch.arange(9)[None]
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, model(ids).logits)


SCALES = {
    "minicpm.embedding_scale": 12.0,
    "minicpm.residual_scale": 1.4 / LAYERS**0.5,
    "minicpm.logit_scale": HEADS * HEAD_DIM / 256,
}


@pytest.mark.parametrize("stated", [True, False])
def test_minicpms_scales_are_those_of_its_own_configuration(
    tmp_path: Path, recipe: Any, stated: bool
) -> None:
    model = random_model("minicpm", len(recipe.metadata["tokenizer.ggml.tokens"]), tied=True)
    as_converted(recipe, "minicpm", model, tied=True)
    if stated:
        recipe.metadata |= SCALES
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("minicpm", ["MiniCPMForCausalLM"])
    assert (config["scale_emb"], config["scale_depth"], config["dim_model_base"]) == (12.0, 1.4, 256)
    a = Architecture.read(tmp_path / "model")
    assert (a.embedding_scale, a.logit_divisor) == (12.0, HEADS * HEAD_DIM / 256)
    assert a.residual_scale == pytest.approx(1.4 / LAYERS**0.5, rel=1e-12)


@pytest.mark.parametrize("depth", [1.4, 1.0, 0.83, 2.5])
@pytest.mark.parametrize("layers", [24, 32, 40, 52])
def test_a_residual_scale_is_the_depth_that_it_came_from(depth: float, layers: int) -> None:
    from edged.checkpoint.gguf_llama import _decimal

    stored = float(np.float32(depth / layers**0.5))
    assert _decimal(stored, 1 / layers**0.5) == depth


def test_minicpms_longrope_comes_with_its_tensors(tmp_path: Path, recipe: Any) -> None:
    model = random_model("minicpm", len(recipe.metadata["tokenizer.ggml.tokens"]), tied=True)
    as_converted(recipe, "minicpm", model, tied=True)
    recipe.metadata["minicpm.rope.scaling.type"] = "longrope"
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        recipe.tensors[name] = np.array(FACTORS, np.float32)
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model")
    rope = Architecture.read(tmp_path / "model").rope
    assert (rope.kind, rope.original_max_position, rope.attention_factor) == ("longrope", 4096, 1.0)
    assert rope.short_factor == rope.long_factor == tuple(FACTORS)


@pytest.mark.parametrize("key", list(SCALES))
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_none_are_refused(tmp_path: Path, recipe: Any, key: str, value: float) -> None:
    model = random_model("minicpm", len(recipe.metadata["tokenizer.ggml.tokens"]), tied=True)
    as_converted(recipe, "minicpm", model, tied=True)
    recipe.metadata |= {**SCALES, key: value}
    refused(recipe, tmp_path, "positive")


def test_tensors_of_another_architecture_have_no_place(tmp_path: Path, recipe: Any) -> None:
    model = random_model("qwen3", len(recipe.metadata["tokenizer.ggml.tokens"]), tied=True)
    as_converted(recipe, "qwen3", model, tied=True)
    recipe.architecture = "qwen2"
    recipe.metadata = {key.replace("qwen3.", "qwen2.", 1): value for key, value in recipe.metadata.items()}
    refused(
        recipe, tmp_path, r"missing tensors: blk\.\{0-1\}\.attn_q\.bias.*place: blk\.\{0-1\}\.attn_q_norm"
    )
