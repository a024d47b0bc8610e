from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from edged.checkpoint.tokenizer import Tokenizer
from edged.decoding.detokenizer import Detokenizer
from edged.decoding.token_table import TokenTable


@pytest.fixture(scope="module")
def byte_level(demo_model):
    """The demo model's tokenizer and the library's own."""
    table = Tokenizer.load(demo_model)
    return TokenTable(table, table.vocabulary_size), tokenizers.Tokenizer.from_file(
        str(demo_model / "tokenizer.json")
    )


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """A small SentencePiece-like tokenizer with every byte, some text and special tokens."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁a", "▁the", "b", "é", "中", "▁▁", "\ufffd", "<0xZZ>", "😀"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: n for n, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    loaded = Tokenizer.load(folder)
    return TokenTable(loaded, len(words) + 4), tokenizer


def stream(table, ids, **options):
    detokenizer = Detokenizer(table, **options)
    return [*map(detokenizer.feed, ids), detokenizer.flush()]


@settings(deadline=None)
@given(st.data(), st.booleans())
def test_byte_level_texts_joined_are_all_ids_decoded_at_once(byte_level, data, skip):
    table, library = byte_level
    ids = data.draw(st.lists(st.integers(0, len(table) - 1), max_size=40))
    assert "".join(stream(table, ids, skip_special_tokens=skip)) == library.decode(
        ids, skip_special_tokens=skip
    )


@settings(deadline=None)
@given(st.text(max_size=30))
@example("\ufffd\ufffd")
def test_byte_level_text_comes_back_as_the_library_gives_it(byte_level, text):
    table, library = byte_level
    ids = library.encode(text, add_special_tokens=False).ids
    assert "".join(stream(table, ids, skip_special_tokens=False)) == library.decode(
        ids, skip_special_tokens=False
    )


@pytest.mark.parametrize(
    "text", ["👩‍👩‍👧‍👦 naïve 中文 \r\n\t", "\ufffd\ufffd", "def f(x):\n\treturn  x", "ก็ \u202eabc"]
)
def test_byte_level_text_streams_without_a_replacement(byte_level, text):
    table, library = byte_level
    assert "".join(stream(table, library.encode(text, add_special_tokens=False).ids)) == text


def test_a_character_of_several_tokens_comes_with_its_last_one(byte_level):
    table, library = byte_level
    ids = library.encode("𓀀", add_special_tokens=False).ids
    assert len(ids) > 1
    assert stream(table, ids) == [""] * (len(ids) - 1) + ["𓀀", ""]


def test_bytes_that_are_no_utf8_are_released_and_not_held_for_ever(byte_level):
    table, library = byte_level
    lead = library.encode("𓀀", add_special_tokens=False).ids[0]
    letter = library.encode("a", add_special_tokens=False).ids[0]
    assert stream(table, [lead, letter, lead]) == ["", "\ufffda", "", "\ufffd"]


@settings(deadline=None, max_examples=300)
@given(st.data(), st.booleans())
def test_sentencepiece_texts_joined_are_all_ids_decoded_at_once(sentencepiece, data, skip):
    table, library = sentencepiece
    # Bytes of real characters beside random ones, so that valid, invalid and mixed runs all come up.
    character = st.sampled_from("aé中😀\ufffd").map(lambda c: [3 + byte for byte in c.encode()])
    anything = st.lists(st.integers(0, len(table) - 1), max_size=6)
    ids = [i for part in data.draw(st.lists(st.one_of(character, anything), max_size=8)) for i in part]
    assert "".join(stream(table, ids, skip_special_tokens=skip)) == library.decode(
        ids, skip_special_tokens=skip
    )


def test_sentencepiece_bytes_come_with_the_text_token_that_ends_them(sentencepiece):
    table, library = sentencepiece
    run = [3 + byte for byte in "中".encode()]
    b = library.token_to_id("b")
    assert stream(table, [*run, b]) == ["", "", "", "中b", ""]
    assert stream(table, [*run, 3 + 0xFF, b]) == ["", "", "", "", "\ufffd" * 4 + "b", ""]
    assert stream(table, run) == ["", "", "", "中"]


def test_sentencepiece_drops_one_space_at_the_start_only(sentencepiece):
    table, library = sentencepiece
    the, two = library.token_to_id("▁the"), library.token_to_id("▁▁")
    assert stream(table, [the, the]) == ["the", " the", ""]
    assert stream(table, [two]) == [" ", ""]
    assert stream(table, [1, the]) == ["", "the", ""]
    assert stream(table, [1, the], skip_special_tokens=False) == ["<s>", " the", ""]


def test_an_id_without_a_token_adds_nothing_and_ends_no_character(sentencepiece):
    table, _ = sentencepiece
    run = [3 + byte for byte in "中".encode()]
    assert "".join(stream(table, [run[0], len(table) - 1, *run[1:]])) == "中"
