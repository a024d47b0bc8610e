"""What is written, as other programs read it, and the tokens that edged makes of it.

Readers here share no code with the product: transformers for the configuration and the forward, and the format's definition
(tests/quantized_files.py) for weights.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from quantized_models import random_model, widened, write_folder
from safetensors.numpy import load_file
from transformers import AutoConfig, GPTQConfig

from edged.config import ModelConfig
from edged.executor.base import SamplingRow, StepBatch
from edged.executor.torch_executor import TorchExecutor
from edged.quantize.calibration import Calibration
from edged.quantize.recipe import Recipe
from edged.quantize.run import quantize

if TYPE_CHECKING:
    from pathlib import Path

RECIPES = {
    "rtn": Recipe("rtn", group=32),
    "gptq": Recipe("gptq", group=32, symmetric=False),
    "p-gptq": Recipe("p-gptq", group=16, act_order="free"),
    "awq-gptq": Recipe("awq-gptq", group=32, skip_first=4),
    "a row": Recipe("gptq", group=0, head=True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("formats")
    write_folder(base / "dense", random_model())
    tokens = torch.randint(1, 264, (8, 48), generator=torch.Generator().manual_seed(0))
    for name, recipe in RECIPES.items():
        quantize(base / "dense", base / name, recipe, Calibration(tokens.numpy()))
    return {name: base / name for name in ("dense", *RECIPES)}


@pytest.mark.parametrize("name", RECIPES)
def test_every_linear_is_the_four_tensors_of_the_format(folders, name):
    recipe, found = RECIPES[name], load_file(folders[name] / "model.safetensors")
    expected = dict(random_model().named_parameters())
    for weight, parameter in expected.items():
        module = weight.removesuffix(".weight")
        if not (module.endswith("_proj") or (recipe.head and module == "lm_head")):
            assert np.array_equal(found.pop(weight), parameter.detach().numpy()) or "norm" in weight
            continue
        outputs, inputs = parameter.shape
        groups = inputs // (recipe.group or inputs)
        tensors = {part: found.pop(f"{module}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")}
        assert {part: (array.dtype.name, array.shape) for part, array in tensors.items()} == {
            "qweight": ("int32", (inputs // 8, outputs)),
            "qzeros": ("int32", (groups, outputs // 8)),
            "scales": ("float16", (groups, outputs)),
            "g_idx": ("int32", (inputs,)),
        }
        stored = tensors["qzeros"].view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
        assert stored.max() < 15  # less one: no zero point is 16, which readers take for different numbers
        assert (stored == 7).all() if recipe.symmetric else len(np.unique(stored)) > 1
        order = np.sort(tensors["g_idx"]) if recipe.act_order == "free" else tensors["g_idx"]
        assert np.array_equal(order, np.arange(inputs) // (inputs // groups))
    assert found == {}


@pytest.mark.parametrize("name", RECIPES)
def test_transformers_takes_the_configuration(folders, name):
    recipe = RECIPES[name]
    written = AutoConfig.from_pretrained(folders[name]).quantization_config
    assert written == json.loads((folders[name] / "config.json").read_text())["quantization_config"]
    config = GPTQConfig.from_dict(written)
    assert (config.bits, config.group_size, config.sym) == (4, recipe.group or -1, recipe.symmetric)
    assert config.desc_act is (recipe.act_order == "free")
    assert written["checkpoint_format"] == "gptq"
    assert written["lm_head"] is recipe.head


@pytest.mark.parametrize("name", ["dense", *RECIPES])
def test_greedy_tokens_on_the_cpu_are_the_references(folders, name):
    model = random_model()
    if name != "dense":
        model.load_state_dict(widened(folders[name], model))
    prompt = list(range(40, 60))
    expected = model.generate(
        torch.tensor([prompt]), do_sample=False, min_new_tokens=64, max_new_tokens=64, eos_token_id=None
    )[0, len(prompt) :].tolist()
    executor = TorchExecutor(ModelConfig(name="m", path=folders[name], context_length=128, threads=1))
    executor.load(lambda *_: None)
    answer: list[int] = []
    while len(answer) < 64:
        answer += step(executor, [*prompt, *answer] if not answer else answer[-1:], len(prompt) + len(answer))
    executor.close()
    assert answer == expected
    assert len(set(answer)) > 8


def step(executor: Any, tokens: list[int], until: int) -> list[int]:
    """The token after `tokens`, which end before position `until`."""
    first = until - len(tokens)
    return executor.step(
        StepBatch(
            token_ids=np.array(tokens, np.int32),
            positions=np.arange(first, until, dtype=np.int32),
            sequence_starts=np.array([0, len(tokens)], np.int32),
            lengths=np.array([first], np.int32),
            page_tables=[np.array([0, 1], np.int32)],
            logit_rows=np.array([len(tokens) - 1], np.int32),
            sampling=(SamplingRow(),),
        )
    ).tolist()
