"""Quantizing on a GPU: as good as on the CPU, and it goes on after a kill as there."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from quantized_models import random_model, widened, write_folder

from edged.quantize.calibration import Calibration
from edged.quantize.recipe import Recipe
from edged.quantize.run import quantize
from edged.quantize.state import State, state_folder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
RECIPES = [
    Recipe("rtn", group=32),
    Recipe("gptq", group=32, head=True),
    Recipe("gptq", group=0, act_order="none", symmetric=False),
    Recipe("p-gptq", group=16, act_order="free"),
    Recipe("awq-gptq", group=32, symmetric=False, skip_first=4),
]


@pytest.fixture(scope="module")
def used() -> Calibration:
    return Calibration(torch.randint(1, 264, (16, 48), generator=torch.Generator().manual_seed(0)).numpy())


@torch.inference_mode()
def error(model: Any, folder: Path, tokens: torch.Tensor) -> float:
    """Of the logits, over their size."""
    expected = model(tokens).logits
    other = random_model()
    other.load_state_dict(widened(folder, other))
    return float((other(tokens).logits - expected).norm() / expected.norm())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda each: f"{each.method}-{each.group}")
def test_a_gpu_makes_as_good_a_model(used, tmp_path, recipe):
    model = random_model()
    write_folder(tmp_path / "m", model)
    for device in ("cpu", "cuda"):
        quantize(tmp_path / "m", tmp_path / device, recipe, used, device=device)
    tokens = torch.randint(1, 264, (4, 64), generator=torch.Generator().manual_seed(1))
    cpu, cuda = (error(model, tmp_path / device, tokens) for device in ("cpu", "cuda"))
    assert cuda == pytest.approx(cpu, rel=0.1)
    if recipe.method == "rtn":
        assert digest(tmp_path / "cuda") == digest(tmp_path / "cpu")


def test_a_run_that_stopped_goes_on_to_the_same_bytes(used, tmp_path, monkeypatch):
    recipe = Recipe("p-gptq", group=32)
    write_folder(tmp_path / "m", random_model())
    quantize(tmp_path / "m", tmp_path / "whole", recipe, used, device="cuda")
    commit = State.commit

    class Stopped(BaseException):
        pass

    def stop_after(self, stage, results):
        commit(self, stage, results)
        if stage == 2:
            raise Stopped

    monkeypatch.setattr(State, "commit", stop_after)
    with pytest.raises(Stopped):
        quantize(tmp_path / "m", tmp_path / "q", recipe, used, device="cuda")
    assert state_folder(tmp_path / "q").exists()
    monkeypatch.setattr(State, "commit", commit)
    quantize(tmp_path / "m", tmp_path / "q", recipe, used, device="cuda")
    assert digest(tmp_path / "q") == digest(tmp_path / "whole")


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
