"""The demo model's tokenizer: the ids of the model's own rules, texts that stream exactly."""

# ruff: noqa: RUF001 - texts in many scripts

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_oracles import GPT2, AutoTokenizer, ByteLevelOracle, corpus, regex, stream

from edged.checkpoint.tokenizer import Tokenizer
from edged.errors import CheckpointError, InvalidArgumentError

if TYPE_CHECKING:
    from pathlib import Path

    import gguf


@pytest.fixture(scope="module")
def demo_tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.load(demo_model)


@pytest.fixture(scope="module")
def oracle(demo_reader: gguf.GGUFReader) -> ByteLevelOracle:
    return ByteLevelOracle(demo_reader, [r"\p{N}", GPT2])


def test_demo_tokenizer_follows_the_models_rules(demo_tokenizer: Tokenizer, oracle: ByteLevelOracle) -> None:
    for text in corpus():
        assert demo_tokenizer.encode(text) == oracle.encode(text), text[:200]


@given(
    st.text(
        alphabet=st.sampled_from(" \t\n1２½a'sé中🙂.,<|") | st.characters(exclude_categories=["Cs"]),
        max_size=40,
    )
)
@example("}\x16:")
@settings(max_examples=200, deadline=None)
def test_demo_tokenizer_follows_the_models_rules_on_any_text(
    demo_tokenizer: Tokenizer, oracle: ByteLevelOracle, text: str
) -> None:
    assert demo_tokenizer.encode(text) == oracle.encode(text)


def test_demo_ids_that_others_report(demo_tokenizer: Tokenizer) -> None:
    for text, ids in {
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
        "  multiple   spaces": [216, 2701, 256, 5600],
    }.items():
        assert demo_tokenizer.encode(text) == ids


def test_demo_tokenizer_is_that_of_transformers(
    demo_gguf: Path, demo_model: Path, demo_tokenizer: Tokenizer
) -> None:
    """transformers reads the written folder the same, and the GGUF file the same but for its missing digit rule."""
    folder = AutoTokenizer.from_pretrained(demo_model)
    direct = AutoTokenizer.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name)
    for text in corpus():
        ids = demo_tokenizer.encode(text)
        assert folder(text)["input_ids"] == ids
        assert folder.decode(ids) == demo_tokenizer.decode(ids, skip_special_tokens=False)
        without = regex.sub(r"\p{N}", "", text)
        assert direct(without)["input_ids"] == demo_tokenizer.encode(without)
        assert direct.decode(ids) == demo_tokenizer.decode(ids, skip_special_tokens=False)
        assert direct.decode(ids, skip_special_tokens=True) == demo_tokenizer.decode(ids)


def test_demo_properties(demo_tokenizer: Tokenizer) -> None:
    assert demo_tokenizer.vocabulary_size == 49152
    assert demo_tokenizer.eos_token_ids == (2, 0)
    assert demo_tokenizer.bos_token_id == 1
    assert demo_tokenizer.adds_bos is False
    assert demo_tokenizer.special_token_ids == frozenset(range(17))
    assert demo_tokenizer.special_tokens["pad_token"] == "<|im_end|>"
    assert demo_tokenizer.id_to_bytes(demo_tokenizer.encode("🙃")[0]) == "🙃".encode()[:2]


def test_special_tokens_are_text_where_asked(demo_tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user"
    assert demo_tokenizer.encode(text)[0] == 1
    plain = demo_tokenizer.encode(text, parse_special=False)
    assert not demo_tokenizer.special_token_ids & set(plain)
    assert demo_tokenizer.decode(plain) == text
    assert demo_tokenizer.encode(text)[0] == 1


def test_half_a_surrogate_pair_is_refused(demo_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be encoded"):
        demo_tokenizer.encode("a\ud800b")
    with pytest.raises(InvalidArgumentError):
        demo_tokenizer.decode([-1])


@given(st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=30), st.booleans())
@settings(max_examples=200, deadline=None)
def test_demo_texts_stream_exactly(demo_tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert stream(demo_tokenizer, ids, skip=skip) == demo_tokenizer.decode(ids, skip_special_tokens=skip)


def test_ids_without_a_token_add_nothing(demo_tokenizer: Tokenizer) -> None:
    ids = [19556, 49152, 10**6, 905]
    assert demo_tokenizer.decode(ids) == stream(demo_tokenizer, ids) == "Hello world"
    assert demo_tokenizer.id_to_token(-1) is demo_tokenizer.id_to_token(49152) is None


def test_a_vocabulary_that_contradicts_the_embedding_is_refused(demo_tokenizer: Tokenizer) -> None:
    for rows in (49152, 49153, 49152 + 1024):
        demo_tokenizer.check_embedding(rows)
    for rows in (49151, 100, 49152 + 2000):
        with pytest.raises(CheckpointError, match=f"49152 tokens.*{rows}"):
            demo_tokenizer.check_embedding(rows)
