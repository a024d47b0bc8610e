"""What a request says about a row beyond temperature, top_k and top_p, as the kernel reads it (`space.cuh`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ids = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float32]

MOST_LOGPROBS = 64
"""Likeliest tokens that can be recorded."""
UNIT = 2.0**36
"""Weights are whole multiples of one over it."""

ROW = np.dtype(
    [
        ("draws", np.int32),
        ("logprobs", np.int32),
        ("min_p", np.float64),
        ("typical_p", np.float64),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("biases", np.int32),
        ("seen", np.int32),
        ("answered", np.int32),
        ("forbidden", np.int32),
        ("last", np.int32),
        ("mask", np.int32),
        ("unused", np.int32),
    ]
)
ENTRY = np.dtype([("id", np.int32), ("value", np.int32)])
LOGPROBS = np.dtype(
    [
        ("chosen", np.float32),
        ("largest", np.float32),
        ("total", np.uint64),
        ("ids", np.int32, MOST_LOGPROBS),
        ("values", np.float32, MOST_LOGPROBS),
    ]
)
ROW_WORDS, LOGPROB_WORDS = ROW.itemsize // 4, LOGPROBS.itemsize // 4


def mask_words(vocabulary: int) -> int:
    """Words of a mask with a bit a token."""
    return -(-vocabulary // 32)


def _no_ids() -> Ids:
    return np.empty(0, np.int64)


def _no_values() -> Floats:
    return np.empty(0, np.float32)


@dataclass(frozen=True)
class Terms:
    """What a request says about one row. A token is at most once among the biases, the seen and the answered ones."""

    min_p: float = 0.0
    typical_p: float = 1.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias_ids: Ids = field(default_factory=_no_ids)
    biases: Floats = field(default_factory=_no_values)
    """One a bias id, fp32."""
    seen: Ids = field(default_factory=_no_ids)
    """Tokens that `repetition` looks at."""
    answered: Ids = field(default_factory=_no_ids)
    """Tokens that `presence` and `frequency` look at."""
    counts: Ids = field(default_factory=_no_ids)
    """How often, one an answered token."""
    forbidden: Ids = field(default_factory=_no_ids)
    mask: bytes | None = None
    """A bit a token, the lowest of a byte first; cleared ones are forbidden. None: none is."""
    logprobs: int = -1
    """Likeliest tokens to record beside the chosen one; -1 records nothing."""

    @property
    def entries(self) -> int:
        """Entries of all lists."""
        return len(self.bias_ids) + len(self.seen) + len(self.answered) + len(self.forbidden)


class RowWriter:
    """Writes the terms of a step's rows into host memory of the kernel's layout.

    Args:
        rows: int32 ``[R, ROW_WORDS]``.
        entries: int32 ``[E, 2]``.
        masks: int32 ``[M, mask_words(V)]``.
    """

    def __init__(self, rows: Any, entries: Any, masks: Any) -> None:  # noqa: ANN401 - arrays of words
        self._rows = rows.view(ROW)[:, 0]
        self._ids, self._values = entries[:, 0], entries[:, 1]
        self._masks = masks.view(np.uint8)
        self._used = self._used_masks = 0

    @property
    def entries(self) -> int:
        """Entries that are used."""
        return self._used

    @property
    def masks(self) -> int:
        """Masks that are used."""
        return self._used_masks

    def clear(self) -> None:
        """Before the rows of each step: none has terms."""
        self._rows["draws"] = 0
        self._used = self._used_masks = 0

    def room(self, terms: Terms) -> bool:
        """Whether one more row with these terms can be written."""
        return self._used + terms.entries <= len(self._ids) and (
            terms.mask is None or self._used_masks < len(self._masks)
        )

    def write(self, place: int, terms: Terms) -> None:
        """Write the terms of one row, for which there is :meth:`room`."""
        biases = self._used
        self._append(terms.bias_ids, terms.biases.view(np.int32))
        seen = self._used
        self._append(terms.seen)
        answered = self._used
        self._append(terms.answered, terms.counts)
        forbidden = self._used
        self._append(terms.forbidden)
        mask = -1
        if terms.mask is not None:
            mask = self._used_masks
            data = np.frombuffer(terms.mask, np.uint8)
            row = self._masks[mask]
            row[: len(data)] = data[: len(row)]
            row[len(data) :] = 0
            self._used_masks += 1
        self._rows[place] = (
            1, terms.logprobs, terms.min_p, terms.typical_p, terms.repetition, terms.presence, terms.frequency,
            biases, seen, answered, forbidden, self._used, mask, 0,
        )  # fmt: skip

    def _append(self, ids: Ids, values: Any = 0) -> None:  # noqa: ANN401 - words, one an id
        end = self._used + len(ids)
        self._ids[self._used : end] = ids
        self._values[self._used : end] = values
        self._used = end
