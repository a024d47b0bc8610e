"""Tokenizers of model folders: what is read of their files, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from tokenizer_oracles import written
from tokenizers import decoders

from edged.checkpoint.tokenizer import Tokenizer
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, recipe: Any) -> Path:
    return written(recipe, tmp_path)


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing"),
        ("", "cannot be loaded"),
        ("{}", "cannot be loaded"),
        ('{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "cannot be loaded|not supported|empty"),
        ("[" * 10000, "cannot be loaded"),
    ],
)
def test_a_tokenizer_file_that_is_none_is_refused(folder: Path, content: str | None, message: str) -> None:
    path = folder / "tokenizer.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(folder)


def test_a_tokenizer_model_that_is_none_says_what_is_needed(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(
        CheckpointError, match=r"is no SentencePiece model.*put the model's tokenizer\.json beside it"
    ):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Metaspace(),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([decoders.Replace(tokenizers.Regex("a+"), "b"), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
    ],
)
def test_decoders_that_cannot_be_streamed_are_refused_by_name(folder: Path, decoder: Any) -> None:
    path = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.decoder = decoder
    tokenizer.save(path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: (the )?decoder .* not supported"):
        Tokenizer.load(folder)


def test_truncation_and_padding_of_the_file_are_not_used(folder: Path) -> None:
    path = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(path)
    assert len(Tokenizer.load(folder).encode("abcde")) == 5


def test_end_tokens_come_from_both_configurations(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[5, 7])
    change(folder / "config.json", eos_token_id=[7, 9], bos_token_id=None)
    assert Tokenizer.load(folder).eos_token_ids == (5, 7, 9)
    change(folder / "generation_config.json", eos_token_id=4)
    change(folder / "config.json", eos_token_id=None)
    assert Tokenizer.load(folder).eos_token_ids == (4,)
    (folder / "generation_config.json").unlink()
    own = Tokenizer.load(folder)
    assert own.eos_token_ids == (own.token_to_id("<|im_end|>"),)


@pytest.mark.parametrize("value", [-1, 10_000, "x", [1, None, True], 1.0])
def test_end_tokens_that_are_no_tokens_are_refused(folder: Path, value: Any) -> None:
    change(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(CheckpointError, match="eos_token_id"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("text", ["[]", "{", "nul"])
def test_configurations_that_are_no_objects_are_refused(folder: Path, text: str) -> None:
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.load(folder)
