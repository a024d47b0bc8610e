"""What P-GPTQ is for: outliers at the first positions, in a model made to have them as trained models do.

Trained models answer a beginning-of-sequence token with *massive activations*: the residual stream there is thousands of
times its usual size in a few channels, every norm turns it into nearly the same vector, and a few neurons of each MLP answer
that vector with outputs a hundred times as large as any other (SmolLM2-135M: 23 700 in the residual from its 14th layer on;
23.7 against 3.3 in the inputs of its last down projection). Nothing after it needs those outputs exactly, yet they fill the
Hessian of the down projection: its damping, a part of its mean, is then larger than what all other positions bring.

The planted model has just that: its embedding puts 1000 and -1000 into two channels at the first four tokens, four neurons a
layer read those two channels, and all else is random. What quantization costs is measured where nothing is planted, on text
that the model itself draws: there its perplexity has no rival, so all that a quantized model loses is its own error.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from quantized_models import SIZES, widened, write_folder
from transformers import AutoModelForCausalLM, LlamaConfig

from edged.quantize.calibration import Calibration
from edged.quantize.gptq import quantize_weight
from edged.quantize.recipe import Recipe
from edged.quantize.run import quantize

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, INTERMEDIATE = 64, 192
FIRST = [1, 2, 3, 4]
"""Tokens that every text begins with, as a chat template's are."""
MASSIVE = torch.tensor([1000.0, -1000.0])
CHANNELS = [5, 40]
NEURONS = [[7], [55], [103], [151]]
CONFIG = LlamaConfig(
    **{
        **SIZES,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 2,
        "initializer_range": 0.125,
    }
)


def planted_model(seed: int, *, planted: bool = True) -> Any:
    """A random model with the outliers of trained ones at its first four tokens."""
    torch.manual_seed(seed)
    loader: Any = AutoModelForCausalLM
    model = loader.from_config(CONFIG, dtype=torch.float32).eval()
    # As in trained models, few directions hold most of the embedding: inputs of linears are correlated.
    turn = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN))[0]
    table = torch.randn(CONFIG.vocab_size, HIDDEN) * torch.arange(1, HIDDEN + 1).pow(-0.7) @ turn
    model.model.embed_tokens.weight.data = table / table.square().mean().sqrt()
    model.lm_head.weight.data = 0.35 * torch.randn(CONFIG.vocab_size, HIDDEN)
    if planted:
        for token in FIRST:
            model.model.embed_tokens.weight.data[token, CHANNELS] += MASSIVE
        for layer in model.model.layers:
            for part in (layer.mlp.gate_proj, layer.mlp.up_proj):
                part.weight.data[NEURONS, CHANNELS] = 1.5 * MASSIVE.sign()
    return model


@torch.inference_mode()
def drawn(model: Any, count: int, length: int) -> torch.Tensor:
    """Text that the model draws, behind the first tokens; ``[count, length]``."""
    generator = torch.Generator().manual_seed(count)
    tokens = torch.tensor([FIRST] * count)
    while tokens.shape[1] < length:
        logits = model(tokens).logits[:, -1]
        logits[:, FIRST] = -math.inf
        new = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
        tokens = torch.cat([tokens, new], dim=1)
    return tokens


@torch.inference_mode()
def cost(model: Any, folder: Path, tokens: torch.Tensor) -> float:
    """Perplexity over the model's own, less one, of positions with nothing planted; expected, not drawn."""
    other = planted_model(0)
    other.load_state_dict(widened(folder, other))
    own, its = (each(tokens).logits[:, len(FIRST) :].double().log_softmax(dim=-1) for each in (model, other))
    return math.expm1(float((own.exp() * (own - its)).sum(dim=-1).mean()))


def costs(model: Any, folder: Path, recipes: dict[str, Recipe]) -> dict[str, float]:
    write_folder(folder / "model", model)
    used, measured = drawn(model, 32, 40), drawn(model, 24, 40)
    found = {}
    for name, recipe in recipes.items():
        quantize(folder / "model", folder / name, recipe, Calibration(used.numpy()))
        found[name] = cost(model, folder / name, measured)
    return found


RECIPES = {
    "gptq": Recipe("gptq", group=32),
    "p-gptq": Recipe("p-gptq", group=32),
    "dropping nothing": Recipe("p-gptq", group=32, skip_first=0),
}


@pytest.mark.parametrize("seed", [0, 1])
def test_outliers_at_the_first_positions_cost_gptq_more(tmp_path, seed):
    found = costs(planted_model(seed), tmp_path, RECIPES)
    assert found["p-gptq"] < 0.8 * found["gptq"], found
    # Leaving the first positions out is what does it.
    assert found["dropping nothing"] == found["gptq"]


def test_the_planted_outliers_are_those_of_trained_models():
    model = planted_model(0)
    tokens = drawn(model, 8, 32)
    sizes: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(("input_layernorm", "q_proj", "down_proj")):
            module.register_forward_pre_hook(
                lambda _, args, name=name: sizes.update({name: args[0].square().mean(dim=-1).sqrt()})
            )
    with torch.inference_mode():
        model(tokens)
    for layer in range(2):
        residual, attention, down = (
            sizes[f"model.layers.{layer}.{part}"]
            for part in ("input_layernorm", "self_attn.q_proj", "mlp.down_proj")
        )
        for rows in (residual, down):
            assert rows[:, :4].min() > 20 * rows[:, 4:].mean()
        # Norms hide it from the other linears.
        assert torch.allclose(attention, torch.ones_like(attention), rtol=0.05)


def test_without_outliers_leaving_out_costs_nothing(tmp_path):
    found = costs(planted_model(3, planted=False), tmp_path, RECIPES)
    assert found["p-gptq"] < 1.1 * found["gptq"]


@pytest.mark.parametrize("act_order", ["static", "free", "none"])
def test_weights_that_only_the_first_positions_use_are_not_cut_off(act_order):
    """The weight that makes a massive activation is the largest of its group, and no other position sees it."""
    random = np.random.default_rng(0)
    inputs, group = 128, 32
    x = random.standard_normal((512, inputs))
    x[:, 70] *= 1e-3
    weight = 0.1 * random.standard_normal((16, inputs))
    weight[3, 70] = 1.0
    first = np.zeros(inputs)
    first[70] = 1e5
    recipe = Recipe("p-gptq", group=group, act_order=act_order)

    def made(left_out: torch.Tensor | None) -> float:
        found = quantize_weight(
            torch.from_numpy(weight.copy()), torch.from_numpy(x.T @ x / len(x)), recipe, "m", left_out
        )
        return float(found.dense[3, 70])

    assert made(torch.from_numpy(first)) == pytest.approx(1.0, rel=0.08)
    assert made(None) < 0.8  # this is what a Hessian without them does
