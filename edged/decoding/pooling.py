"""One vector for a whole text, out of the final norm's output at its tokens: of the last one, or their mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from edged.errors import InternalError

if TYPE_CHECKING:
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float32]

LAST, MEAN = "last", "mean"


class Embedding(msgspec.Struct, frozen=True):
    """What a request wants instead of an answer."""

    pooling: str
    """``last`` or ``mean``."""
    normalize: bool = True
    """Whether the vector has the length 1."""


class Pooling:
    """The vector of one text as its tokens come.

    Args:
        embedding: What is wanted.
    """

    def __init__(self, embedding: Embedding) -> None:
        self.embedding = embedding
        self._sum: npt.NDArray[np.float64] | None = None
        self._count = 0

    @property
    def needs_every_token(self) -> bool:
        """Whether the hidden state of every token counts, so that none may be left out because it is cached."""
        return self.embedding.pooling == MEAN

    def add(self, hidden: FloatArray) -> None:
        """Take the next tokens' states, fp32 ``[n, H]``: of all, or of the last one alone."""
        if not len(hidden):
            return
        if not self.needs_every_token:
            self._sum, self._count = hidden[-1].astype(np.float64), 1
            return
        total = hidden.sum(axis=0, dtype=np.float64)
        self._sum = total if self._sum is None else self._sum + total
        self._count += len(hidden)

    def vector(self) -> FloatArray:
        """The vector, fp32 ``[H]``.

        Raises:
            InternalError: No state was seen, or the model's numbers are not finite.
        """
        if self._sum is None:
            raise InternalError("a text was pooled of which no token was seen; please report it")
        pooled = self._sum / self._count
        if not np.isfinite(pooled).all():
            raise InternalError(
                "the embedding is not finite: the model's weights are damaged, or its dtype is too narrow"
            )
        if self.embedding.normalize:
            pooled /= max(float(np.linalg.norm(pooled)), 1e-12)
        vector: FloatArray = pooled.astype(np.float32)
        return vector
