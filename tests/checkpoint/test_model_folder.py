"""Model folders are made as a whole or not at all, whatever ends the work."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fixtures.small_models import model_files

from edged.checkpoint import model_folder
from edged.checkpoint.folder_import import import_folder, normalized_config
from edged.checkpoint.folder_record import FolderRecord, model_key, record_folder
from edged.checkpoint.model_files import choose_files, choose_gguf
from edged.checkpoint.model_folder import make_parents, new_folder, publish, remove_stale
from edged.errors import CheckpointError

ROOT = Path(__file__).parents[2]


def fill(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_takes_the_place_of_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(model_folder, "_exchange", lambda *_: False)
    for content in ("one", "two"):
        with new_folder(tmp_path / "deep/model", 0) as folder:
            fill(folder, content)
            publish(folder, tmp_path / "deep/model")
    assert (tmp_path / "deep/model/config.json").read_text() == "two"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["model"]


def test_work_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def work() -> None:
        with new_folder(tmp_path / "a/b/model", 0) as folder:
            fill(folder, "x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_stepped_aside_for_one_that_never_came_comes_back(tmp_path: Path) -> None:
    aside = tmp_path / ".model.0123abcd.replaced"
    aside.mkdir()
    fill(aside, "old")
    remove_stale(tmp_path / "model")
    assert (tmp_path / "model/config.json").read_text() == "old"
    aside.mkdir()
    remove_stale(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_other_models_beside_it_are_left_alone(tmp_path: Path) -> None:
    for name in (".model2.0123abcd.importing", ".model.x.pulling", "model2", ".model"):
        (tmp_path / name).mkdir()
    remove_stale(tmp_path / "model")
    assert len(list(tmp_path.iterdir())) == 4


WORK = """
import sys
from pathlib import Path
from edged.checkpoint.folder_import import import_folder
from edged.checkpoint.folder_record import record_folder
print("begun", flush=True)
import_folder(Path(sys.argv[1]), Path(sys.argv[2]), copy=True, overwrite=True,
              finish=lambda folder: record_folder(folder, {"kind": "file"}))
"""


@pytest.mark.one_python
def test_imports_killed_at_random_moments(tmp_path: Path) -> None:
    """After each kill the destination is one of the models as a whole; the next import removes what was left."""
    generator = random.Random(0)
    sources = []
    for seed in range(2):
        folder = tmp_path / f"source{seed}"
        folder.mkdir()
        for name, content in model_files(seed, shards=3, wide=4096).items():
            (folder / name).write_bytes(content)
        sources.append(folder)
    parent = tmp_path / "models"
    parent.mkdir()
    kills = 0
    for attempt in range(14):
        source = sources[attempt % 2]
        process = subprocess.Popen(
            [sys.executable, "-c", WORK, str(source), str(parent / "model")], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(generator.uniform(0, 0.08))
        process.kill()
        kills += process.wait() < 0
        process.stdout.close()
        seen = [path.name for path in parent.iterdir() if not path.name.startswith(".")]
        assert seen in ([], ["model"])
        if seen:
            record = FolderRecord.read(parent / "model")
            assert record is not None
            assert any(
                all((parent / "model" / name).read_bytes() == (one / name).read_bytes() for name in record.files if name != "config.json")
                for one in sources
            )  # fmt: skip
    assert kills
    import_folder(sources[0], parent / "model", overwrite=True)
    assert [path.name for path in parent.iterdir()] == ["model"]


# Folders in Hugging Face's form


def test_weights_are_shared_or_copied(write_model: Any, tmp_path: Path) -> None:
    source = write_model()
    import_folder(source, tmp_path / "shared")
    import_folder(source, tmp_path / "copied", copy=True)
    weights = (source / "model.safetensors").stat().st_ino
    assert (tmp_path / "shared/model.safetensors").stat().st_ino == weights
    assert (tmp_path / "copied/model.safetensors").stat().st_ino != weights
    assert (tmp_path / "copied/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_where_files_cannot_be_shared_they_are_copied(
    write_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "not allowed")

    monkeypatch.setattr(os, "link", refuse)
    source = write_model()
    seen: list[tuple[str, int, int]] = []
    import_folder(source, tmp_path / "copied", progress=lambda *each: seen.append(each))
    size = (source / "model.safetensors").stat().st_size
    assert seen[-1] == ("weights", size, size)


def test_what_tools_write_differently_comes_out_the_same(write_model: Any, tmp_path: Path) -> None:
    source = write_model(auto_map={"AutoModel": "modeling.py"})
    (source / "model.safetensors").rename(source / "gptq_model-4bit-128g.safetensors")
    (source / "quantize_config.json").write_text('{"bits": 4, "group_size": 128, "desc_act": true}')
    (source / "chat_template.json").write_text(json.dumps({"chat_template": "hello"}))
    (source / "modeling.py").write_text("import os")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    import_folder(source, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": True,
    }
    assert "auto_map" not in config
    assert (tmp_path / "model/chat_template.jinja").read_text() == "hello"
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
        "chat_template.jinja",
    }  # fmt: skip


def test_awq_in_a_file_of_its_own_and_one_in_the_configuration(write_model: Any) -> None:
    source = write_model("awq")
    (source / "quant_config.json").write_text('{"w_bit": 4, "q_group_size": 128, "zero_point": true}')
    assert normalized_config(source)["quantization_config"]["quant_method"] == "awq"
    other = write_model("both", quantization_config={"quant_method": "gptq"})
    (other / "quant_config.json").write_text('{"w_bit": 4}')
    assert normalized_config(other)["quantization_config"] == {"quant_method": "gptq"}


def test_sources_that_are_no_model(write_model: Any, tmp_path: Path) -> None:
    source = write_model(shards=3)
    with pytest.raises(CheckpointError, match="is the destination too"):
        import_folder(source, source)
    with pytest.raises(CheckpointError, match="lie in each other"):
        import_folder(source, source / "inside")
    with pytest.raises(CheckpointError, match="no such folder"):
        import_folder(tmp_path / "none", tmp_path / "model")
    (source / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard model-00002-of-00003\.safetensors is missing"):
        import_folder(source, tmp_path / "model")
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"2 safetensors files and no model\.safetensors\.index\.json"):
        import_folder(source, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_finish_raises_ends_the_import(write_model: Any, tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        assert (folder / "model.safetensors").exists()
        raise CheckpointError("no")

    with pytest.raises(CheckpointError, match="no"):
        import_folder(write_model(), tmp_path / "a/model", finish=refuse)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# Choosing files and remembering them


def test_a_gguf_file_is_chosen_by_a_part_of_its_name() -> None:
    files = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "sub/m-F16.gguf"]
    assert choose_gguf(files, "q8", "r") == "m-Q8_0.gguf"
    assert choose_gguf(files, "sub/m-F16.gguf", "r") == "sub/m-F16.gguf"
    assert choose_gguf([*files, "m-Q8_0.gguf.gguf"], "m-Q8_0.gguf", "r") == "m-Q8_0.gguf"
    assert choose_gguf(files[:1], "", "r") == files[0]
    for wanted in ("", "q", "q2"):
        with pytest.raises(CheckpointError, match="name one GGUF file"):
            choose_gguf(files, wanted, "r")
    with pytest.raises(CheckpointError, match="holds no GGUF"):
        choose_gguf([], "", "r")


def test_files_outside_the_root_and_of_other_kinds_are_not_the_models() -> None:
    files = choose_files(
        ["config.json", "model.safetensors", "sub/model.safetensors", "../config.json", "x/additional_chat_templates/a.jinja",
         "additional_chat_templates/a.jinja", "additional_chat_templates/../b.jinja", "tokenizer.model", "a.py"], "r"
    )  # fmt: skip
    assert files.small == ("additional_chat_templates/a.jinja", "config.json", "tokenizer.model")
    assert files.weights == ("model.safetensors",)


def test_the_key_of_a_model_follows_its_weights_and_configuration(write_model: Any, tmp_path: Path) -> None:
    source = write_model(shards=2)
    import_folder(source, tmp_path / "model", copy=True)
    folder = tmp_path / "model"
    before = model_key(folder)
    record_folder(folder, {"kind": "file"})
    assert model_key(folder) == before
    (folder / "generation_config.json").write_text("{}")
    assert model_key(folder) == before
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("8192", "4096"))
    assert model_key(folder) != before
    (folder / "config.json").write_text(config)
    assert model_key(folder) == before
    shard = folder / "model-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert model_key(folder) != before


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 2}', '{"format": 1}', '{"format": 1, "source": {}, "files": {"a": {"size": 1}}}',
                                  '{"format": 1, "source": {}, "files": {"a": {"size": "1", "mtime_ns": 1, "sha256": "x"}}}'])  # fmt: skip
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "edged.json").write_text(text)
    assert FolderRecord.read(tmp_path) is None


def test_a_parent_that_is_a_link_to_something_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for parent in (tmp_path / "link", tmp_path / "link" / "deeper"):
        with pytest.raises(CheckpointError, match=r"link: is a link to .*gone, which is missing"):
            make_parents(parent)
