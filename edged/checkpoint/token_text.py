"""The text of tokens: what each token adds to the bytes of a text, and how those bytes become text piece by piece.

A decoder in ``tokenizer.json`` is read as a rule for one token at a time, so that a text can be streamed: every token
adds some bytes, and the bytes are decoded as UTF-8 as far as they are complete. No character is ever cut, nothing is
decoded twice, and the pieces together are the text of all the tokens. Two kinds of decoder cover the families that
edged serves:

* byte-level BPE (``ByteLevel``): a token's letters stand for bytes;
* SentencePiece (``Replace``, ``ByteFallback``, ``Fuse``, ``Strip``; or ``Metaspace``): a token is text with ``▁`` for a
  space, or one byte written ``<0xE4>``.

Bytes that are no UTF-8 become U+FFFD: for byte-level BPE one for each maximal part, for SentencePiece one for each
byte, both as the ``tokenizers`` library does. In one case the library does otherwise: in a run of byte tokens that
holds valid characters *and* invalid bytes it also drops the valid ones. That cannot be streamed (a character that was
sent would have to be taken back), and SentencePiece itself keeps them; so does this module.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EACH_BYTE = "edged.each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


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
    """How a tokenizer's tokens become text.

    Attributes:
        byte_level: Letters stand for bytes; the attributes below are then unused.
        replacements: Replaced in every token, in order.
        byte_fallback: ``<0xE4>`` is a byte.
        strip_spaces: How many spaces at the beginning of a text are dropped at most.
        bare_first_token: ``replacements`` have no replacement in a text's first token: they are dropped there.
    """

    byte_level: bool
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_spaces: int = 0
    bare_first_token: bool = False

    @property
    def errors(self) -> str:
        """How bytes that are no UTF-8 are replaced, for :func:`codecs.decode`."""
        return "replace" if self.byte_level else _EACH_BYTE

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes that a token adds to a text."""
        if self.byte_level:
            try:
                return bytes([BYTE_ALPHABET[letter] for letter in token])
            except KeyError:  # an added token, which is written as it is
                return token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return bytes([int(match[1], 16)]) if match else token.encode()

    def first_token_bytes(self, token: str) -> bytes:
        """Return the bytes that a token adds where it is the first of a text."""
        if self.bare_first_token:
            for old, _ in self.replacements:
                token = token.replace(old, "")
        return self.token_bytes(token)


def read_text_rule(decoder: object, path: Path) -> TextRule:
    """Read the ``decoder`` of a ``tokenizer.json``.

    Raises:
        CheckpointError: There is none, or one whose text cannot be streamed; it is named.
    """
    steps = _flatten(decoder)
    names = [str(step.get("type")) for step in steps]
    if names == ["ByteLevel"]:
        return TextRule(byte_level=True)
    if names == ["Metaspace"]:
        mark = str(steps[0].get("replacement", "\u2581"))
        scheme = steps[0].get(
            "prepend_scheme", "always" if steps[0].get("add_prefix_space", True) else "never"
        )
        return TextRule(byte_level=False, replacements=((mark, " "),), bare_first_token=scheme != "never")
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
    strip = steps[-1] if rest[-1:] == ["Strip"] else None
    known = (["Fuse"], ["ByteFallback", "Fuse"], ["Fuse", "Strip"], ["ByteFallback", "Fuse", "Strip"])
    if rest not in known or (
        strip is not None and (strip.get("content") != " " or strip.get("stop", 0) != 0)
    ):
        raise CheckpointError(
            f"{path}: the decoder {' + '.join(names) or 'null'} is not supported; supported are ByteLevel, Metaspace "
            f"and SentencePiece's Replace + ByteFallback + Fuse + Strip"
        )
    return TextRule(
        byte_level=False,
        replacements=tuple(replacements),
        byte_fallback="ByteFallback" in rest,
        strip_spaces=int(strip["start"]) if strip is not None else 0,
    )


def _flatten(decoder: object) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for item in decoder.get("decoders", []) for step in _flatten(item)]


class IncrementalDecoder:
    """Decodes the tokens of one text as they come.

    The pieces that :meth:`feed` returns and the last one from :meth:`flush` are together the text of all tokens, and
    none of them ends inside a character.

    Args:
        rule: Of the tokenizer.
        token: Returns the token of an id as it is in the vocabulary, or None where there is none.
        skipped: Ids that add nothing.
    """

    __slots__ = ("_decoder", "_first", "_rule", "_skipped", "_spaces", "_token")

    def __init__(
        self,
        rule: TextRule,
        token: Callable[[int], str | None],
        skipped: frozenset[int] = frozenset(),
    ) -> None:
        self._rule = rule
        self._token = token
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(rule.errors)
        self._spaces = rule.strip_spaces
        self._first = True

    def feed(self, token_id: int) -> str:
        """Take the next token; return the text that became complete with it, which may be none."""
        token = None if token_id in self._skipped else self._token(token_id)
        if token is None:
            return ""
        data = self._rule.first_token_bytes(token) if self._first else self._rule.token_bytes(token)
        self._first = False
        return self._strip(self._decoder.decode(data))

    def flush(self) -> str:
        """End the text; return what is left of it: U+FFFD where it ended inside a character."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._spaces and text:
            if text[0] != " ":
                self._spaces = 0
                break
            text = text[1:]
            self._spaces -= 1
        return text
