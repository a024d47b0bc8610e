"""Real head layouts with every scaling of the rotary embedding, in fp32, held to transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from executor_runner import Runner, load, reference_logits
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from edged.config import RopeScalingConfig

if TYPE_CHECKING:
    from pathlib import Path

LAYOUTS = {
    "MiniCPM4-8B": (32, 2, 128),
    "MiniCPM4-0.5B": (16, 2, 64),
    "BitCPM4-1B": (24, 8, 64),
    "MiniCPM5": (16, 2, 128),
    "SmolLM2": (9, 3, 64),
}
ORIGINAL = 110
VOCABULARY = 211
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BOUND = 1e-4


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    scaling = {"rope_type": kind, "rope_theta": 10000.0, **parameters}
    if kind != "default":
        scaling["original_max_position_embeddings"] = ORIGINAL
    return {"rope_parameters": scaling}


def factors(head_dim: int, step: float) -> list[float]:
    return [1.0 + step * pair for pair in range(head_dim // 2)]


def config_of(layout: str, kind: str) -> Any:
    heads, kv_heads, head_dim = LAYOUTS[layout]
    scaling = {
        "default": rope("default"),
        "qwen3": rope("default"),
        "llama3": rope("llama3", **LLAMA3),
        "yarn": rope("yarn", factor=4.0),
        "longrope": rope(
            "longrope", short_factor=factors(head_dim, 0.1), long_factor=factors(head_dim, 0.7), factor=4.0
        ),
    }[kind]
    return (Qwen3Config if kind == "qwen3" else LlamaConfig)(
        vocab_size=VOCABULARY,
        hidden_size=8 * heads,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4 * ORIGINAL,
        rms_norm_eps=1e-6,
        initializer_range=0.2,
        **scaling,
    )


def random_model(config: Any) -> Any:
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # norms begin as ones, which would hide one that is not used
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
    return model


def errors(
    folder: Path, model: Any, *, tokens: int, context: int, positions: tuple[int, ...], **settings: Any
) -> list[float]:
    """Relative errors of the logits at some positions of a random prompt."""
    ids = np.random.default_rng(2).integers(0, VOCABULARY, tokens).tolist()
    runner = Runner(
        load(folder, dtype="float32", context_length=context, max_sequences=1, prefill_chunk=100, **settings)
    )
    ours = runner.prefill(runner.sequence(ids), 100)
    expected = reference_logits(model, ids)
    return [float(np.abs(ours[at] - expected[at]).max() / np.abs(expected[at]).max()) for at in positions]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["default", "qwen3", "llama3", "yarn", "longrope"])
def test_logits_at_the_start_and_past_the_original_maximum(tmp_path: Path, layout: str, kind: str) -> None:
    model = random_model(config_of(layout, kind))
    model.save_pretrained(tmp_path)
    past = errors(tmp_path, model, tokens=140, context=256, positions=(1, 100, 139))
    assert max(past) < BOUND, past
    if kind == "longrope":  # a context that fits the original length has the other factors
        inside = errors(tmp_path, model, tokens=105, context=ORIGINAL, positions=(1, 100))
        assert max(inside) < BOUND, inside


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["MiniCPM4-8B", "MiniCPM4-0.5B", "BitCPM4-1B"])
def test_minicpm_is_llama_with_its_factors_folded_in(tmp_path: Path, layout: str, tied: bool) -> None:
    """Embedding x scale_emb, branches x scale_depth / sqrt(layers), LM head / (hidden / dim_model_base)."""
    heads, _, head_dim = LAYOUTS[layout]
    config = config_of(layout, "longrope")
    config.rope_parameters = {
        **rope("longrope", short_factor=factors(head_dim, 0.3), long_factor=factors(head_dim, 0.3))[
            "rope_parameters"
        ],
        "attention_factor": 1.0,
    }
    model = random_model(config)
    if tied:
        with torch.no_grad():
            model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    mup = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16, "tie_word_embeddings": tied}
    written = json.loads(file.read_text())
    del written["rope_parameters"]["attention_factor"]
    file.write_text(json.dumps({**written, "model_type": "minicpm", **mup}))
    with torch.no_grad():
        model.model.embed_tokens.weight *= 12
        model.lm_head.weight /= 8 * heads / 16
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 1.4 / 2**0.5
            layer.mlp.down_proj.weight *= 1.4 / 2**0.5
    found = errors(tmp_path, model, tokens=140, context=256, positions=(1, 100, 139))
    assert max(found) < BOUND, found


@pytest.mark.parametrize("kind", ["llama3", "yarn", "longrope"])
def test_the_configurations_rope_scaling_is_that_of_a_model_that_has_it(tmp_path: Path, kind: str) -> None:
    model = random_model(config_of("SmolLM2", kind))
    model.save_pretrained(tmp_path)
    parameters = model.config.rope_parameters
    file = tmp_path / "config.json"
    plain = {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_parameters": plain}))
    written = {name: item for name, item in parameters.items() if name not in ("rope_type", "rope_theta")}
    lists = {name: tuple(item) for name, item in written.items() if isinstance(item, list)}
    scaling = RopeScalingConfig(type=kind, **{**written, **lists})
    past = errors(tmp_path, model, tokens=140, context=256, positions=(1, 100, 139), rope_scaling=scaling)
    assert max(past) < BOUND, past
    assert min(errors(tmp_path, model, tokens=140, context=256, positions=(100, 139))) > 10 * BOUND
