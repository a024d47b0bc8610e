"""What each token of a vocabulary stands for, read from the ``decoder`` of a ``tokenizer.json``.

A decoder there is written for whole texts. Read as a rule for one token at a time it allows streaming: every token adds
its text or its bytes, whatever comes before and after it. Two kinds of decoder can be read so, and the families that
edged serves have no others:

* byte-level BPE (``ByteLevel``): a token's letters stand for bytes, which may be parts of characters;
* SentencePiece (``Replace``, ``ByteFallback``, ``Fuse``, ``Strip``): a token is text with ``▁`` for a space, or one
  byte written ``<0xE4>``, and the space at the beginning of a text is dropped.

The whole text follows from the pieces: bytes are decoded together as UTF-8. Those that are none become U+FFFD, with
byte-level BPE one for each maximal part, with SentencePiece one for each byte of a run of bytes that is not UTF-8 as a
whole. That is what the ``tokenizers`` library gives, and the tests hold it to that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edged.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's letters for bytes: printable Latin-1 is itself, the rest follows from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return alphabet


BYTE_ALPHABET = _byte_alphabet()
"""The byte that each letter of a byte-level vocabulary stands for."""


@dataclass(frozen=True)
class TextRule:
    """How the tokens of one tokenizer become text.

    Attributes:
        byte_level: Letters stand for bytes; the attributes below are then unused.
        replacements: Replaced in every token, in order.
        byte_fallback: ``<0xE4>`` is a byte.
        strips_leading_space: One space at the beginning of a text is dropped.
    """

    byte_level: bool
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strips_leading_space: bool = False

    def token_text(self, token: str) -> str | bytes:
        """Return what a token adds to a text: text, or bytes where these may be a part of a character."""
        if self.byte_level:
            try:
                return bytes([BYTE_ALPHABET[letter] for letter in token])
            except KeyError:  # an added token, which is written as it is
                return token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return bytes([int(match[1], 16)]) if match else token


def read_text_rule(decoder: object, path: Path) -> TextRule:
    """Read the ``decoder`` of a ``tokenizer.json``.

    Raises:
        CheckpointError: There is none, or one whose text cannot be streamed; it is named.
    """
    steps = _flatten(decoder)
    names = [str(step.get("type")) for step in steps]
    if names == ["ByteLevel"]:
        return TextRule(byte_level=True)
    replacements: list[tuple[str, str]] = []
    while steps and steps[0].get("type") == "Replace":
        step = steps.pop(0)
        pattern = step.get("pattern")
        if not isinstance(pattern, dict) or "String" not in pattern:
            raise CheckpointError(
                f"{path}: decoder Replace with the pattern {str(pattern)[:100]} is not supported"
            )
        replacements.append((str(pattern["String"]), str(step.get("content", ""))))
    rest = [str(step.get("type")) for step in steps]
    strip = steps[-1] if rest[-1:] == ["Strip"] else {}
    known = (["Fuse"], ["ByteFallback", "Fuse"], ["Fuse", "Strip"], ["ByteFallback", "Fuse", "Strip"])
    spaces = strip.get("start", 0)
    if (
        rest not in known
        or strip.get("content", " ") != " "
        or strip.get("stop", 0) != 0
        or spaces not in (0, 1)
    ):
        raise CheckpointError(
            f"{path}: the decoder {' + '.join(names) or 'null'} is not supported; supported are ByteLevel "
            f"and SentencePiece's Replace + ByteFallback + Fuse + Strip (one space at the start)"
        )
    return TextRule(
        byte_level=False,
        replacements=tuple(replacements),
        byte_fallback="ByteFallback" in rest,
        strips_leading_space=spaces == 1,
    )


def _flatten(decoder: object) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for item in decoder.get("decoders", []) for step in _flatten(item)]
