"""Reads a SentencePiece ``tokenizer.model``: the few fields of its protobuf message that say how text is cut.

The message is described here field by field, with the numbers of the published ``sentencepiece_model.proto``; what is
not described is skipped. The ``sentencepiece`` package is not needed.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from edged.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

MODEL_FILE = "tokenizer.model"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of pieces."""
UNIGRAM, BPE = 1, 2
"""Types of models; the others (3: words, 4: characters) are in no language model."""

_MAX_BYTES = 64 << 20
_MAX_PIECES = 1 << 20
_PACKAGE = "edged.sentencepiece"
_FIELD = descriptor_pb2.FieldDescriptorProto
# Name, number, type, default; a type in quotes is a message, and a plural of them is repeated.
_MESSAGES: dict[str, list[tuple[str, int, int | str, str]]] = {
    "Piece": [
        ("piece", 1, _FIELD.TYPE_BYTES, ""),
        ("score", 2, _FIELD.TYPE_FLOAT, "0"),
        ("type", 3, _FIELD.TYPE_INT32, "1"),
    ],
    "Trainer": [
        ("model_type", 3, _FIELD.TYPE_INT32, "1"),
        ("treat_whitespace_as_suffix", 24, _FIELD.TYPE_BOOL, "false"),
        ("byte_fallback", 35, _FIELD.TYPE_BOOL, "false"),
        ("unk_id", 40, _FIELD.TYPE_INT32, "0"),
        ("bos_id", 41, _FIELD.TYPE_INT32, "1"),
        ("eos_id", 42, _FIELD.TYPE_INT32, "2"),
        ("pad_id", 43, _FIELD.TYPE_INT32, "-1"),
    ],
    "Normalizer": [
        ("precompiled_charsmap", 2, _FIELD.TYPE_BYTES, ""),
        ("add_dummy_prefix", 3, _FIELD.TYPE_BOOL, "true"),
        ("remove_extra_whitespaces", 4, _FIELD.TYPE_BOOL, "true"),
        ("escape_whitespaces", 5, _FIELD.TYPE_BOOL, "true"),
    ],
    "Model": [
        ("pieces", 1, "Piece", ""),
        ("trainer", 2, "Trainer", ""),
        ("normalizer", 3, "Normalizer", ""),
    ],
}


@dataclass(frozen=True)
class SentencePieceModel:
    """A SentencePiece model; the id of a piece is its place.

    Attributes:
        kind: :data:`UNIGRAM` or :data:`BPE`.
        pieces: Text of each piece, ``▁`` for a space.
        scores: Logarithm of its probability (unigram), or minus the rank of its merge (BPE).
        types: One of :data:`NORMAL` and the others.
        byte_fallback: Characters without a piece become the pieces of their bytes.
        charsmap: How characters are replaced before the text is cut; empty: not at all.
        dummy_prefix: A space is put before a text.
        collapses_spaces: Runs of spaces become one, and none stays at either end.
        escapes_spaces: Spaces are written ``▁``.
        special: Ids of ``bos``, ``eos``, ``unk`` and ``pad``, where there are such.
    """

    kind: int
    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    types: tuple[int, ...]
    byte_fallback: bool
    charsmap: bytes
    dummy_prefix: bool
    collapses_spaces: bool
    escapes_spaces: bool
    special: dict[str, int]

    @classmethod
    def read(cls, path: Path) -> SentencePieceModel:
        """Read a file.

        Raises:
            CheckpointError: It is no SentencePiece model, damaged, or of a kind that language models do not have.
        """
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise CheckpointError(f"{path}: larger than {_MAX_BYTES >> 20} MiB")
            message = _message_class().FromString(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        except DecodeError:
            raise CheckpointError(
                f"{path}: is no SentencePiece model (a tiktoken file of the same name is not read); put the model's "
                "tokenizer.json beside it"
            ) from None
        trainer, normalizer = message.trainer, message.normalizer
        if trainer.model_type not in (UNIGRAM, BPE) or trainer.treat_whitespace_as_suffix:
            what = (
                "with spaces as suffixes"
                if trainer.treat_whitespace_as_suffix
                else f"of type {trainer.model_type}"
            )
            raise CheckpointError(f"{path}: is a model {what}; supported are unigram (1) and BPE (2)")
        model = cls(
            kind=trainer.model_type,
            pieces=_texts(message.pieces, path),
            scores=tuple(piece.score for piece in message.pieces),
            types=tuple(piece.type for piece in message.pieces),
            byte_fallback=trainer.byte_fallback,
            charsmap=normalizer.precompiled_charsmap,
            dummy_prefix=normalizer.add_dummy_prefix,
            collapses_spaces=normalizer.remove_extra_whitespaces,
            escapes_spaces=normalizer.escape_whitespaces,
            special={
                name: getattr(trainer, f"{name}_id")
                for name in ("bos", "eos", "unk", "pad")
                if getattr(trainer, f"{name}_id") >= 0
            },
        )
        _check(model, path)
        return model


def _texts(pieces: Any, path: Path) -> tuple[str, ...]:  # noqa: ANN401 - protobuf's container
    if not 1 <= len(pieces) <= _MAX_PIECES:
        raise CheckpointError(f"{path}: has {len(pieces)} pieces; it is damaged or no SentencePiece model")
    texts = []
    for number, piece in enumerate(pieces):
        try:
            texts.append(piece.piece.decode("utf-8"))
        except UnicodeDecodeError:
            raise CheckpointError(f"{path}: piece {number} is not UTF-8; the file is damaged") from None
    return tuple(texts)


def _check(model: SentencePieceModel, path: Path) -> None:
    first: dict[str, int] = {}
    for number, piece in enumerate(model.pieces):
        if not piece:
            raise CheckpointError(f"{path}: piece {number} is empty; the file is damaged")
        if first.setdefault(piece, number) != number:
            raise CheckpointError(f"{path}: pieces {first[piece]} and {number} are both {piece!r}")
        if not math.isfinite(model.scores[number]) or not NORMAL <= model.types[number] <= BYTE:
            raise CheckpointError(
                f"{path}: piece {number} has the score {model.scores[number]} and the type {model.types[number]}; "
                "the file is damaged"
            )
    unknown = [number for number, kind in enumerate(model.types) if kind == UNKNOWN]
    if unknown != [model.special.get("unk")]:
        raise CheckpointError(
            f"{path}: has {len(unknown)} unknown pieces, or unk_id names another; the file is damaged"
        )
    for name, number in model.special.items():
        if number >= len(model.pieces):
            raise CheckpointError(f"{path}: {name}_id is {number}, but there are {len(model.pieces)} pieces")
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in first]
    if model.byte_fallback and missing:
        raise CheckpointError(
            f"{path}: has byte fallback but no piece <0x{missing[0]:02X}>; the file is damaged"
        )


@functools.cache
def _message_class() -> Any:  # noqa: ANN401 - made here
    file = descriptor_pb2.FileDescriptorProto(
        name="edged/sentencepiece.proto", package=_PACKAGE, syntax="proto2"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, default in fields:
            entry = message.field.add(name=field, number=number)
            entry.label = _FIELD.LABEL_REPEATED if field == "pieces" else _FIELD.LABEL_OPTIONAL
            if isinstance(kind, str):
                entry.type, entry.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                entry.type = kind  # type: ignore[assignment]
                if default:
                    entry.default_value = default
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Model"))
