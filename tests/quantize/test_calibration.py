"""Calibration text: every form that is read, and every fault that is named."""

from __future__ import annotations

import json

import pytest
from fixtures.small_models import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.checkpoint.tokenizer import Tokenizer
from edged.errors import InvalidArgumentError
from edged.quantize.calibration import cut_sequences, read_documents, trial_documents


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    (folder / "config.json").write_text("{}")
    return Tokenizer.load(folder)


def test_documents_are_the_file_its_lines_or_its_objects(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("eins\n\nzwei 三\n", encoding="utf-8")
    assert read_documents(path) == ["eins\n\nzwei 三\n"]
    assert read_documents(path, lines=True) == ["eins", "zwei 三"]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": each}) for each in ("a\nb", "", "c")) + "\n\n")
    assert read_documents(path) == ["a\nb", "c"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b" \n\t\n", "holds no text"),
        ("a.txt", b"abc\xff\xfe", "is not UTF-8 at byte 3"),
        ("a.jsonl", b'{"text": "a"}\n{"words": 3}\n', r'line 2 is no JSON object with a "text"'),
        ("a.jsonl", b"[1]\n", "line 1 is no JSON object"),
        ("a.jsonl", b"{\n", "line 1 is no JSON object"),
    ],
)
@pytest.mark.parametrize("lines", [True, False])
def test_what_is_no_text_is_refused(tmp_path, name, content, message, lines):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        read_documents(tmp_path / name, lines=lines)
    assert caught.value.field == "calibration"
    with pytest.raises(InvalidArgumentError, match="cannot be read: No such file"):
        read_documents(tmp_path / "missing.txt")


@settings(deadline=None, max_examples=60)
@given(
    documents=st.lists(st.text("abc", min_size=1, max_size=90), min_size=1, max_size=6),
    count=st.integers(1, 9),
    length=st.integers(2, 20),
)
def test_sequences_are_pieces_of_the_documents_one_after_the_other(tokenizer, documents, count, length):
    stream = []
    for document in documents:
        stream += ([0] if stream else []) + tokenizer.encode(document)
    whole = len(stream) // length
    if not whole:
        with pytest.raises(InvalidArgumentError, match=f"has {len(stream)} tokens"):
            cut_sequences(documents, tokenizer, count=count, length=length, least=1)
        return
    found = cut_sequences(documents, tokenizer, count=count, length=length, least=1).sequences
    pieces = [stream[start : start + length] for start in range(0, whole * length, length)]
    assert found.shape == (min(count, whole), length)
    assert len({pieces.index(row) for row in found.tolist()}) >= 1
    if count >= whole:
        assert found.tolist() == pieces


def test_too_little_text_is_refused_with_both_numbers(tokenizer):
    with pytest.raises(InvalidArgumentError, match=r"the text has 100 tokens: calibration needs at least 96"):
        cut_sequences(["x" * 100], tokenizer, count=8, length=64, least=96)
    with pytest.raises(InvalidArgumentError, match=r"2 sequences of 32 are 64 tokens.* at least 96"):
        cut_sequences(["x" * 1000], tokenizer, count=2, length=32, least=96)
    assert cut_sequences(["x" * 100], tokenizer, count=8, length=64, least=96, trial=True).trial


def test_the_built_in_text_is_english_chinese_and_code(tokenizer):
    (document,) = trial_documents()
    assert "def " in document
    assert "模型" in document
    assert len(tokenizer.encode(document)) > 7000


def test_lines_end_at_line_feeds_alone(tmp_path):
    inside = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"
    path = tmp_path / "a.txt"
    path.write_bytes(f"{inside}\r\nz\n".encode())
    assert read_documents(path, lines=True) == [inside, "z"]
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\u2028b"}\n{"text": "c"}\n', encoding="utf-8")
    assert read_documents(path) == ["a\u2028b", "c"]


def test_half_a_surrogate_pair_is_named_with_its_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b\\ud800"}\n')
    with pytest.raises(
        InvalidArgumentError, match=r"line 2 holds \\ud800, half of a surrogate pair"
    ) as caught:
        read_documents(path)
    assert caught.value.field == "calibration"
