from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from pathlib import Path


def test_demo_weights_equal_those_of_transformers_bit_for_bit(demo_gguf: Path, demo_model: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(
        demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32
    )
    weights = load_file(demo_model / "model.safetensors")
    expected = reference.state_dict()
    expected.pop("lm_head.weight")  # tied
    assert set(weights) == set(expected)
    assert json.loads((demo_model / "config.json").read_text())["tie_word_embeddings"] is True
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name
