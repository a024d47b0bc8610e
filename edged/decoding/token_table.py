"""The texts of a whole vocabulary, taken from a tokenizer once.

The engine needs of a tokenizer only what each token stands for. A table of that is a tenth of a loaded tokenizer's
memory, and a look-up in it costs a list index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edged.decoding.detokenizer import TokenTexts


class TokenTable:
    """What the tokens of a model stand for, see :class:`~edged.decoding.detokenizer.TokenTexts`.

    Args:
        texts: The tokenizer; it is not kept.
        size: Token ids of the model; an id that the tokenizer does not know adds nothing to a text.
    """

    def __init__(self, texts: TokenTexts, size: int) -> None:
        self.eos_token_ids = tuple(texts.eos_token_ids)
        self.special_token_ids = frozenset(texts.special_token_ids)
        self.has_byte_fallback = texts.has_byte_fallback
        self.strips_leading_space = texts.strips_leading_space
        self._texts = [texts.token_text(token_id) for token_id in range(size)]

    def __len__(self) -> int:
        return len(self._texts)

    def token_text(self, token_id: int) -> str | bytes:
        """Text of one token, or its bytes where it may be a part of a character."""
        return self._texts[token_id]
