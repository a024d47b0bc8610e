"""The ragged batch of a step, and the check of its values in debug mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from plugins_trt.contract.arrays import DeviceArray, LaunchError, ceil_div, check_array, check_at_least
from plugins_trt.contract.sizes import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Batch:
    """One step's ragged batch, all of it device data except the sizes of its bucket.

    S sequences bring T tokens; sequence s has `lengths[s]` tokens stored before the step and brings those of
    rows `sequence_starts[s] .. sequence_starts[s+1]`; its i-th new token is stored in slot `lengths[s] + i`.
    Rows from `sequence_starts[S]` on are padding. In a chain, `positions[t] = lengths[s] + i`. In a tree
    (`tree_masks` given: bit j of word t says that new token j of the same sequence is t's ancestor or t itself,
    parents before their children), `positions[t] = lengths[s] + depth`, where the root has depth 0.

    Kernels that may start early (`registry.Kernel.prepare`, `overlaps`) read these arrays before they wait for the
    launch before them: the launch right before a selection or an attention must not be the one that writes them.
    """

    sequence_starts: DeviceArray  # int32 [S + 1]
    lengths: DeviceArray  # int32 [S]
    page_tables: DeviceArray  # int32 [S, max_pages]
    positions: DeviceArray  # int32 [T]
    tree_masks: DeviceArray | None = None  # uint64 [T]

    FORMAT = "PPPPPiiii"

    def __post_init__(self) -> None:
        """Checks shapes and dtypes."""
        check_array("sequence_starts", self.sequence_starts, "int32", (None,), alignment=4)
        if self.sequence_starts.shape[0] < 2:
            raise LaunchError(
                f"sequence_starts: shape {self.sequence_starts.shape}, must be (S + 1) with S >= 1"
            )
        check_array("lengths", self.lengths, "int32", (self.sequences,), alignment=4)
        check_array("page_tables", self.page_tables, "int32", (self.sequences, None), alignment=4)
        check_at_least("page_tables: pages a sequence", self.max_pages, 1)
        check_array("positions", self.positions, "int32", (None,), alignment=4)
        check_at_least("positions: tokens", self.tokens, 1)
        if self.tree_masks is not None:
            check_array("tree_masks", self.tree_masks, ("uint64", "int64"), (self.tokens,), alignment=8)

    @property
    def sequences(self) -> int:
        """S, sequences of the bucket (those without tokens included)."""
        return self.sequence_starts.shape[0] - 1

    @property
    def tokens(self) -> int:
        """T, tokens of the bucket, padding included."""
        return self.positions.shape[0]

    @property
    def max_pages(self) -> int:
        """Pages that a sequence's table can name."""
        return self.page_tables.shape[1]

    def pack(self) -> tuple[int, ...]:
        """The kernels' `Batch` struct, in the order of `FORMAT`."""
        return (
            self.sequence_starts.pointer,
            self.lengths.pointer,
            self.page_tables.pointer,
            self.positions.pointer,
            0 if self.tree_masks is None else self.tree_masks.pointer,
            self.sequences,
            self.tokens,
            self.max_pages,
            0,
        )


def check_batch_values(
    sequence_starts: Sequence[int],
    lengths: Sequence[int],
    page_tables: Sequence[Sequence[int]],
    *,
    tokens: int,
    pages: int,
) -> None:
    """Refuses a batch whose values, read on the host, would send a kernel outside its pages (debug mode).

    Args:
        sequence_starts: S + 1 offsets.
        lengths: tokens stored before the step, S of them.
        page_tables: S rows.
        tokens: T, the bucket.
        pages: pages of the arena.

    Raises:
        LaunchError: naming `sequence_starts`, `lengths` or `page_tables`, with the sequence's index.
    """
    if sequence_starts[0] != 0 or sequence_starts[-1] > tokens:
        raise LaunchError(
            f"sequence_starts: runs from {sequence_starts[0]} to {sequence_starts[-1]}, "
            f"must run from 0 to at most the bucket's {tokens} tokens"
        )
    for index, length in enumerate(lengths):
        new = sequence_starts[index + 1] - sequence_starts[index]
        if new < 0:
            raise LaunchError(f"sequence_starts: falls by {-new} after sequence {index}")
        if length < 0:
            raise LaunchError(f"lengths: {length} of sequence {index}, must not be negative")
        if new == 0:
            continue
        needed = ceil_div(length + new, BLOCK)
        row = page_tables[index]
        if needed > len(row):
            raise LaunchError(
                f"lengths: sequence {index} stores {length} + {new} tokens, which takes {needed} pages; "
                f"its row of page_tables holds {len(row)}"
            )
        for slot, page in enumerate(row[:needed]):
            if not 0 <= page < pages:
                raise LaunchError(
                    f"page_tables: entry {slot} of sequence {index} is page {page}, the arena has {pages}"
                )
