"""The tokens that a model's text is mostly made of, for drafts that look at no others (FR-Spec, arXiv 2502.14856)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edged.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from edged.checkpoint.tokenizer import Tokenizer

_PIECE = 1 << 20  # characters that are tokenized together


def rank_tokens(
    documents: Iterable[str], tokenizer: Tokenizer, *, vocabulary: int, size: int
) -> tuple[list[int], float]:
    """The most frequent tokens of some text, those that end an answer among them, in rising order.

    Args:
        documents: The text.
        tokenizer: The model's.
        vocabulary: Token ids of the model.
        size: How many; of tokens that are as frequent the smaller ids.

    Returns:
        The ids, and the part of the text's tokens that they are.

    Raises:
        InvalidArgumentError: ``size`` is not between 1 and the vocabulary, or the text has no tokens.
    """
    if not 1 <= size <= vocabulary:
        raise InvalidArgumentError(
            f"size is {size}: from 1 to {vocabulary}, the size of the vocabulary", field="size"
        )
    counts = np.zeros(vocabulary, np.int64)
    for document in documents:
        for start in range(0, len(document), _PIECE):
            piece = document[start : start + _PIECE]
            ids = tokenizer.encode(piece, add_special_tokens=False, parse_special=False)
            counts += np.bincount(np.array(ids, np.int64), minlength=vocabulary)
    total = int(counts.sum())
    if not total:
        raise InvalidArgumentError(
            "the text has no tokens; give text like what the model writes", field="text"
        )
    chosen = np.array(most_frequent(counts, size, tokenizer.eos_token_ids))
    return chosen.tolist(), float(counts[chosen].sum()) / total


def most_frequent(counts: npt.NDArray[np.int64], size: int, endings: Iterable[int]) -> list[int]:
    """Token ids of the largest counts, in rising order; ``endings`` are always among them, since every answer ends once."""
    ranked = counts.copy()
    ranked[list(endings)] = int(counts.sum()) + 1
    chosen: list[int] = np.sort(np.argsort(-ranked, kind="stable")[:size]).tolist()
    return chosen
