"""Token ids to text, one token at a time, exactly.

The texts that :meth:`Detokenizer.feed` and :meth:`Detokenizer.flush` return, joined, equal the text of all ids decoded
at once, and no text ends inside a character. Decoding a growing window again and again, as is common, gives neither:
it costs more with every token that ends inside a character, and it never releases bytes that are no UTF-8.

What a token stands for is known beforehand, so a token costs a look-up and the decoding of its own bytes:

- Where every token is bytes (byte-level BPE), the bytes go through an incremental UTF-8 decoder that holds back at most
  three of them. Bytes that are no UTF-8 become U+FFFD, one for each maximal subpart, as the Unicode standard has it
  (chapter 3.9) and as ``tokenizers`` does it.
- Where tokens are text with single bytes as the fallback (SentencePiece), the bytes between two text tokens are decoded
  together: as UTF-8 if they all are, else each becomes U+FFFD. So they are held back until a text token comes.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_NEW_UTF8_DECODER = codecs.getincrementaldecoder("utf-8")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts(Protocol):
    """What the tokens of a model stand for (:class:`edged.checkpoint.tokenizer.Tokenizer`)."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Ids that end an answer."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that are left out of the text where special tokens are skipped."""

    @property
    def has_byte_fallback(self) -> bool:
        """Whether bytes are the fallback of text tokens, and not what every token is."""

    @property
    def strips_leading_space(self) -> bool:
        """Whether one space at the start of the text is dropped (SentencePiece's dummy prefix)."""

    def token_text(self, token_id: int) -> str | bytes:
        """Text of one token, or its bytes where it may be a part of a character; empty for an id without a token."""


class Detokenizer:
    """The text of one answer.

    Args:
        texts: What the tokens stand for.
        skip_special_tokens: Leave special tokens out.
        keep: Special tokens that stay in the text all the same.
        from_the_start: The text is one of its own, so one space at its start is dropped where the tokenizer adds one.
    """

    __slots__ = ("_bytes", "_decoder", "_skipped", "_strip", "_texts")

    def __init__(
        self,
        texts: TokenTexts,
        *,
        skip_special_tokens: bool = True,
        keep: Collection[int] = (),
        from_the_start: bool = True,
    ) -> None:
        self._texts = texts
        self._skipped = texts.special_token_ids - frozenset(keep) if skip_special_tokens else frozenset[int]()
        self._decoder = None if texts.has_byte_fallback else _NEW_UTF8_DECODER("replace")
        self._bytes = bytearray()  # bytes since the last text token, where bytes are the fallback
        self._strip = texts.strips_leading_space and from_the_start

    def feed(self, token_id: int) -> str:
        """Take the next token; return the text that became final."""
        if token_id in self._skipped:
            return ""
        piece = self._texts.token_text(token_id)
        if not piece:
            return ""  # as if it were not there: it ends no run of bytes
        if self._decoder is not None:
            text = self._decoder.decode(piece) if isinstance(piece, bytes) else self.flush() + piece
        elif isinstance(piece, bytes):
            self._bytes += piece
            return ""
        else:
            text = self._take_bytes() + piece
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        """The answer ended: return the text of the bytes that were held back. More tokens may follow all the same."""
        if self._decoder is not None:
            return self._decoder.decode(b"", final=True)
        text = self._take_bytes()
        return self._stripped(text) if self._strip else text

    def _take_bytes(self) -> str:
        held = self._bytes
        if not held:
            return ""
        try:
            text = held.decode()
        except UnicodeDecodeError:
            text = REPLACEMENT * len(held)
        held.clear()
        return text

    def _stripped(self, text: str) -> str:
        """Drop one space if this is the start of the text."""
        if not text:
            return text
        self._strip = False
        return text[1:] if text[0] == " " else text
