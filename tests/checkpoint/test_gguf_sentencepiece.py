"""SentencePiece vocabularies of GGUF files."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_oracles import stream, written

from edged.checkpoint.tokenizer import Tokenizer
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

SCORED = {
    "he": -1.0,
    "▁w": -2.0,
    "ll": -3.0,
    "or": -4.0,
    "hell": -5.0,
    "▁wor": -6.0,
    "o▁": -7.0,
    "▁▁": -8.0,
    "lo": -2.5,
}
PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *[f"<0x{byte:02X}>" for byte in range(256)],
    *SCORED,
    *"helowrd▁你a",
    "<tool>",
]


def with_sentencepiece(recipe: Any) -> Any:
    recipe.metadata = {
        key: value for key, value in recipe.metadata.items() if not key.startswith("tokenizer")
    }
    recipe.metadata |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": [SCORED.get(piece, -100.0 if len(piece) == 1 else 0.0) for piece in PIECES],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 260) + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "llama.vocab_size": len(PIECES),
    }
    recipe.tensors["token_embd.weight"] = np.resize(recipe.tensors["token_embd.weight"], (len(PIECES), 256))
    return recipe


@pytest.fixture
def sentencepiece(recipe: Any) -> Any:
    return with_sentencepiece(recipe)


def sentencepiece_oracle(text: str) -> list[int]:
    """Joins the two neighbours whose union scores best, first from the left; what is not left over are bytes."""
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [
            (-SCORED[a + b], place)
            for place, (a, b) in enumerate(itertools.pairwise(symbols))
            if a + b in SCORED
        ]
        if not joins:
            break
        place = min(joins)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [PIECES.index(symbol)] if symbol in PIECES else [3 + byte for byte in symbol.encode()]
    return ids


@given(st.text(alphabet="helowrd a你好é🙂", max_size=30))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_joins_the_best_pair(spm_tokenizer: Tokenizer, text: str) -> None:
    assert spm_tokenizer.encode(text, add_special_tokens=False) == sentencepiece_oracle(text)


@pytest.fixture(scope="module")
def spm_tokenizer(new_recipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(written(with_sentencepiece(new_recipe()), tmp_path_factory.mktemp("spm")))


def test_sentencepiece_begins_with_bos_and_splits_at_special_tokens(spm_tokenizer: Tokenizer) -> None:
    assert spm_tokenizer.encode("hell")[:2] == [1, PIECES.index("▁")]
    assert spm_tokenizer.adds_bos
    ids = spm_tokenizer.encode("he</s>he<tool>")
    assert (ids.count(2), ids.count(PIECES.index("<tool>")), ids.count(PIECES.index("he"))) == (1, 1, 2)
    assert spm_tokenizer.encode_chat("he")[0] == 1
    assert spm_tokenizer.encode_chat("<s>he").count(1) == 1


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=20)
    | st.text(alphabet="helo 你好é🙂").map(sentencepiece_oracle)
)
@settings(max_examples=200, deadline=None)
def test_sentencepiece_texts_stream_exactly(spm_tokenizer: Tokenizer, ids: list[int]) -> None:
    assert stream(spm_tokenizer, ids) == spm_tokenizer.decode(ids)


@given(st.text(alphabet="helowrd a你好é🙂 ", max_size=30))
def test_sentencepiece_texts_come_back(spm_tokenizer: Tokenizer, text: str) -> None:
    assert spm_tokenizer.decode(spm_tokenizer.encode(text)) == text


def test_sentencepiece_without_a_space_before_the_text(tmp_path: Path, sentencepiece: Any) -> None:
    sentencepiece.metadata["tokenizer.ggml.add_space_prefix"] = False
    loaded = Tokenizer.load(written(sentencepiece, tmp_path))
    assert loaded.encode("he", add_special_tokens=False) == [PIECES.index("he")]
    assert loaded.decode(loaded.encode(" he")) == stream(loaded, loaded.encode(" he")) == " he"


def test_sentencepiece_vocabularies_that_are_damaged(tmp_path: Path, sentencepiece: Any) -> None:
    sentencepiece.metadata["tokenizer.ggml.scores"] = [0.0]
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.scores"):
        written(sentencepiece, tmp_path)
