"""P-GPTQ on a model whose first four positions have activations far above all others."""

from __future__ import annotations

import numpy as np
import torch
from conftest import random_model, widened, write_folder

from edged.quantize.calibration import Calibration
from edged.quantize.recipe import Recipe
from edged.quantize.run import quantize


def planted() -> torch.nn.Module:
    """Tokens 1 to 4 lie along one channel, which the MLPs make large and no other token has."""
    model = random_model()
    table = model.model.embed_tokens.weight.data
    table[:, 0] = 0
    table[1:5] *= 0.1
    table[1:5, 0] = 20
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.data[:, 0] *= 6
        layer.mlp.up_proj.weight.data[:, 0] *= 6
    return model


def sequences(seed: int, count: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    tokens = random.integers(5, 264, (count, 40))
    tokens[:, :4] = [1, 2, 3, 4]
    return tokens


def test_leaving_them_out_serves_the_others_better(tmp_path):
    model = planted()
    folder = write_folder(tmp_path / "m", model)
    held_out = torch.from_numpy(sequences(1, 16))
    with torch.inference_mode():
        exact = model(held_out).logits[:, 4:].log_softmax(-1)
    divergences = {}
    for method in ("gptq", "p-gptq"):
        quantize(folder, tmp_path / method, Recipe(method, group=32), Calibration(sequences(0, 16)))
        quantized = planted()
        quantized.load_state_dict(widened(tmp_path / method, quantized))
        with torch.inference_mode():
            found = quantized(held_out).logits[:, 4:].log_softmax(-1)
        divergences[method] = float((exact.exp() * (exact - found)).sum(-1).mean())
    assert divergences["p-gptq"] < 0.95 * divergences["gptq"]
