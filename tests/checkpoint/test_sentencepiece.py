"""``tokenizer.model``: the ids of the sentencepiece package itself, and what lies beside the file."""

# ruff: noqa: RUF001 - texts in many scripts

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edged.checkpoint.gguf_import import import_gguf
from edged.checkpoint.sentencepiece_model import SentencePieceModel
from edged.checkpoint.tokenizer import Tokenizer
from edged.decoding.detokenizer import Detokenizer
from edged.errors import CheckpointError

sentencepiece: Any = pytest.importorskip("sentencepiece")
TEXTS = [
    "中文没有空格，标点也不同。今天是2026年11月30日，气温3度。",
    "日本語のテキスト、カタカナ、ひらがな。 한국어 문장입니다.",
    "Привет, мир! مرحبا بالعالم 12",
    "La réponse est dans le troisième livre, à côté de la fenêtre.",
    "aaaaaaaaaaaaaaaa bbbb  cc   d\t\n\n  e\r\n",
    "👩\u200d👩\u200d👧\u200d👦 🇩🇪🙂🙃 e\u0301 \u200b\u00a0\u2028\u3000 \ufeff",
    "https://a.b/c?d=e&f=%20#g  $1,000.00 (50%) [x] {y} <z/>",
    "<s>a</s><unk><0x41><0xFF>▁▁",
    "",
    " ",
    "   ",
    " x ",
    "\x00\x01\x7f\u0080ÿ",
]
# How the models of the families are trained, each cut down to a vocabulary of some hundred pieces.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe"},
    "without bytes": {"model_type": "bpe", "byte_fallback": False},
    "gemma": {"model_type": "bpe", "add_dummy_prefix": False, "user_defined_symbols": ["<tool>", "\t\t", "▁▁▁", "<|x|>"]},
    "collapsing": {"model_type": "bpe", "remove_extra_whitespaces": True},
    "unigram": {"model_type": "unigram"},
    "unigram, nfkc": {
        "model_type": "unigram",
        "normalization_rule_name": "nmt_nfkc",
        "remove_extra_whitespaces": True,
        "byte_fallback": False,
    },
}  # fmt: skip
EXACT = tuple(kind for kind in KINDS if kind != "unigram, nfkc")


def corpus() -> list[str]:
    root = Path(__file__).parents[2] / "edged"
    lines = [
        line for file in sorted(root.rglob("*.py"))[:12] for line in file.read_text("utf-8").splitlines()
    ]
    return lines + TEXTS * 8


@functools.cache
def trained(kind: str) -> bytes:
    """A model of that kind, trained on programs and on texts in many scripts."""
    options = {
        "vocab_size": 800,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "character_coverage": 0.99,
        "num_threads": 1,
        "minloglevel": 2,
        **KINDS[kind],
    }
    output = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(corpus()), model_writer=output, **options)
    return output.getvalue()


@functools.cache
def reference(kind: str) -> Any:
    return sentencepiece.SentencePieceProcessor(model_proto=trained(kind))


def load(folder: Path, kind: str, **settings_: Any) -> Tokenizer:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "tokenizer.model").write_bytes(trained(kind))
    if settings_:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("sentencepiece")
    return {kind: load(folder / kind.replace(" ", "-"), kind) for kind in KINDS}


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str | None]:
    return [tokenizer.id_to_token(number) for number in ids]


def plain(kind: str, text: str) -> str:
    """The text without what is not the same to us and to the package.

    Control tokens that are spelled out are tokens to us and text to it; the package takes a spelled ``▁`` for a space
    before it collapses spaces or looks for users' own pieces, we do after.
    """
    if kind in ("gemma", "collapsing", "unigram, nfkc"):
        text = text.replace("▁", "")
    for token in ("<s>", "</s>", "<unk>"):
        text = text.replace(token, "")
    return plain(kind, text) if any(token in text for token in ("<s>", "</s>", "<unk>")) else text


@pytest.mark.parametrize("kind", KINDS)
def test_corpora_have_the_packages_ids(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    mine, theirs = tokenizers[kind], reference(kind)
    assert mine.vocabulary_size == theirs.get_piece_size()
    for text in corpus():
        text = plain(kind, text)  # noqa: PLW2901 - the same text
        if kind not in EXACT and not text.isascii():
            continue  # the library's normalization by character map differs in combining marks
        expected = theirs.encode(text)
        ids = mine.encode(text, add_special_tokens=False)
        assert ids == expected or as_likely(kind, ids, expected), (
            text,
            pieces(mine, ids),
            [theirs.id_to_piece(number) for number in expected],
        )


def as_likely(kind: str, ids: list[int], expected: list[int]) -> bool:
    """Whether a unigram model takes the two for equally likely: which of them it gives is the order of its sums."""
    theirs = reference(kind)
    scores = [math.fsum(theirs.get_score(number) for number in each) for each in (ids, expected)]
    return (
        "unigram" in kind
        and theirs.decode(ids) == theirs.decode(expected)
        and math.isclose(*scores, abs_tol=1e-4)
    )


any_text = (
    st.text(max_size=40)
    | st.text(alphabet="ab \t\n(){}_=defslfrtu01<>|xol▁.é中文🙂\u0301", max_size=40)
    | st.lists(st.sampled_from([*TEXTS, " def ", "return", "self."]), max_size=3).map("".join)
)


@pytest.mark.parametrize("kind", EXACT)
@given(text=any_text)
@example(text="a" * 60)
@example(text="\U0010ffff\ud7ff")
@settings(max_examples=120, deadline=None)
def test_any_text_has_the_packages_ids_and_comes_back(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
) -> None:
    mine, theirs = tokenizers[kind], reference(kind)
    text = plain(kind, text)
    ids = mine.encode(text, add_special_tokens=False)
    expected = theirs.encode(text)
    assert ids == expected or as_likely(kind, ids, expected)
    if KINDS[kind].get("byte_fallback", True):
        assert mine.decode(ids) == theirs.decode(ids)
        if kind != "collapsing":
            assert mine.decode(ids) == text.replace("▁", " ")


@pytest.mark.parametrize("kind", ["llama", "gemma", "unigram"])
@given(ids=st.lists(st.integers(3, 799), max_size=30))
@settings(max_examples=80, deadline=None)
def test_any_tokens_stream_exactly(tokenizers: dict[str, Tokenizer], kind: str, ids: list[int]) -> None:
    mine = tokenizers[kind]
    detokenizer = Detokenizer(mine, skip_special_tokens=True)
    streamed = "".join(detokenizer.feed(number) for number in ids) + detokenizer.flush()
    assert streamed == mine.decode(ids)


@pytest.mark.parametrize("kind", ["llama", "unigram"])
def test_control_tokens_that_a_user_spells_are_text_where_asked(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    mine = tokenizers[kind]
    text = "a</s><s>b<unk><0x41>"
    assert {1, 2} <= set(mine.encode(text, add_special_tokens=False))
    ids = mine.encode(text, add_special_tokens=False, parse_special=False)
    assert ids == reference(kind).encode(text)
    assert not {0, 1, 2} & set(ids)
    assert mine.decode(ids) == text


# What a model folder says


def test_a_folder_as_minicpm4s(tmp_path: Path) -> None:
    """A beginning that is required, and tokens behind the pieces that end a turn."""
    added = {"800": "<|im_end|>", "801": "<|im_start|>", "802": "<|tool_call|>"}
    decoder = {number: {"content": content, "special": True} for number, content in added.items()}
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, 800], "bos_token_id": 1}')
    loaded = load(
        tmp_path, "llama", added_tokens_decoder=decoder, legacy=True, bos_token="<s>", eos_token="</s>"
    )
    assert (loaded.vocabulary_size, loaded.eos_token_ids, loaded.bos_token_id) == (803, (2, 800), 1)
    assert loaded.adds_bos
    assert loaded.encode("Hi")[0] == 1
    chat = loaded.encode_chat("<|im_start|>user\nHi<|im_end|>\n")
    assert chat[:2] == [1, 801]
    assert (chat.count(1), chat.count(800)) == (1, 1)
    assert loaded.encode_chat("<s><|im_start|>user")[:2] == [1, 801]
    # Behind a special token the space is put again, as the model was trained.
    assert pieces(loaded, chat)[2].startswith("▁")  # type: ignore[union-attr]
    assert loaded.decode(loaded.encode("user\nHi<|im_end|>")) == "user\nHi"
    loaded.check_embedding(803)
    for rows in (802, 5000):
        with pytest.raises(CheckpointError, match="803 tokens"):
            loaded.check_embedding(rows)


def test_without_legacy_the_space_stands_at_the_beginning_alone(tmp_path: Path) -> None:
    loaded = load(tmp_path, "llama", legacy=False)
    ids = loaded.encode("x</s>x", add_special_tokens=False)
    assert pieces(loaded, ids) == [*pieces(loaded, reference("llama").encode("x")), "</s>", "x"]


def test_settings_decide_over_beginning_and_end(tmp_path: Path) -> None:
    assert load(tmp_path / "a", "llama", add_bos_token=False).encode("x")[0] != 1
    assert load(tmp_path / "b", "llama", add_eos_token=True).encode("x")[-1] == 2
    plain_ = load(tmp_path / "c", "llama")
    assert (plain_.special_tokens["bos_token"], plain_.eos_token_ids) == ("<s>", (2,))
    (tmp_path / "d").mkdir()
    (tmp_path / "d/special_tokens_map.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    (tmp_path / "d/added_tokens.json").write_text('{"<|end|>": 800}')
    assert load(tmp_path / "d", "llama").eos_token_ids == (800,)


def test_the_saved_tokenizer_is_the_same(tmp_path: Path, tokenizers: dict[str, Tokenizer]) -> None:
    for kind in ("llama", "gemma", "unigram"):
        folder = tmp_path / kind
        folder.mkdir()
        tokenizers[kind].save(folder)
        saved = Tokenizer.load(folder)
        for text in TEXTS:
            assert saved.encode(text) == tokenizers[kind].encode(text)
        assert (saved.adds_bos, saved.special_tokens) == (True, tokenizers[kind].special_tokens)


def test_the_vocabulary_in_a_gguf_file_gives_the_packages_ids(tmp_path: Path, recipe: Any) -> None:
    model = SentencePieceModel.read(load(tmp_path / "sp", "llama").folder / "tokenizer.model")
    recipe.metadata = {
        key: value for key, value in recipe.metadata.items() if not key.startswith("tokenizer")
    }
    recipe.metadata |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(model.pieces),
        "tokenizer.ggml.scores": list(model.scores),
        "tokenizer.ggml.token_type": list(model.types),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "llama.vocab_size": len(model.pieces),
    }
    embedding = np.resize(recipe.tensors["token_embd.weight"], (len(model.pieces), 256))
    recipe.tensors["token_embd.weight"] = embedding
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model")
    imported = Tokenizer.load(tmp_path / "model")
    for text in corpus():
        text = plain("llama", text)  # noqa: PLW2901 - the same text
        assert imported.encode(text, add_special_tokens=False) == reference("llama").encode(text)


# Files that are refused


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"900": {"content": "<gap>"}}, "'<gap>' has the id 900"),
        ({"5": {"content": "<other>"}}, "'<other>' has the id 5"),
        ({"x": {"content": "<a>"}}, "is no token"),
        ({"800": {"content": 7}}, "is no token"),
        ({"800": "<a>"}, "is no token"),
    ],
)
def test_added_tokens_that_do_not_fit(tmp_path: Path, added: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, "llama", added_tokens_decoder=added)


@pytest.mark.parametrize("kind", ["word", "char"])
def test_kinds_that_no_language_model_has(tmp_path: Path, kind: str) -> None:
    output = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_writer=output, model_type=kind, vocab_size=50, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(output.getvalue())
    with pytest.raises(CheckpointError, match="supported are unigram"):
        Tokenizer.load(tmp_path)


def test_files_that_are_no_model(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    for content, message in (
        (b"", "has 0 pieces"),
        (b"IQ== 0\nIg== 1\n", "is no SentencePiece model|has 0 pieces"),
        (b"\x0a\x02\x0a\x00", "unknown pieces|piece 0 is empty"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.load(tmp_path)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_files_are_refused_or_work(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(trained("llama"))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, max(len(content) - 1, 0)))
        content[place : place + 1] = bytes([data.draw(st.integers(0, 255))])
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "tokenizer.model").write_bytes(content)
    with contextlib.suppress(CheckpointError):
        Tokenizer.load(folder).encode("def f(x): return 中文")


def test_sentencepiece_is_not_needed_to_read_its_files() -> None:
    assert "sentencepiece" not in (
        importlib.import_module("edged.checkpoint.sentencepiece_tokenizer").__dict__
    )
