"""What `verify_tree` takes, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import MAX_TREE, Batch, DeviceArray, LaunchError, check_array


@dataclass(frozen=True)
class VerifyTree:
    """The arguments of one launch.

    `batch` is the verify step's, `tree_masks` included; `token_ids[t]` is the token of node t and `targets[t]` the one
    that the target draws after it, each with the random number of its own position. A child is accepted if it is the
    token drawn at its parent, so the tokens of a path are those of plain decoding, whatever was drafted. Row s of
    `paths` gets the accepted nodes of sequence s, root first (what lies behind them is left alone), `accepted[s]` their
    number: at least 1, or 0 where the sequence has no tokens or `given` says so. Of siblings with one token the
    first is taken.

    `commit` then keeps the path in the pages; the token drawn at its last node is the next one.
    """

    batch: Batch
    token_ids: DeviceArray  # int32 [T]
    targets: DeviceArray  # int32 [T]
    paths: DeviceArray  # int32 [S, 64]
    accepted: DeviceArray  # int32 [S]
    given: DeviceArray | None = None  # int32 [S]
    """0: the tree is verified; n > 0: its first n nodes are a chain that is known to be right; below 0: the sequence is
    left alone, its path is for another to choose. None: all are verified."""

    def __post_init__(self) -> None:
        """Checks shapes and dtypes."""
        if self.batch.tree_masks is None:
            raise LaunchError("tree_masks: missing, there is no tree to verify")
        tokens, sequences = self.batch.tokens, self.batch.sequences
        if tokens > MAX_TREE * sequences:
            raise LaunchError(
                f"tree_masks: {tokens} nodes of {sequences} sequences, a tree has at most {MAX_TREE}"
            )
        check_array("token_ids", self.token_ids, "int32", (tokens,), alignment=4)
        check_array("targets", self.targets, "int32", (tokens,), alignment=4)
        check_array("paths", self.paths, "int32", (sequences, MAX_TREE), alignment=4)
        check_array("accepted", self.accepted, "int32", (sequences,), alignment=4)
        if self.given is not None:
            check_array("given", self.given, "int32", (sequences,), alignment=4)
