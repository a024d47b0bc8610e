"""What `commit` takes, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from plugins_trt.contract import MAX_TREE, Batch, DeviceArray, check_array

if TYPE_CHECKING:
    from plugins_trt.arena import Arena


@dataclass(frozen=True)
class Commit:
    """The arguments of one launch, for all layers of the arena.

    `batch` is the verify step's: `lengths` are those before it. Row s of `paths` names the accepted nodes of
    sequence s, root first; `accepted[s]` of them count (0: the sequence is left alone).
    """

    batch: Batch
    arena: Arena
    paths: DeviceArray  # int32 [S, 64]
    accepted: DeviceArray  # int32 [S]

    def __post_init__(self) -> None:
        """Checks shapes and dtypes."""
        check_array("paths", self.paths, "int32", (self.batch.sequences, MAX_TREE), alignment=4)
        check_array("accepted", self.accepted, "int32", (self.batch.sequences,), alignment=4)
