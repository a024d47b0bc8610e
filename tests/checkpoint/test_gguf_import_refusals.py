"""What an import of a GGUF file refuses, and what it leaves behind."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from edged.checkpoint.gguf_file import GgufFile, can_dequantize
from edged.checkpoint.gguf_import import import_gguf
from edged.errors import CheckpointError, InvalidArgumentError

if TYPE_CHECKING:
    from pathlib import Path

Kind = gguf.GGMLQuantizationType


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def refused(recipe: Any, folder: Path, message: str) -> None:
    source = recipe.write(folder / "m.gguf")
    with pytest.raises(CheckpointError, match=message) as caught:
        import_gguf(source, folder / "deep/er/model")
    assert str(source) in caught.value.message
    assert [entry.name for entry in folder.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", None, r"llama\.block_count is None"),
        ("llama.block_count", 3, r"missing tensors: blk\.2\.attn_norm\.weight"),
        ("llama.block_count", 2**31, r"llama\.block_count is 2147483648; at most 1024"),
        ("llama.block_count", 1, r"without a place: blk\.1\."),
        ("llama.context_length", 0, r"llama\.context_length is 0"),
        ("llama.embedding_length", "x", r"llama\.embedding_length is 'x'"),
        ("llama.embedding_length", 512, r"dimension_count = 64 is not supported; heads have 128"),
        (
            "llama.feed_forward_length",
            256,
            r"blk\.\{0-1\}\.ffn_gate\.weight is \[512, 256\] instead of \[256, 256\]",
        ),
        ("llama.attention.head_count", 0, r"head_count is 0"),
        ("llama.attention.head_count_kv", 3, "4 query heads and 3 key/value heads"),
        ("llama.attention.layer_norm_rms_epsilon", None, "layer_norm_rms_epsilon is missing"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "rms_norm_eps would be nan"),
        ("llama.rope.dimension_count", 32, r"llama\.rope\.dimension_count = 32"),
        ("llama.attention.value_length", 32, r"llama\.attention\.value_length = 32"),
        ("llama.rope.freq_base", -1.0, "rope_theta would be -1"),
        ("llama.rope.scaling.type", "magic", "'magic' is not supported"),
        ("llama.expert_count", 8, r"llama\.expert_count = 8"),
        ("llama.logit_scale", 2.0, r"llama\.logit_scale = 2"),
        ("llama.vocab_size", 12, r"llama\.vocab_size is 12"),
        ("tokenizer.ggml.tokens", ["a", "b", "ab"], "has 3 tokens, but token_embd.weight has"),
        ("split.count", 2, "one part of 2"),
        ("tokenizer.ggml.model", "t5", r"tokenizer\.ggml\.model is 't5'"),
        ("tokenizer.ggml.model", None, r"tokenizer\.ggml\.model is ''"),
        ("tokenizer.ggml.pre", "klingon", r"tokenizer\.ggml\.pre = 'klingon' is not supported"),
        ("tokenizer.ggml.tokens", None, r"tokenizer\.ggml\.tokens is missing"),
        ("tokenizer.ggml.tokens", ["a", "b", "a"], "tokens 0 and 2 are both 'a'"),
        ("tokenizer.ggml.token_type", [1, 1], "2 token types"),
        ("tokenizer.ggml.merges", None, r"tokenizer\.ggml\.merges is missing"),
        ("tokenizer.ggml.merges", ["ab"], "'ab', which is no pair"),
        ("tokenizer.ggml.merges", ["he zzz"], "merges do not fit"),
        ("tokenizer.ggml.bos_token_id", 100_000, "bos_token_id is 100000"),
        ("tokenizer.ggml.eot_token_id", 100_000, "eot_token_id is 100000"),
    ],
)
def test_metadata_that_is_not_supported_is_refused_by_name(
    tmp_path: Path, recipe: Any, key: str, value: Any, message: str
) -> None:
    recipe.metadata.pop(key, None)
    if key == "tokenizer.ggml.tokens" and value == ["a", "b", "ab"]:
        recipe.metadata |= {"tokenizer.ggml.token_type": [1, 1, 1], "tokenizer.ggml.merges": ["a b"]}
        recipe.metadata = {
            name: item for name, item in recipe.metadata.items() if not name.endswith("token_id")
        }
    if value is not None:
        recipe.metadata[key] = value
    refused(recipe, tmp_path, message)


def test_another_architecture_is_refused_by_name(tmp_path: Path, recipe: Any) -> None:
    recipe.architecture = "gemma3"
    refused(recipe, tmp_path, "'gemma3' is not supported; supported: llama, minicpm, qwen2, qwen3")


def test_other_tensor_types_are_refused_by_name(tmp_path: Path, recipe: Any) -> None:
    recipe.tensors["blk.0.attn_v.weight"] = recipe.tensors["blk.0.attn_v.weight"].astype(np.float64)
    recipe.tensors["blk.1.attn_v.weight"] = recipe.tensors["blk.1.attn_v.weight"].astype(np.int8)
    refused(recipe, tmp_path, "tensor types that are not supported: F64, I8")
    assert not can_dequantize(Kind.Q8_K)


def test_tensors_are_all_there_and_no_others(tmp_path: Path, recipe: Any) -> None:
    del recipe.tensors["blk.1.ffn_up.weight"]
    recipe.tensors["blk.0.attn_q_norm.weight"] = np.ones(64, np.float32)
    refused(
        recipe,
        tmp_path,
        r"missing tensors: blk\.1\.ffn_up\.weight; tensors without a place: blk\.0\.attn_q_norm",
    )


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, recipe: Any) -> None:
    recipe.tensors["blk.1.attn_norm.weight"] = np.ones(128, np.float32)
    refused(recipe, tmp_path, r"blk\.1\.attn_norm\.weight is \[128\] instead of \[256\]")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, recipe: Any, value: float) -> None:
    recipe.tensors["blk.1.ffn_norm.weight"][3] = value
    refused(recipe, tmp_path, r"model\.layers\.1\.post_attention_layernorm\.weight' holds NaN or infinity")


def test_weights_beyond_float16_are_refused_for_float16(tmp_path: Path, recipe: Any) -> None:
    recipe.tensors["output_norm.weight"][0] = 70000.0
    source = recipe.write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="exceeds the range of float16"):
        import_gguf(source, tmp_path / "model", dtype="float16")
    import_gguf(source, tmp_path / "model", dtype="bfloat16")


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="'int3'"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "model", dtype="int3")


def test_progress_is_told_to_the_end(tmp_path: Path, recipe: Any) -> None:
    calls: list[tuple[str, int, int]] = []
    import_gguf(
        recipe.write(tmp_path / "m.gguf"), tmp_path / "model", progress=lambda *call: calls.append(call)
    )
    weights = [call for call in calls if call[0] == "weights"]
    total = weights[0][2]
    assert weights[0] == ("weights", 0, total)
    assert weights[-1] == ("weights", total, total)
    assert [done for _, done, _ in weights] == sorted(done for _, done, _ in weights)
    assert [call[0] for call in calls[:2]] == ["tokenizer", "tokenizer"]


def test_an_interrupted_import_leaves_nothing(tmp_path: Path, recipe: Any) -> None:
    source = recipe.write(tmp_path / "m.gguf")
    (tmp_path / "empty").mkdir()

    def interrupt(what: str, done: int, _total: int) -> None:
        if what == "weights" and done:
            raise KeyboardInterrupt

    for destination in (tmp_path / "model", tmp_path / "new/model", tmp_path / "empty"):
        with pytest.raises(KeyboardInterrupt):
            import_gguf(source, destination, progress=interrupt)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty", "m.gguf"]
    assert not list((tmp_path / "empty").iterdir())
    import_gguf(source, tmp_path / "empty")
    before = {entry.name: entry.stat().st_ino for entry in (tmp_path / "empty").iterdir()}
    with pytest.raises(KeyboardInterrupt):
        import_gguf(source, tmp_path / "empty", progress=interrupt, overwrite=True)
    assert {entry.name: entry.stat().st_ino for entry in (tmp_path / "empty").iterdir()} == before


def test_what_is_there_is_not_touched_unless_asked(tmp_path: Path, recipe: Any) -> None:
    source = recipe.write(tmp_path / "m.gguf")
    import_gguf(source, tmp_path / "model")
    with pytest.raises(CheckpointError, match="is not empty"):
        import_gguf(source, tmp_path / "model")
    import_gguf(source, tmp_path / "model", overwrite=True, dtype="float16")
    assert config_of(tmp_path / "model")["torch_dtype"] == "float16"
    (tmp_path / "model/thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"'thesis\.txt', which no import wrote"):
        import_gguf(source, tmp_path / "model", overwrite=True)
    with pytest.raises(CheckpointError, match="exists and is no folder"):
        import_gguf(source, source, overwrite=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m.gguf", "model"]


def test_what_a_killed_import_left_is_removed_and_a_running_one_is_not(tmp_path: Path, recipe: Any) -> None:
    source = recipe.write(tmp_path / "m.gguf")
    for name in ("dead", "alive"):
        (tmp_path / f".model.{name}.importing").mkdir()
    descriptor = os.open(tmp_path / ".model.alive.importing", os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        import_gguf(source, tmp_path / "model")
    finally:
        os.close(descriptor)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".model.alive.importing", "m.gguf", "model"]


def test_a_disk_that_is_too_small_is_refused(
    tmp_path: Path, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = recipe.write(tmp_path / "m.gguf")
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(CheckpointError, match=r"1\.00 MiB are free"):
        import_gguf(source, tmp_path / "new/model")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


def test_a_file_that_is_already_open_elsewhere_is_closed_again(tmp_path: Path, recipe: Any) -> None:
    source = recipe.write(tmp_path / "m.gguf")
    with GgufFile(source) as file:
        descriptor = file._file.fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):
        fcntl.fcntl(descriptor, fcntl.F_GETFD)
