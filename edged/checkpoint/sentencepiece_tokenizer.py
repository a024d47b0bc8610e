"""Builds a tokenizer of the ``tokenizers`` library from a SentencePiece ``tokenizer.model`` and what lies beside it.

A model's folder may add tokens behind the pieces (``added_tokens.json``, ``added_tokens_decoder`` of
``tokenizer_config.json``): MiniCPM4's ``<|im_end|>`` is one. As in transformers' Llama tokenizer, a text begins with the
beginning-of-sequence token unless ``add_bos_token`` says otherwise, and the space before a text is put again behind each
special token unless ``legacy`` is false.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from edged.checkpoint.json_file import read_optional_json_object
from edged.checkpoint.sentencepiece_model import (
    BPE,
    CONTROL,
    MODEL_FILE,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceModel,
)
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_SPACE = "\u2581"
# Below what any cut of a text can have: such pieces are found as special tokens, never inside a text.
_NEVER = -1e6


class BuiltTokenizer(NamedTuple):
    """A tokenizer and the settings that go with it (``tokenizer_config.json``, with what it leaves to the model)."""

    tokenizer: Tokenizer
    settings: dict[str, Any]


def build_sentencepiece(folder: Path, settings: Mapping[str, Any]) -> BuiltTokenizer:
    """Build the tokenizer of a folder that holds ``tokenizer.model``.

    Args:
        folder: The model folder.
        settings: Its ``tokenizer_config.json``.

    Raises:
        CheckpointError: The model or a file beside it is damaged, or of a kind that is not supported.
    """
    path = folder / MODEL_FILE
    model = SentencePieceModel.read(path)
    # Users' own pieces are found in the text before spaces are escaped.
    pieces = [
        piece.replace(_SPACE, " ") if kind == USER_DEFINED else piece
        for piece, kind in zip(model.pieces, model.types, strict=True)
    ]
    if len(set(pieces)) != len(pieces):
        raise CheckpointError(f"{path}: two pieces differ only in how a space is written")
    tokenizer = Tokenizer(_model(model, pieces, path))
    legacy = settings.get("legacy") is not False
    _set_normalizer(tokenizer, model, legacy=legacy)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            *([decoders.ByteFallback()] if model.byte_fallback else []),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if model.dummy_prefix else []),
        ]
    )
    _add_tokens(tokenizer, model, pieces, folder, settings)
    return BuiltTokenizer(tokenizer, _complete(settings, model, folder))


def merges_from_scores(tokens: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Write SentencePiece's rule, join the two neighbours whose union scores best, as a list of merges.

    Every way to cut a token into two others is a merge; those of better tokens come first.

    Args:
        tokens: The id of each token that may be made or joined.
        scores: The score of each id.
    """
    merges: list[tuple[float, int, int, str, str]] = []
    for token, number in tokens.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in tokens and right in tokens:
                merges.append((-scores[number], tokens[left], tokens[right], left, right))
    merges.sort()
    return [(left, right) for _, _, _, left, right in merges]


def _model(model: SentencePieceModel, pieces: list[str], path: Path) -> models.Model:
    try:
        if model.kind == BPE:
            usable = {piece: number for number, piece in enumerate(pieces) if model.types[number] == NORMAL}
            return models.BPE(
                vocab={piece: number for number, piece in enumerate(pieces)},
                merges=merges_from_scores(usable, model.scores),
                unk_token=pieces[model.special["unk"]],
                fuse_unk=True,
                byte_fallback=model.byte_fallback,
            )
        scores = [
            score if kind == NORMAL else _NEVER for score, kind in zip(model.scores, model.types, strict=True)
        ]
        return models.Unigram(
            list(zip(pieces, scores, strict=True)), model.special["unk"], byte_fallback=model.byte_fallback
        )
    except Exception as error:  # noqa: BLE001 - the library raises plain Exceptions
        raise CheckpointError(f"{path}: cannot be used: {error}") from None


def _set_normalizer(tokenizer: Tokenizer, model: SentencePieceModel, *, legacy: bool) -> None:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.collapses_spaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.dummy_prefix and legacy:
        steps.append(normalizers.Prepend(_SPACE))
    if model.escapes_spaces:
        steps.append(normalizers.Replace(" ", _SPACE))
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    if model.dummy_prefix and not legacy:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)


def _add_tokens(
    tokenizer: Tokenizer,
    model: SentencePieceModel,
    pieces: list[str],
    folder: Path,
    settings: Mapping[str, Any],
) -> None:
    """Make tokens of the model's own and of the files beside it such, and hold them to their ids."""
    wanted: dict[int, AddedToken] = {}
    for number, piece in enumerate(pieces):
        if model.types[number] in (CONTROL, UNKNOWN):
            wanted[number] = AddedToken(piece, normalized=False, special=True)
        elif model.types[number] == USER_DEFINED:
            wanted[number] = AddedToken(piece, normalized=False, special=False)
    for content, number in read_optional_json_object(folder / "added_tokens.json").items():
        if isinstance(number, int):
            wanted[number] = AddedToken(content, normalized=False, special=True)
    declared = settings.get("added_tokens_decoder")
    for key, entry in declared.items() if isinstance(declared, dict) else ():
        number = int(key) if str(key).isdecimal() else -1
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str) or number < 0:
            raise CheckpointError(
                f"{folder}/tokenizer_config.json: added_tokens_decoder[{str(key)[:40]!r}] is no token"
            )
        flags = {
            flag: bool(entry.get(flag, False))
            for flag in ("lstrip", "rstrip", "single_word", "normalized", "special")
        }
        wanted[number] = AddedToken(entry["content"], **flags)
    for number in sorted(wanted):
        token = wanted[number]
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(token.content) != number:
            raise CheckpointError(
                f"{folder}: the added token {token.content!r} has the id {number}, but {MODEL_FILE} has {len(pieces)} "
                f"pieces, so it would get {tokenizer.token_to_id(token.content)}"
            )


def _complete(settings: Mapping[str, Any], model: SentencePieceModel, folder: Path) -> dict[str, Any]:
    named = read_optional_json_object(folder / "special_tokens_map.json")
    own = {f"{name}_token": model.pieces[number] for name, number in model.special.items()}
    given = {key: value for key, value in settings.items() if value is not None}
    named = {key: value for key, value in named.items() if value is not None and key in own}
    defaults = {"add_bos_token": "bos" in model.special or "bos_token" in named, "add_eos_token": False}
    return {**defaults, **own, **named, **given}
