"""Whole folders: what is written, what each linear was calibrated with, what a killed run leaves."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from quantized_models import random_model, widened, write_folder

import edged.quantize.operators as operators_module
from edged.config import ModelConfig
from edged.errors import CheckpointError, InvalidArgumentError
from edged.executor.base import SamplingRow, StepBatch
from edged.executor.torch_executor import TorchExecutor
from edged.quantize.calibration import Calibration, read_documents
from edged.quantize.gptq import QuantizedWeight
from edged.quantize.recipe import Recipe
from edged.quantize.run import prepare_calibration, quantize
from edged.quantize.state import State, state_folder

if TYPE_CHECKING:
    from pathlib import Path

MODULES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {kind: write_folder(base / kind, random_model(kind)) for kind in ("llama", "qwen2")}


def calibration(folder: Path, text: Path, count: int = 8, length: int = 48) -> Calibration:
    return prepare_calibration(folder, read_documents(text), count=count, length=length)


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def edged_logits(folder: Path, tokens: list[int]) -> Any:
    executor = TorchExecutor(ModelConfig(name="m", path=folder, context_length=128, threads=1))
    executor.load(lambda *_: None)
    count = len(tokens)
    batch = StepBatch(
        token_ids=np.array(tokens, np.int32),
        positions=np.arange(count, dtype=np.int32),
        sequence_starts=np.array([0, count], np.int32),
        lengths=np.array([0], np.int32),
        page_tables=[np.array([0, 1], np.int32)],
        logit_rows=np.arange(count, dtype=np.int32),
        sampling=tuple(SamplingRow() for _ in range(count)),
    )
    return executor.logits(batch)


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("llama", Recipe("rtn", group=32)),
        ("llama", Recipe("gptq", group=32, head=True)),
        ("llama", Recipe("gptq", group=0, act_order="none", symmetric=False)),
        ("llama", Recipe("p-gptq", group=16, act_order="free")),
        ("qwen2", Recipe("awq-gptq", group=32, symmetric=False, skip_first=4)),
    ],
    ids=lambda each: each if isinstance(each, str) else each.method,
)
def test_the_folder_is_a_gptq_checkpoint_that_edged_runs(folders, text, tmp_path, kind, recipe):
    quantize(folders[kind], tmp_path / "q", recipe, calibration(folders[kind], text))
    config = json.loads((tmp_path / "q/config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["bits"], config["checkpoint_format"]) == ("gptq", 4, "gptq")
    assert config["desc_act"] is (recipe.act_order == "free")
    assert config["sym"] is recipe.symmetric
    assert config["group_size"] == (recipe.group or -1)
    model = random_model(kind)
    model.load_state_dict(widened(tmp_path / "q", model))
    tokens = list(range(1, 100))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    difference = np.abs(edged_logits(tmp_path / "q", tokens) - expected).max()
    assert difference < 2e-3 * np.abs(expected).max()
    assert not state_folder(tmp_path / "q").exists()


@pytest.mark.parametrize("case", ["llama gptq", "qwen2 gptq", "llama p-gptq"])
def test_each_hessian_is_that_of_the_inputs_in_the_quantized_model(
    folders, text, tmp_path, monkeypatch, case
):
    """Every linear saw what comes through all quantized ones before it: what it sees in the finished model."""
    kind, method = case.split()
    skipped = 4 if method == "p-gptq" else 0
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    real = operators_module.quantize_weight

    def spy(weight, hessian, recipe, where, left_out):
        seen[where] = hessian.clone(), left_out.clone()
        return real(weight, hessian, recipe, where, left_out)

    monkeypatch.setattr(operators_module, "quantize_weight", spy)
    used = calibration(folders[kind], text)
    quantize(folders[kind], tmp_path / "q", Recipe(method, group=32), used)
    model = random_model(kind)
    model.load_state_dict(widened(tmp_path / "q", model))
    inputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(
            lambda _, args, name=name: inputs.__setitem__(name, args[0]) if args else None
        )
    with torch.inference_mode():
        model(torch.from_numpy(used.sequences))
    assert len(seen) == 12
    for where, (hessian, left_out) in seen.items():
        _, layer, part = where.split(".")
        for module in MODULES[part]:
            every = inputs[f"model.layers.{layer}.{module}"].double()
            x = every[:, skipped:].flatten(0, 1)
            expected = x.T @ x / len(x)
            assert torch.allclose(hessian.double(), expected, rtol=2e-3, atol=2e-3 * float(expected.max()))
            first = every[:, :skipped].square().sum(dim=(0, 1)) / len(x)
            assert torch.allclose(left_out.double(), first, rtol=2e-3, atol=2e-3 * float(expected.max()))


class Unrounded(QuantizedWeight):
    """A weight that stays what it is."""

    def divide_rows(self, start: int, divisors: torch.Tensor) -> torch.Tensor:
        self.dense[start : start + len(divisors)] /= divisors.unsqueeze(1)
        return torch.tensor(True)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_smoothing_alone_changes_nothing(folders, text, tmp_path, monkeypatch, kind):
    """Scales are folded into norms, values and the MLP's upper half: without rounding the model stays the same."""
    scaled = []
    last: dict[int, np.ndarray] = {}

    def keep(weight, hessian, recipe, where, left_out):
        made = quantize_rtn(weight.clone(), None, recipe, where)
        return Unrounded(made.numbers, made.grid, made.groups, weight)

    def spy(*arguments):
        scales = find(*arguments)
        scaled.append(float(scales.max() / scales.min()))
        return scales

    quantize_rtn, find, commit = (
        operators_module.quantize_weight,
        operators_module.find_scales,
        State.commit,
    )

    def committed(self, stage, results):
        last[stage] = np.array(self.hidden(stage + 1, (8, 48, 64)))
        commit(self, stage, results)

    monkeypatch.setattr(operators_module, "quantize_weight", keep)
    monkeypatch.setattr(operators_module, "find_scales", spy)
    monkeypatch.setattr(State, "commit", committed)
    used = calibration(folders[kind], text)
    quantize(folders[kind], tmp_path / "q", Recipe("awq-gptq", group=32), used)
    assert len(scaled) == 12
    assert min(scaled) >= 1
    assert sum(each > 1.1 for each in scaled) > 6
    model = random_model(kind)
    states: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    with torch.inference_mode():
        model(torch.from_numpy(used.sequences))
    assert np.allclose(last[5], states[0].numpy(), rtol=1e-3, atol=1e-3 * float(states[0].abs().max()))


@pytest.mark.parametrize("method", ["rtn", "awq-gptq"])
def test_a_run_that_stops_anywhere_goes_on_to_the_same_bytes(folders, text, tmp_path, monkeypatch, method):
    recipe = Recipe(method, group=32)
    source, used = folders["qwen2"], calibration(folders["qwen2"], text)
    quantize(source, tmp_path / "whole", recipe, used)
    commit, finish = State.commit, tmp_path / "q"
    finished = 0

    class Stopped(BaseException):
        pass

    def stop_before(self, stage, results):
        raise Stopped

    def stop_after(self, stage, results):
        commit(self, stage, results)
        raise Stopped

    for stop in (stop_before, stop_after) * 4:
        monkeypatch.setattr(State, "commit", stop)
        with pytest.raises(Stopped):
            quantize(source, finish, recipe, used)
        assert not finish.exists()
        assert len(list(state_folder(finish).glob("stage-*"))) == (
            finished := finished + (stop is stop_after)
        )
    monkeypatch.setattr(State, "commit", commit)

    def fail(folder):
        raise Stopped

    assert not finish.exists()
    with pytest.raises(Stopped):
        quantize(source, finish, recipe, used, finish=fail)
    assert not finish.exists()
    quantize(source, finish, recipe, used)
    assert digest(finish) == digest(tmp_path / "whole")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_another_request_left_is_not_used(folders, text, tmp_path, monkeypatch):
    source, used = folders["llama"], calibration(folders["llama"], text)
    quantize(source, tmp_path / "whole", Recipe("gptq", group=32), used)
    commit = State.commit

    def stop_at_third(self, stage, results):
        if stage == 3:
            raise KeyboardInterrupt
        commit(self, stage, results)

    monkeypatch.setattr(State, "commit", stop_at_third)
    for other in (Recipe("gptq", group=16), Recipe("gptq", group=32, damping=0.02)):
        with pytest.raises(KeyboardInterrupt):
            quantize(source, tmp_path / "q", other, used)
    monkeypatch.setattr(State, "commit", commit)
    quantize(source, tmp_path / "q", Recipe("gptq", group=32), used)
    assert digest(tmp_path / "q") == digest(tmp_path / "whole")


def test_two_runs_to_one_folder_do_not_meet(folders, text, tmp_path):
    source, used = folders["llama"], calibration(folders["llama"], text)
    with (
        State.open(tmp_path / "q", {}, 0),
        pytest.raises(CheckpointError, match="another process is quantizing to it"),
    ):
        quantize(source, tmp_path / "q", Recipe("gptq", group=32), used)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            {"group": 128},
            r"group 128 does not divide the 64 input channels of layers\.0\.qkv; groups of 32 do",
        ),
        ({"group": 12}, "group 12 is not a multiple of 8"),
        ({"method": "hqq"}, "method 'hqq' is not one of rtn, gptq"),
        ({"damping": 0.0}, "damping 0.0 is not above 0"),
    ],
)
def test_recipes_that_do_not_fit_are_refused(folders, text, tmp_path, recipe, message):
    used = calibration(folders["llama"], text)
    with pytest.raises(InvalidArgumentError, match=message):
        quantize(folders["llama"], tmp_path / "q", Recipe(**recipe), used)
    assert list(tmp_path.iterdir()) == []


def test_a_hessian_of_nothing_is_refused(folders, text, tmp_path):
    used = calibration(folders["llama"], text)
    with pytest.raises(InvalidArgumentError, match="skip_first 48 leaves nothing of sequences of 48 tokens"):
        quantize(folders["llama"], tmp_path / "q", Recipe(group=32, skip_first=48), used)


def test_a_tied_head_and_quantized_models_are_refused(folders, text, tmp_path):
    used = calibration(folders["qwen2"], text)
    with pytest.raises(InvalidArgumentError, match="tie_word_embeddings"):
        quantize(folders["qwen2"], tmp_path / "q", Recipe(group=32, head=True), used)
    quantize(folders["qwen2"], tmp_path / "q", Recipe("rtn", group=32))
    with pytest.raises(CheckpointError, match=r"is quantized already \(gptq\)"):
        quantize(tmp_path / "q", tmp_path / "again", Recipe("rtn", group=32))
    with pytest.raises(CheckpointError, match="is not empty"):
        quantize(folders["qwen2"], tmp_path / "q", Recipe("rtn", group=32))
    quantize(folders["qwen2"], tmp_path / "q", Recipe("rtn", group=16), overwrite=True)


def test_infinity_in_activations_names_the_linear(text, tmp_path):
    model = random_model()
    model.model.layers[1].mlp.up_proj.weight.data *= 1e20
    model.model.layers[1].mlp.gate_proj.weight.data *= 1e20
    folder = write_folder(tmp_path / "m", model)
    with pytest.raises(CheckpointError, match=r"layers\.1\.(gate_up|down)"):
        quantize(folder, tmp_path / "q", Recipe(group=32), calibration(folder, text))
    assert not (tmp_path / "q").exists()


def test_what_stays_wide_takes_another_type(folders, tmp_path):
    from safetensors.torch import load_file

    quantize(folders["llama"], tmp_path / "q", Recipe("rtn", group=32), dtype="bfloat16")
    found = load_file(tmp_path / "q/model.safetensors")
    before = load_file(folders["llama"] / "model.safetensors")
    for name, tensor in found.items():
        if name in before:
            assert torch.equal(tensor, before[name].bfloat16())


def test_hidden_states_have_their_room_before_they_are_mapped(tmp_path):
    with State.open(tmp_path / "q", {}, 0) as state, state.write_hidden(0, (64, 1024)):
        (partial,) = state.folder.glob("*.partial")
        assert partial.stat().st_blocks * 512 >= 4 * 64 * 1024


def test_no_room_for_hidden_states_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with (
        pytest.raises(CheckpointError, match="cannot be written: No space left on device"),
        State.open(tmp_path / "new/q", {}, 0) as state,
        state.write_hidden(0, (2, 8)),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
