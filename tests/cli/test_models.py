"""``edgectl models``: list, inspect, verify, reference, remove."""

from __future__ import annotations

import json
import shutil

import pytest
from edgectl_process import Terminal
from fixtures.small_models import model_files, weights

from edged.cli.exit_codes import ExitCode


@pytest.fixture
def models(tmp_path, monkeypatch):
    """The models folder, with one model in it that was imported and one that was copied there."""
    folder = tmp_path / "models"
    monkeypatch.setenv("EDGED_MODELS", str(folder))
    return folder


@pytest.fixture
def imported(edgectl_here, models, write_model):
    result = edgectl_here("import", write_model("tiny"), "--no-reference")
    assert result.code == 0, result.err
    return models / "tiny"


def test_no_models(edgectl_here, models):
    result = edgectl_here("models")
    assert (result.code, result.out) == (0, f"0 models in {models}\n")
    assert json.loads(edgectl_here("models", "--json").out) == {"folders": [str(models)], "models": []}
    missing = edgectl_here("models", "inspect", "tiny")
    assert missing.code == ExitCode.NO
    assert f"there is no model 'tiny' in {models}; there are: none" in missing.err


def test_the_list(edgectl_here, models, imported, tmp_path):
    half = models / "half"
    shutil.copytree(imported, half)
    (half / "edged.json").unlink()
    (half / "config.json").write_text('{"model_type": "mamba"}')
    for name in (".other.pulling", ".x.12345678.importing", "notes"):
        shutil.copytree(imported, models / name)
    (models / "notes/config.json").unlink()
    (models / "file").write_text("no folder")
    result = edgectl_here("models", "list")
    lines = result.out.splitlines()
    assert [line.split()[0] for line in lines if line] == ["model", "half", "tiny", "2"]
    assert "model_type 'mamba' is not supported" in lines[1]
    assert lines[2].split()[1:5] == ["llama", "0", "M", "float32"]
    assert lines[2].endswith("tiny")
    content = json.loads(edgectl_here("models", "--json").out)["models"]
    assert [model["name"] for model in content] == ["half", "tiny"]
    assert content[1]["source"] == {"kind": "file", "path": str(tmp_path / "tiny")}
    assert content[1]["parameters"] == sum(array.size for array in weights().values())


def test_inspect(edgectl_here, imported):
    result = edgectl_here("models", "inspect", "tiny")
    assert result.code == 0, result.err
    for said in (
        f"folder        {imported}",
        "llama, 2 layers of 64, heads 2/1 x 32, vocabulary 257",
        "float32",
        "trained for 8192 tokens",
        "templates default; tools no; switch for thinking no",
        "logits not stored",
    ):
        assert said in result.out
    rows = [line.split() for line in result.out.splitlines() if line.strip()[:1].isdecimal()]
    assert [row[0] for row in rows] == ["4096", "32768", "131072"]
    assert "beyond the 8192 it was trained for" in result.out
    content = json.loads(edgectl_here("models", "inspect", imported, "--json").out)
    kv = {need["context_length"]: need["kv"] for need in content["needs"]}
    # float32 keys and values of one head of 32 in two layers
    assert kv == {length: length * 2 * 2 * 32 * 4 for length in (4096, 32768, 131072)}
    plan = json.loads(
        edgectl_here("plan", imported, "--context-length", 4096, "--budget", "64GiB", "--json").out
    )
    assert content["needs"][0]["total"] == plan["total_bytes"]


def test_inspect_of_a_quantized_model_names_its_quantization(edgectl_here, models, write_model):
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    folder = write_model("half", dtype="float16", quantization_config=quantization)
    models.mkdir()
    shutil.copytree(folder, models / "half")
    content = json.loads(edgectl_here("models", "--json").out)["models"][0]
    assert content["weights"] == "4 bits (gptq, groups of 32) and float16"


@pytest.mark.parametrize("damage", ["cut", "tokenizer", "vocabulary"])
def test_inspect_refuses_a_damaged_model_by_name(edgectl_here, imported, damage):
    if damage == "cut":
        path = imported / "model.safetensors"
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[:-10])
    elif damage == "tokenizer":
        (imported / "tokenizer.json").write_text("{}")
    else:
        (imported / "config.json").write_bytes(model_files(vocab_size=258)["config.json"])
    result = edgectl_here("models", "inspect", "tiny")
    assert result.code == ExitCode.FILE
    assert str(imported) in result.err


def test_verify(edgectl_here, imported, write_model):
    assert "5 files are as they were imported" in edgectl_here("models", "verify", "tiny").out
    path = imported / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    path.write_bytes(content)
    (imported / "generation_config.json").unlink()
    result = edgectl_here("models", "verify", "tiny")
    assert result.code == ExitCode.NO
    assert "model.safetensors: is not as it was imported" in result.err
    assert "generation_config.json: is missing" in result.err
    own = edgectl_here("models", "verify", write_model("mine"))
    assert own.code == ExitCode.NO
    assert "has no digests" in own.err


def test_reference(edgectl_here, imported):
    from edged.checkpoint.reference_logits import ReferenceLogits

    assert ReferenceLogits.read(imported) is None
    result = edgectl_here("models", "reference", "tiny")
    assert result.code == 0, result.err
    reference = ReferenceLogits.read(imported)
    assert reference.logits.shape == (4, 257)
    assert "logits stored" in edgectl_here("models", "inspect", "tiny").out


def test_removing_has_to_be_said(edgectl_here, imported, tmp_path, write_model):
    result = edgectl_here("models", "remove", "tiny")
    assert result.code == ExitCode.NO
    assert "give --yes" in result.err
    assert imported.exists()
    result = edgectl_here("models", "remove", "tiny", "--yes")
    assert result.code == 0
    assert result.out.startswith(f"removed {imported}, ")
    assert list(imported.parent.iterdir()) == []
    own = write_model("mine")
    refused = edgectl_here("models", "remove", own, "--yes")
    assert refused.code == ExitCode.FILE
    assert "lies elsewhere" in refused.err
    assert own.exists()


@pytest.mark.parametrize(("answer", "gone"), [("y", True), ("n", False), ("", False)])
def test_removing_at_a_terminal_asks(imported, models, answer, gone):
    with Terminal("models", "remove", "tiny", EDGED_MODELS=str(models)) as terminal:
        terminal.expect("[y/N] ")
        terminal.type(answer + "\n")
        assert terminal.end() == (0 if gone else ExitCode.NO)
    assert imported.exists() is not gone


def test_the_models_folder(monkeypatch, tmp_path):
    from edged.checkpoint import models_folder as room

    monkeypatch.delenv("EDGED_MODELS", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(room, "SYSTEM_FOLDER", tmp_path / "system/models")
    assert room.models_folders() == (tmp_path / "system/models", tmp_path / "data/edged/models")
    assert room.models_folder() == tmp_path / "system/models"
    monkeypatch.setattr(room.os, "access", lambda path, _mode: tmp_path / "data" in (path, *path.parents) or path == tmp_path / "data")  # fmt: skip
    (tmp_path / "system").mkdir()
    (tmp_path / "data").mkdir()
    assert room.models_folder() == tmp_path / "data/edged/models"
    monkeypatch.setenv("EDGED_MODELS", str(tmp_path / "mine"))
    assert room.models_folders() == (tmp_path / "mine",)
