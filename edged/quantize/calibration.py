"""Calibration text as token sequences of one length."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edged.errors import InvalidArgumentError
from edged.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from edged.checkpoint.tokenizer import Tokenizer

Tokens = npt.NDArray[np.int64]

MOST_BYTES = 256 << 20
_PIECE = 1 << 20  # characters that are tokenized together
FIELD = "calibration"


@dataclass(frozen=True)
class Calibration:
    """Sequences that a model is run on; ``trial`` says that they are the built-in text."""

    sequences: Tokens  # [S, L]
    trial: bool = False

    @property
    def digest(self) -> str:
        """Of the tokens."""
        shape = json.dumps(self.sequences.shape).encode()
        return hashlib.sha256(shape + self.sequences.tobytes()).hexdigest()


def read_documents(path: Path, *, lines: bool = False) -> list[str]:
    """The documents of a file of text.

    Args:
        path: UTF-8. ``.jsonl``: an object with ``text`` a line.
        lines: Each line is a document; otherwise the file is one.

    Raises:
        InvalidArgumentError: It cannot be read, is no UTF-8, or holds nothing; says where.
    """
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise InvalidArgumentError(
                f"{path}: {format_size(size)} of calibration text; at most {format_size(MOST_BYTES)} are read",
                field=FIELD,
            )
        content = path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"{path}: cannot be read: {error.strerror}", field=FIELD) from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{path}: is not UTF-8 at byte {error.start}; convert it (iconv -t UTF-8) or give another file",
            field=FIELD,
        ) from None
    whole = _lines(text) if lines else [text]
    found = list(_json_lines(path, text)) if path.suffix == ".jsonl" else whole
    documents = [each for each in found if each.strip()]
    if not documents:
        raise InvalidArgumentError(
            f"{path}: holds no text; give a file of text like what the model will read", field=FIELD
        )
    return documents


def trial_documents() -> list[str]:
    """The built-in text: a few pages of English, Chinese and code, for trying a quantizer and no more."""
    return [(files("edged.quantize") / "trial_text.txt").read_text("utf-8")]


def cut_sequences(
    documents: list[str], tokenizer: Tokenizer, *, count: int, length: int, least: int, trial: bool = False
) -> Calibration:
    """Cut documents into sequences, each with what the model expects at the beginning of a text.

    Documents follow each other, with an end-of-sequence token between them. Of more sequences than are wanted, those at
    even distances are taken.

    Args:
        documents: Texts.
        tokenizer: The model's.
        count: Most sequences.
        length: Tokens of each.
        least: Tokens that are needed.
        trial: The documents are the built-in ones, which may be fewer.

    Raises:
        InvalidArgumentError: There are too few tokens; with both numbers.
    """
    first = tokenizer.encode("")  # what the tokenizer puts before any text
    if length <= len(first) + 1:
        raise InvalidArgumentError(
            f"sequences of {length} tokens are too short; 512 is usual", field="sequence_length"
        )
    between = list(tokenizer.eos_token_ids[:1])
    stream: list[int] = []
    for document in documents:
        if stream:
            stream += between
        for start in range(0, len(document), _PIECE):
            piece = document[start : start + _PIECE]
            stream += tokenizer.encode(piece, add_special_tokens=False, parse_special=False)
    body = length - len(first)
    whole = len(stream) // body
    used = min(whole, count)
    if not trial and used * length < least:
        missing = f"the text has {len(stream)} tokens"
        if whole > used:
            missing = f"{count} sequences of {length} are {count * length} tokens"
        raise InvalidArgumentError(
            f"{missing}: calibration needs at least {least} in sequences of {length}, as many as the model's widest linear "
            "has inputs; give more text or more sequences",
            field=FIELD,
        )
    if not used:
        raise InvalidArgumentError(
            f"the text has {len(stream)} tokens, less than one sequence of {length}; give more text or shorter sequences",
            field=FIELD,
        )
    chosen = [index * whole // used for index in range(used)]
    rows = [first + stream[index * body : (index + 1) * body] for index in chosen]
    return Calibration(np.array(rows, np.int64), trial)


def _json_lines(path: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(_lines(text), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            document = None
        if not isinstance(document, str):
            raise InvalidArgumentError(f'{path}: line {number} is no JSON object with a "text"', field=FIELD)
        try:
            document.encode("utf-8")
        except UnicodeEncodeError as error:
            half = ord(document[error.start])
            raise InvalidArgumentError(
                f"{path}: line {number} holds \\u{half:04x}, half of a surrogate pair, which is no character; write both halves "
                "or leave it out",
                field=FIELD,
            ) from None
        yield document


def _lines(text: str) -> list[str]:
    """Lines as files and JSON Lines have them: splitlines() would cut at characters that JSON holds as they are, too."""
    return [line.removesuffix("\r") for line in text.split("\n")]
