"""A model's tokenizer: ``tokenizer.json`` by the ``tokenizers`` library, with what the files beside it say.

Where there is only a SentencePiece ``tokenizer.model``, it is converted.

It loads neither transformers nor torch. All methods may be called from several threads at once.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import processors

from edged.checkpoint.json_file import read_optional_json_object
from edged.checkpoint.model_folder import write_json
from edged.checkpoint.sentencepiece_model import MODEL_FILE
from edged.checkpoint.sentencepiece_tokenizer import build_sentencepiece
from edged.checkpoint.token_text import TextRule, read_text_rule
from edged.errors import CheckpointError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENIZER_FILE = "tokenizer.json"
_MAX_FILE_BYTES = 256 << 20
# Embeddings are padded to a round number of rows; no model in use pads by more than this many or this share.
_MAX_PADDING_ROWS = 1024
_MAX_PADDING_SHARE = 32


class Tokenizer:
    """Text to token ids and back. Use :meth:`load`.

    Attributes:
        vocabulary_size: One more than the largest token id.
        added_tokens: Ids of the added tokens by their texts.
        special_token_ids: Ids of the special tokens, which :meth:`decode` can leave out.
        eos_token_ids: Ids that end an answer: those of ``generation_config.json`` and ``config.json``, else the
            tokenizer's own end-of-sequence token.
        bos_token_id: The beginning-of-sequence token, if the model has one.
        adds_bos: Whether :meth:`encode` puts it first.
    """

    def __init__(
        self, folder: Path, tokenizer: tokenizers.Tokenizer, rule: TextRule, settings: dict[str, Any]
    ) -> None:
        self.folder = folder
        self._tokenizer = tokenizer
        self._rule = rule
        self._settings = settings
        self._plain: tokenizers.Tokenizer | None = None
        self._plain_lock = threading.Lock()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise CheckpointError(f"{folder / TOKENIZER_FILE}: the vocabulary is empty")
        self.vocabulary_size: int = max(vocabulary.values()) + 1
        added = tokenizer.get_added_tokens_decoder()
        self.added_tokens = {token.content: number for number, token in added.items()}
        self.special_token_ids = frozenset(number for number, token in added.items() if token.special)
        self.special_tokens = read_special_tokens(settings)
        _set_bos_and_eos(tokenizer, settings, self.special_tokens, vocabulary)
        generation = read_optional_json_object(folder / "generation_config.json")
        model = read_optional_json_object(folder / "config.json")
        self.eos_token_ids = self._ids(folder, "eos_token_id", generation, model) or _token_ids(
            vocabulary, self.special_tokens.get("eos_token")
        )
        bos = _token_ids(vocabulary, self.special_tokens.get("bos_token"))
        bos = bos or self._ids(folder, "bos_token_id", generation, model)
        self.bos_token_id: int | None = bos[0] if bos else None
        self.adds_bos = self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of a model folder.

        Raises:
            CheckpointError: A file is missing or damaged, or the tokenizer is of a kind that is not supported.
        """
        folder = Path(folder)
        path = folder / TOKENIZER_FILE
        settings = read_optional_json_object(folder / "tokenizer_config.json")
        if not path.exists() and (folder / MODEL_FILE).exists():
            path = folder / MODEL_FILE
            tokenizer, settings = build_sentencepiece(folder, settings)
        else:
            tokenizer = _read(path)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # The library's own serialization of one part: parsing the whole file here would take its size many times over.
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else None
        rule = read_text_rule(decoder, path)
        return cls(folder, tokenizer, rule, settings)

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` into a folder.

        Raises:
            CheckpointError: The disk refuses it.
        """
        path = folder / TOKENIZER_FILE
        try:
            path.write_text(self._tokenizer.to_str(), "utf-8")
            write_json(folder / "tokenizer_config.json", self._settings)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: Any text.
            add_special_tokens: Add what the model puts around a text, such as its beginning-of-sequence token.
            parse_special: Read special tokens that are spelled out in the text as such; otherwise they are text.

        Raises:
            InvalidArgumentError: The text holds half a surrogate pair, which no UTF-8 has.
        """
        tokenizer = self._tokenizer if parse_special else self._without_special()
        # The calls for one text hold the interpreter's lock to their end, those for a batch do not.
        encode_batch = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
        try:
            ids: list[int] = encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidArgumentError(f"the text cannot be encoded: {error}", field="text") from None
        return ids

    def encode_chat(self, rendered: str) -> list[int]:
        """Return the token ids of a rendered chat.

        Templates write the tokens around a text themselves, except that some leave out the beginning-of-sequence
        token of a model that needs it (MiniCPM4's does): it is then put first, and never twice.

        Raises:
            InvalidArgumentError: As :meth:`encode`.
        """
        ids = self.encode(rendered, add_special_tokens=False)
        if self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids without a token (rows that pad the embedding) add nothing.

        Raises:
            InvalidArgumentError: An id is negative or does not fit 32 bits.
        """
        try:
            text: str = self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]
        except OverflowError:
            raise InvalidArgumentError(
                "token ids must be between 0 and 2^32 - 1", field="token_ids"
            ) from None
        return text

    def token_text(self, token_id: int) -> str | bytes:
        """Return what a token adds to a text: text, or bytes where these may be a part of a character.

        An id without a token adds nothing.
        """
        token = self.id_to_token(token_id)
        return "" if token is None else self._rule.token_text(token)

    def id_to_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text."""
        text = self.token_text(token_id)
        return text if isinstance(text, bytes) else text.encode()

    @property
    def strips_leading_space(self) -> bool:
        """Whether one space at the beginning of a text is dropped."""
        return self._rule.strips_leading_space

    @property
    def has_byte_fallback(self) -> bool:
        """Whether bytes are the fallback of text tokens, and not what every token is."""
        return not self._rule.byte_level

    def id_to_token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it (not its text), or None where the id has none."""
        if not 0 <= token_id < self.vocabulary_size:
            return None
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, or None."""
        number: int | None = self._tokenizer.token_to_id(token)
        return number

    def check_embedding(self, rows: int) -> None:
        """Hold the vocabulary against the number of rows of the model's embedding.

        Raises:
            CheckpointError: Some token has no row, or so many rows have no token that the files do not belong
                together.
        """
        if self.vocabulary_size > rows:
            raise CheckpointError(
                f"{self.folder / TOKENIZER_FILE}: has {self.vocabulary_size} tokens, but the model's embedding has "
                f"{rows} rows; the tokenizer belongs to another model"
            )
        if rows - self.vocabulary_size > max(_MAX_PADDING_ROWS, rows // _MAX_PADDING_SHARE):
            raise CheckpointError(
                f"{self.folder / TOKENIZER_FILE}: has {self.vocabulary_size} tokens for the {rows} rows of the "
                f"model's embedding; the tokenizer belongs to another model"
            )

    def _without_special(self) -> tokenizers.Tokenizer:
        with self._plain_lock:
            if self._plain is None:
                # A second instance: switching the property of the first would switch it for other threads too.
                self._plain = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
                self._plain.encode_special_tokens = True
            return self._plain

    def _ids(self, folder: Path, key: str, *configs: dict[str, Any]) -> tuple[int, ...]:
        found: list[int] = []
        for config in configs:
            value = config.get(key)
            for number in value if isinstance(value, list) else [value]:
                if number is None:
                    continue
                if type(number) is not int or not 0 <= number < self.vocabulary_size:
                    raise CheckpointError(
                        f"{folder}: {key} is {str(value)[:100]}, but the tokenizer has {self.vocabulary_size} tokens"
                    )
                found.append(number)
        return tuple(dict.fromkeys(found))


def _read(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointError(f"{path}: this file is missing from the model folder")
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise CheckpointError(f"{path}: larger than {_MAX_FILE_BYTES >> 20} MiB")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:  # the library's Rust panics are no Exceptions
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise CheckpointError(f"{path}: cannot be loaded: {error}") from None


def read_special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return the named special tokens (``bos_token`` ...) of ``tokenizer_config.json`` as text."""
    tokens = {}
    for key in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = settings.get(key)
        if isinstance(value, dict):  # a serialized AddedToken
            value = value.get("content")
        if isinstance(value, str):
            tokens[key] = value
    return tokens


def _token_ids(vocabulary: dict[str, int], token: str | None) -> tuple[int, ...]:
    return (vocabulary[token],) if token in vocabulary else ()


def _set_bos_and_eos(
    tokenizer: tokenizers.Tokenizer,
    settings: dict[str, Any],
    special: dict[str, str],
    vocabulary: dict[str, int],
) -> None:
    """Let ``add_bos_token`` and ``add_eos_token``, where they are given, decide over the post-processor's template."""
    if settings.get("add_bos_token") is None and settings.get("add_eos_token") is None:
        return
    pieces, used = ["$A:0"], []
    bos, eos = special.get("bos_token"), special.get("eos_token")
    if settings.get("add_bos_token") and bos in vocabulary:
        pieces.insert(0, f"{bos}:0")
        used.append((bos, vocabulary[bos]))
    if settings.get("add_eos_token") and eos in vocabulary:
        pieces.append(f"{eos}:0")
        used.append((eos, vocabulary[eos]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=pieces, special_tokens=list(dict(used).items())
    )
