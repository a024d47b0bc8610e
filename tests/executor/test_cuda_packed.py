"""4-bit and ternary models on device cuda, held to the CPU's fp32 executor: on the references everywhere, on the kernels on a GPU."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from executor_runner import Runner, load
from fixtures.held_buffers import check_buffers
from host_device import HostDevice
from packed_models import GPTQ, LLAMA, MODELS, write_packed
from torch.utils._python_dispatch import TorchDispatchMode

from edged.checkpoint import packed
from edged.checkpoint.safetensors_files import WeightFiles
from edged.checkpoint.ternary import pack_ternary_words
from edged.config import ModelConfig
from edged.errors import UnsupportedError
from edged.executor import cuda_packed
from edged.executor.cuda_executor import CudaExecutor
from edged.executor.cuda_packed import lane_words, ternary_words
from edged.memory.buffers import step_buffers, weight_buffers
from edged.memory.cuda_buffers import WIDE_TILE, wide_rows
from edged.models.checkpoint import CheckpointPlan
from edged.models.cuda_weights import CudaPacked
from edged.models.weights import weight_specs
from plugins_trt.ternary_linear import layout as ternary_layout
from plugins_trt.ternary_linear.reference import widen_rows as widen_ternary_rows
from plugins_trt.w4a16_linear import layout
from plugins_trt.w4a16_widen.reference import widen_rows

SETTINGS = {"context_length": 512, "max_sequences": 3, "prefill_chunk": 256}
ERROR = {"bfloat16": 0.06, "float16": 0.008}
"""Mean difference from fp32 over the spread of the logits."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder and weights of each model."""
    root, made = tmp_path_factory.mktemp("packed"), {}

    def get(name):
        if name not in made:
            folder = root / str(len(made))
            made[name] = folder, write_packed(folder, *MODELS[name])
        return made[name]

    return get


@pytest.fixture(scope="module", params=["references", pytest.param("kernels", marks=pytest.mark.gpu)])
def open_device(request):
    """None: the first GPU."""
    return HostDevice if request.param == "references" else None


def open_model(folder, device, **settings):
    config = ModelConfig(name="m", path=folder, device="cuda", **{"dtype": "float16", **SETTINGS, **settings})
    executor = CudaExecutor(config, device)
    executor.load(lambda *_: None)
    return executor


@pytest.fixture(scope="module")
def executors(models, open_device):
    """Loads each executor once."""
    made = {}

    def get(name, dtype="float16"):
        if (name, dtype) not in made:
            made[name, dtype] = open_model(models(name)[0], open_device, dtype=dtype)
        return made[name, dtype]

    yield get
    for executor in made.values():
        executor.close()


@pytest.fixture(scope="module")
def reference(models):
    """The CPU's fp32 executor of a model."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = load(models(name)[0], dtype="float32", **SETTINGS)
        return made[name]

    return get


PROMPT = np.random.default_rng(5).integers(0, LLAMA["vocab_size"], 330).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_of_the_file_is_in_its_place(models, executors, name):
    executor, (_, weights) = executors(name), models(name)
    packed = 0
    for spec in weight_specs(executor.plan.architecture):
        if spec.packing is None:
            continue
        expected = torch.from_numpy(np.concatenate([weights[source.module] for source in spec.sources]))
        form, held = CudaPacked.of(spec), executor.buffers[spec.name].cpu()
        if form is None:  # the head
            assert torch.equal(held, expected.half())
            continue
        packed += 1
        groups = executor.buffers[f"{spec.name}.groups"].cpu()
        assert form.gated == spec.name.endswith("gate_up")
        rows = {"outputs": form.outputs, "first": 0, "rows": form.outputs, "gated": form.gated}
        if form.ternary:
            wide = widen_ternary_rows(held, groups, inputs=form.inputs, **rows)
        else:
            wide = widen_rows(held, groups, **rows)
        torch.testing.assert_close(wide.double(), expected, rtol=1e-6, atol=0)
    assert packed == (4 if "alone" in name else 8)


@pytest.mark.parametrize("name", ["gptq, group 64", "ternary, group 32, biases", "ternary, group 256"])
def test_the_tiles_are_those_of_the_layout(models, executors, name):
    """The device turns words over as the published layout says."""
    executor = executors(name)
    for spec in weight_specs(executor.plan.architecture):
        form = CudaPacked.of(spec)
        if form is None:
            continue
        numbers, metas = [], []
        with WeightFiles.open(models(name)[0]) as files:
            plan = CheckpointPlan.of(executor.plan.architecture, files)
            for linear in plan.packed:
                if linear.weight != spec.name:
                    continue
                module = plan.read(files, linear)
                words = np.zeros(
                    (linear.shape.outputs, linear.shape.inputs // (16 if form.ternary else 8)), np.uint32
                )
                for output, word, tile in module.tiles:
                    words[output : output + len(tile), word : word + tile.shape[1]] = tile
                numbers.append(words)
                metas.append((module.scales, module.zeros))
        words = np.concatenate(numbers)
        scales = np.concatenate([scales for scales, _ in metas])
        if form.ternary:
            tiles = ternary_layout.pack_tiles(words, gated=form.gated)
            groups = ternary_layout.pack_scales(scales, form.inputs, gated=form.gated)
        else:
            tiles = layout.pack_tiles(words, gated=form.gated)
            zeros = np.concatenate([zeros for _, zeros in metas])
            groups = layout.pack_groups(scales, zeros, gated=form.gated)
        assert np.array_equal(executor.buffers[spec.name].cpu().numpy().view(np.uint32), tiles)
        assert np.array_equal(executor.buffers[f"{spec.name}.groups"].cpu().numpy().view(np.uint32), groups)


def test_words_are_turned_over_as_the_layouts_say():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 32, (16, 24), np.uint32)  # of eight numbers
    expected = layout.pack_tiles(words)[0].reshape(3, 8, 4, 2, 2)  # step, g, t, half, word
    found = lane_words(torch.from_numpy(words.view(np.int32))).numpy().view(np.uint32)
    assert np.array_equal(found.reshape(2, 8, 3, 2, 4).transpose(2, 1, 4, 0, 3), expected)
    codes = rng.integers(0, 3, (16, 160), dtype=np.uint8)  # a block, and a part of one
    packed = pack_ternary_words(codes)
    expected = ternary_layout.pack_tiles(packed)[0].reshape(2, 8, 4, 2, 2)
    found = ternary_words(torch.from_numpy(packed.view(np.int32))).numpy().view(np.uint32)
    assert np.array_equal(found.reshape(2, 8, 2, 2, 4).transpose(2, 1, 4, 0, 3), expected)


def error(ours, expected):
    assert np.isfinite(ours).all()
    return np.abs(ours - expected).mean() / expected.std()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_cpus(executors, reference, name, dtype):
    runner = Runner(executors(name, dtype))
    sequence = runner.sequence(PROMPT)
    # One row; few and many; more than a launch takes; so many that weights are widened.
    ours = [runner.logits([(sequence, count)], "all") for count in (1, 2, 13, 40, 65, 200)]
    ours += [runner.logits([(sequence, 1)]) for _ in range(3)]
    ours = np.concatenate(ours)
    runner = Runner(reference(name))
    expected = runner.prefill(runner.sequence(PROMPT[: len(ours)]), 256)
    assert error(ours, expected) < ERROR[dtype]


@pytest.mark.parametrize("name", ["gptq, group 64", "awq, group 128", "ternary, group 128"])
def test_greedy_tokens_are_the_cpus(executors, reference, name):
    runner = Runner(executors(name))
    prompts = [PROMPT[:70], PROMPT[70:90], PROMPT[100:230]]
    answers = runner.generate([runner.sequence(prompt, room=24) for prompt in prompts], 24)
    for prompt, answer in zip(prompts, answers, strict=True):
        runner = Runner(reference(name))
        sequence = runner.sequence([*prompt, *answer[:-1]])
        logits = runner.prefill(sequence, 256)[-len(answer) :]
        gaps = logits.max(1) - logits[np.arange(len(answer)), answer]
        assert gaps.max() < 4 * ERROR["float16"] * logits.std(), gaps
        assert (gaps > 0).mean() < 0.1


def test_buffers_are_those_of_the_plan(executors):
    for name in ("gptq, group 64", "gptq with its head"):
        executor = executors(name)
        specs = (*weight_buffers(executor.plan), *step_buffers(executor.plan))
        check_buffers(executor.buffers, specs)
        assert "packed_wide" in executor.buffers


def test_outputs_are_widened_in_equal_parts_that_fit():
    for outputs, inputs in ((32768, 4096), (4096, 16384), (4608, 4096), (24, 1 << 26)):
        form = CudaPacked("m", outputs, inputs, 128, gated=False)
        rows = wide_rows(form)
        assert rows % 8 == 0
        assert rows * inputs <= WIDE_TILE or rows == 8
        parts = -(-outputs // rows)
        assert parts * rows - outputs < 8 * parts


class MadeElements(TorchDispatchMode):
    """Elements of the largest new tensor that anything makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = [each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)]
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.largest = max(self.largest, result.numel())
        return result


def test_a_model_is_never_held_twice_while_it_loads(tmp_path, monkeypatch):
    words = 1 << 14  # of a piece, in the place of a million
    monkeypatch.setattr(packed, "SLAB_BYTES", 4 * words)
    monkeypatch.setattr(cuda_packed, "_STAGED", words)
    config = {**LLAMA, "num_hidden_layers": 1, "intermediate_size": 3072, "vocab_size": 64}
    write_packed(tmp_path, config, GPTQ)
    settings = {"dtype": "float16", "context_length": 64, "prefill_chunk": 1}
    executor = CudaExecutor(ModelConfig(name="m", path=tmp_path, device="cuda", **settings), HostDevice)
    fill = executor._fill_weights
    made = MadeElements()

    def watched(progress):
        with made:
            fill(progress)

    executor._fill_weights = watched
    executor.load(lambda *_: None)
    assert executor.buffers["layers.0.gate_up"].numel() > 10 * words
    assert 0 < made.largest <= words
    executor.close()


def test_what_the_kernels_do_not_do_is_refused(tmp_path):
    def refused(config=LLAMA, **quantization):
        folder = tmp_path / "refused"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(
            json.dumps({**config, "quantization_config": {**GPTQ, **quantization}})
        )
        with pytest.raises(UnsupportedError) as caught:
            CudaExecutor(ModelConfig(name="m", path=folder, device="cuda", dtype="bfloat16"), HostDevice)
        assert caught.value.field == "device"
        return caught.value.message

    assert "group: 32, must be one of (64, 128)" in refused(group_size=32)
    assert "import it without --keep-4bit" in refused(group_size=32)
    assert "desc_act" in refused(desc_act=True)
    assert "--act-order static" in refused(desc_act=True)
    narrow = {**LLAMA, "intermediate_size": 352}
    assert "model m: the 4-bit weight layers.0.down does not run" in refused(narrow, group_size=-1)
