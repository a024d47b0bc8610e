"""``edgectl import`` on small files: what it writes, shows and refuses."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
from edgectl_process import Terminal
from safetensors.numpy import load_file
from small_gguf import LAYERS, write_gguf

from edged.cli.exit_codes import ExitCode


@pytest.fixture
def small(tmp_path):
    return write_gguf(tmp_path / "small.gguf")


def test_a_model_folder_is_written(edgectl, small, tmp_path):
    result = edgectl("import", "small.gguf", "made/model")
    assert result.code == 0, result.err
    assert result.out.startswith("wrote made/model: ")
    assert result.out.endswith("weights in float32\n")
    assert result.err.splitlines()[0] == "importing small.gguf to made/model"
    assert "weights 100 %" in result.err
    folder = tmp_path / "made/model"
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == LAYERS
    assert load_file(folder / "model.safetensors")["model.embed_tokens.weight"].dtype == np.float32
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} < {
        p.name for p in folder.iterdir()
    }


def test_half_precision(edgectl, small, tmp_path):
    assert edgectl("import", small, "half", "--dtype", "float16", "--no-reference").code == 0
    assert load_file(tmp_path / "half/model.safetensors")["model.embed_tokens.weight"].dtype == np.float16


def test_4_bit_linears_are_kept_where_that_is_asked_for(edgectl, small, tmp_path):
    write_gguf(tmp_path / "q4.gguf", linears=gguf.GGMLQuantizationType.Q4_0)
    result = edgectl("import", "q4.gguf", "kept", "--keep-4bit", "--dtype", "bfloat16")
    assert result.code == 0, result.err
    assert result.out.endswith("weights in 4 bits (gptq, groups of 32) and bfloat16\n")
    assert edgectl("import", "q4.gguf", "wide").out.endswith("weights in float32\n")
    none = edgectl("import", small, "none", "--keep-4bit")
    assert none.code == ExitCode.FILE
    assert "holds no linears of type Q4_0" in none.err
    folder = edgectl("import", "kept", "again", "--keep-4bit")
    assert folder.code == ExitCode.USAGE
    assert "--keep-4bit" in folder.err


def test_overwriting_has_to_be_asked_for(edgectl, small, tmp_path):
    assert edgectl("import", small, "model", "--no-reference").code == 0
    again = edgectl("import", small, "model")
    assert again.code == ExitCode.FILE
    assert "is not empty" in again.err
    assert "--overwrite" in again.err
    assert edgectl("import", small, "model", "--overwrite", "-d", "bfloat16", "--no-reference").code == 0
    (tmp_path / "model/thesis.tex").write_text("years of work")
    kept = edgectl("import", small, "model", "--overwrite")
    assert kept.code == ExitCode.FILE
    assert "thesis.tex" in kept.err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "none.gguf",
            "none.gguf: no such file; give the path of a GGUF file or a model folder (edgectl pull",
        ),
        ("folder", "folder: is a folder without config.json; give a file in it: inside.gguf"),
        ("empty", "empty: is a folder without config.json; give a GGUF file or a model folder"),
        ("model", "model: holds neither model.safetensors nor model.safetensors.index.json nor a GGUF file"),
        ("notes.txt", "notes.txt: does not begin with GGUF"),
        ("other.gguf", "general.architecture = 'mamba' is not supported; supported: llama"),
        ("cut.gguf", "cut.gguf"),
        ("nothing.gguf", "nothing.gguf"),
    ],
)
def test_refused_sources_write_nothing(edgectl, small, tmp_path, source, message):
    for name in ("folder", "empty", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "folder/inside.gguf").touch()
    (tmp_path / "model/config.json").touch()
    (tmp_path / "notes.txt").write_text("not a model, by any means")
    (tmp_path / "cut.gguf").write_bytes(small.read_bytes()[:-1000])
    (tmp_path / "nothing.gguf").touch()
    write_gguf(tmp_path / "other.gguf", "mamba")
    before = {path.name for path in tmp_path.iterdir()}
    result = edgectl("import", source, "made/model")
    assert result.code == ExitCode.FILE
    assert message in result.err.splitlines()[-1]
    assert result.out == ""
    assert {path.name for path in tmp_path.iterdir()} == before


def test_the_demo_model(edgectl, demo_gguf, tmp_path):
    result = edgectl("import", "--demo", "demo", "-d", "bfloat16", "--no-reference", timeout=120)
    assert result.code == 0, result.err
    assert demo_gguf.name in result.err
    assert (tmp_path / "demo/model.safetensors").stat().st_size > 250_000_000


def test_bars_on_a_terminal(small, tmp_path):
    with Terminal("import", small, tmp_path / "made") as terminal:
        assert terminal.end() == 0
        assert "━" in terminal.text
        assert "100 %" in terminal.text
        assert "wrote" in terminal.text
