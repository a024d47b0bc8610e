"""``edgectl quantize``: what it refuses, with which status and which remedy, and that nothing is left then."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from quantized_models import random_model, write_folder
from safetensors.numpy import load_file, save_file

from edged.cli.exit_codes import ExitCode
from edged.cli.main import main

SMALL = ("--group", "32", "--sequences", "8", "--sequence-length", "48", "--threads", "1")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("models") / "dense", random_model())


@pytest.fixture
def edgectl(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGED_ADDRESS", "")

    def run(*arguments):
        code = main([str(each) for each in arguments])
        output = capsys.readouterr()
        return code, " ".join((output.out + output.err).split())

    return run


@pytest.mark.parametrize("method", ["rtn", "gptq", "p-gptq", "awq-gptq"])
def test_every_method_writes_a_folder(edgectl, dense, text, tmp_path, method):
    options = ("--group", "32") if method == "rtn" else ("--calibration", text, *SMALL)
    code, said = edgectl("quantize", dense, "q", "--method", method, *options)
    assert code == ExitCode.DONE, said
    assert f"wrote {tmp_path / 'q'}" in said or "wrote q" in said
    meta = json.loads((tmp_path / "q/config.json").read_text())["quantization_config"]["meta"]
    assert (meta["method"], meta["skipped_positions"]) == (method, 4 if method == "p-gptq" else 0)
    record = json.loads((tmp_path / "q/edged.json").read_text())
    assert method in json.dumps(record)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["q"]


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", "holds no text; give a file of text"),
        (b" \n \n", "holds no text; give a file of text"),
        (b"caf\xe9", "is not UTF-8 at byte 3; convert it (iconv -t UTF-8)"),
        (
            b"too short",
            "the text has 9 tokens: calibration needs at least 96 in sequences of 48, as many as the model's widest",
        ),
        (None, "cannot be read: No such file"),
    ],
    ids=["empty", "blank", "Latin-1", "short", "missing"],
)
def test_calibration_text_that_cannot_be_is_a_file_at_fault(edgectl, dense, tmp_path, content, wanted):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    code, said = edgectl("quantize", dense, "q", "--calibration", "text", *SMALL)
    assert code == ExitCode.FILE
    assert wanted in said
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (
            ("--group", "128"),
            "group 128 does not divide the 64 input channels of layers.0.qkv; groups of 32 do",
        ),
        (("--group", "12"), "group 12 is not a multiple of 8"),
        (("--threads", "1025"), "should be less than or equal to 1024"),
        (("--group", "9" * 5000), "is no whole number, nor row"),
        (("--group", "many"), "'many' is no whole number, nor row"),
        (("--method", "best"), "'best' is not one of rtn, gptq, p-gptq, awq-gptq, ternary-pack"),
        (("--act-order", "up"), "'up' is not one of static, free, none"),
        (("--damping", "0"), "damping 0.0 is not above 0 and at most 1"),
        (("--skip-first", "48"), "skip_first 48 leaves nothing of sequences of 48 tokens"),
        (("--sequence-length", "999"), "the model has 256 positions"),
        (("--dtype", "int8"), "'int8' is not one of float32, float16, bfloat16"),
        (("--device", "tpu"), "'tpu' is not one of cpu, cuda"),
        (("--lm-head", "drop"), "'drop' is not keep or quantize"),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
def test_options_that_cannot_be_are_refused_by_name(edgectl, dense, text, options, wanted):
    code, said = edgectl("quantize", dense, "q", "--calibration", text, *SMALL, *options)
    assert code == ExitCode.USAGE
    assert wanted in said.replace(" │ │ ", " ")
    assert options[0] in said
    assert not [path for path in Path.cwd().iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("method", "options", "named"),
    [
        ("rtn", ("-c", "text"), "--calibration"),
        ("rtn", ("--sequence-length", "512"), "--sequence-length"),
        ("rtn", ("--skip-first", "0"), "--skip-first"),
        ("ternary-pack", ("-g", "128"), "--group"),
        ("ternary-pack", ("--asym",), "--sym/--asym"),
        ("ternary-pack", ("--device", "cpu"), "--device"),
        ("ternary-pack", ("--lines",), "--lines"),
    ],
)
def test_options_that_would_change_nothing_are_refused(edgectl, dense, method, options, named):
    code, said = edgectl("quantize", dense, "q", "--method", method, *options)
    assert code == ExitCode.USAGE
    words = said.replace(" │ │ ", " ")
    assert f"'{named}'" in words
    assert f"it does not apply to --method {method}" in words
    assert not [path for path in Path.cwd().iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (("embed_tokens", np.nan), "'model.embed_tokens.weight' holds NaN or infinity"),
        (("norm", np.inf), "'model.norm.weight' holds NaN or infinity"),
        (("layers.1.post_attention_layernorm", 3e38), "layers.1.gate_up: its inputs hold NaN or infinity"),
        (
            ("layers.2.self_attn.v_proj", np.inf),
            "'model.layers.2.self_attn.v_proj.weight' holds NaN or infinity",
        ),
        (("layers.1.mlp.down_proj", np.nan), "'model.layers.1.mlp.down_proj.weight' holds NaN or infinity"),
    ],
)
def test_infinity_names_the_layer_and_leaves_no_folder(edgectl, dense, text, fault, where):
    source, (module, value) = Path("broken"), fault
    source.mkdir()
    for path in dense.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors[f"model.{module}.weight"][...] = value
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    code, said = edgectl("quantize", source, "q", "-m", "p-gptq", "--calibration", text, *SMALL)
    assert code == ExitCode.FILE
    assert where in said
    assert "download or convert the source again" in said
    assert not [path for path in Path.cwd().iterdir() if path.is_dir() and path != source.absolute()]


@pytest.mark.parametrize("destination", ["/proc/q", "/proc/none/q"])
def test_a_place_where_no_folder_can_be_is_refused(edgectl, dense, destination):
    code, said = edgectl("quantize", dense, destination, "-m", "rtn", "-g", "32")
    assert code == ExitCode.FILE
    assert "cannot be" in said


def test_a_destination_that_is_taken_is_said_before_text_is_read(edgectl, dense, tmp_path):
    (tmp_path / "q").mkdir()
    (tmp_path / "q/a").touch()
    code, said = edgectl("quantize", dense, "q", "--calibration", "missing", *SMALL)
    assert code == ExitCode.FILE
    assert "is not empty" in said
