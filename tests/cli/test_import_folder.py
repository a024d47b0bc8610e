"""``edgectl import`` of folders, plain and quantized: what is checked as a whole, and what a kill leaves."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from edgectl_process import COMMAND, clean_environment
from fixtures.small_models import model_files, weights
from quantized_files import Integers, awq_tensors, gptq_tensors
from safetensors.numpy import save_file

from edged.checkpoint.reference_logits import ReferenceLogits
from edged.cli.exit_codes import ExitCode

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIGS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
}


def write_quantized(folder, method):
    """A model whose linears are 4-bit, as AutoGPTQ or AutoAWQ writes it."""
    generator = np.random.default_rng(3)
    tensors = {}
    for name, array in weights(dtype=np.float16).items():
        module = name.removesuffix(".weight")
        if not module.endswith(LINEARS):
            tensors[name] = np.ones_like(array) if "norm" in name else array
            continue
        linear = Integers(generator, *array.shape, 32, act_order=method == "gptq")
        tensors |= gptq_tensors(module, linear) if method == "gptq" else awq_tensors(module, linear)
    for file, content in model_files(quantization_config=CONFIGS[method], torch_dtype="float16").items():
        (folder / file).write_bytes(content)
    save_file(tensors, folder / "model.safetensors")


def test_a_folder_is_checked_shared_and_given_its_reference(edgectl_here, write_model, tmp_path, monkeypatch):
    """The reference is what transformers computes from the same files."""
    import torch
    import transformers

    source = write_model(shards=2)
    monkeypatch.setenv("EDGED_MODELS", str(tmp_path / "models"))
    result = edgectl_here("import", source)
    assert result.code == 0, result.err
    folder = tmp_path / "models/source"
    assert result.out.startswith(f"wrote {folder}: ")
    assert "reference: reading weights 100 %" in result.err
    reference = ReferenceLogits.read(folder)
    assert reference.made_by["dtype"] == "float32"
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.inference_mode():
        rows = model(torch.from_numpy(reference.token_ids.astype(np.int64))[None]).logits[0].numpy()
    comparison = reference.compare(rows[reference.positions])
    assert comparison.within(relative_rms=1e-4, divergence=1e-6), str(comparison)
    shard = "model-00001-of-00002.safetensors"
    assert (folder / shard).stat().st_ino == (source / shard).stat().st_ino
    again = edgectl_here("import", source, "--copy", "--overwrite", "--no-reference")
    assert again.code == 0, again.err
    assert (folder / shard).stat().st_ino != (source / shard).stat().st_ino
    assert ReferenceLogits.read(folder) is None


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("apart", [False, True])
def test_quantized_folders_stay_as_they_are(edgectl_here, tmp_path, method, apart):
    source = tmp_path / method
    source.mkdir()
    write_quantized(source, method)
    if apart:  # the quantization in a file of its own, and the weights under the tool's name
        config = json.loads((source / "config.json").read_text())
        name = {"gptq": "quantize_config.json", "awq": "quant_config.json"}[method]
        (source / name).write_text(json.dumps(config.pop("quantization_config")))
        (source / "config.json").write_text(json.dumps(config))
        (source / "model.safetensors").rename(source / f"{method}-4bit.safetensors")
    reference = method == "gptq" and apart
    result = edgectl_here("import", source, "made", *(() if reference else ("--no-reference",)))
    assert result.code == 0, result.err
    assert f"weights in 4 bits ({method}, groups of 32) and float16" in result.out
    weights_file = next(source.glob("*.safetensors"))
    assert (tmp_path / "made/model.safetensors").read_bytes() == weights_file.read_bytes()
    assert json.loads((tmp_path / "made/config.json").read_text())["quantization_config"] == CONFIGS[method]
    assert (ReferenceLogits.read(tmp_path / "made") is not None) is reference


def damaged(source, kind):
    if kind == "cut":
        path = source / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-7])
    elif kind in ("missing", "unknown", "nan"):
        tensors = weights()
        if kind == "missing":
            del tensors["model.layers.1.mlp.up_proj.weight"]
        elif kind == "unknown":
            tensors["model.layers.1.extra.weight"] = np.zeros(3, np.float32)
        else:
            tensors["model.norm.weight"][5] = np.nan
        save_file(tensors, source / "model.safetensors")
    else:
        key, value = {"heads": ("num_key_value_heads", None), "rope": ("rope_scaling", {"rope_type": "magic"}),
                      "vocabulary": ("vocab_size", 300)}[kind]  # fmt: skip
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, key: value}))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut", "truncated"),
        ("missing", "model.layers.1.mlp.up_proj"),
        ("unknown", "model.layers.1.extra"),
        ("nan", "model.norm.weight"),
        ("heads", "num_key_value_heads"),
        ("rope", "magic"),
        ("vocabulary", "embed_tokens"),
    ],
)
def test_damage_is_named_and_nothing_is_left(edgectl_here, write_model, tmp_path, kind, message):
    source = write_model()
    damaged(source, kind)
    result = edgectl_here("import", source, "deep/made")
    assert result.code == ExitCode.FILE
    assert message in result.err.splitlines()[-1]
    assert ".importing" not in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_without_torch_the_import_says_that_there_is_no_reference(edgectl, write_model, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nreal = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'torch' else real(name, *rest)\n"
    )
    result = edgectl("import", write_model(), "made", PYTHONPATH=f"{tmp_path}:{Path.cwd()}")
    assert result.code == 0, result.err
    assert "no reference logits: torch is not installed; later: edgectl models reference" in result.err
    assert ReferenceLogits.read(tmp_path / "made") is None


def test_killed_while_the_reference_is_computed(write_model, tmp_path):
    """Neither a folder nor a process stays."""
    source = write_model()
    process = subprocess.Popen(
        [*COMMAND, "import", source, tmp_path / "models/made"],
        env=clean_environment(),
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    child = ""
    while not child and time.monotonic() < end:
        done = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
        child = done.stdout.strip()
    time.sleep(random.Random(os.getpid()).uniform(0, 0.5))
    process.kill()
    process.wait()
    stat = Path(f"/proc/{child}/stat")
    while stat.exists() and stat.read_text().split()[2] != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)
    assert [path.name for path in (tmp_path / "models").iterdir() if not path.name.startswith(".")] == []
    again = subprocess.run([*COMMAND, "import", source, tmp_path / "models/made", "--no-reference"], env=clean_environment(), capture_output=True, check=False)  # fmt: skip
    assert again.returncode == 0
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["made"]
