"""What every operator over paged keys takes: a batch, the arena, a layer and queries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plugins_trt.contract.arrays import DeviceArray, LaunchError, check_array, check_at_least, check_rows
from plugins_trt.contract.sizes import MAX_DECODE, MAX_TREE, check_heads

if TYPE_CHECKING:
    from plugins_trt.arena import Arena
    from plugins_trt.contract.batch import Batch


def softmax_scale(scale: float | None, head_dim: int) -> float:
    """What products of queries and keys are multiplied with."""
    return 1.0 / math.sqrt(head_dim) if scale is None else scale


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The sizes of a step over paged keys, and the device's: what decides how attention and selection cut their work.

    Raises:
        LaunchError: naming a size that is not positive.
    """

    tokens: int
    sequences: int
    heads: int
    kv_heads: int
    head_dim: int
    max_pages: int
    multiprocessors: int

    def __post_init__(self) -> None:
        """Checks the sizes that callers bring; those of the heads are checked where their queries are."""
        for name in ("tokens", "sequences", "max_pages", "multiprocessors"):
            check_at_least(name, getattr(self, name), 1)


@dataclass(frozen=True)
class QueryArguments:
    """The first arguments of append, selection and attention, and the checks that these have in common."""

    batch: Batch
    arena: Arena
    layer: int
    q: DeviceArray  # [T, H, D]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.q.shape[1]

    def bucket(self, multiprocessors: int) -> Bucket:
        """The sizes of this step, on a device of `multiprocessors`."""
        return Bucket(
            tokens=self.batch.tokens,
            sequences=self.batch.sequences,
            heads=self.heads,
            kv_heads=self.arena.kv_heads,
            head_dim=self.arena.head_dim,
            max_pages=self.batch.max_pages,
            multiprocessors=multiprocessors,
        )

    def check_queries(self, *, rows_apart: bool = False) -> None:
        """Refuses a layer the arena cannot have, head layouts without a kernel, and queries of another kind.

        `rows_apart`: the queries' rows may lie apart, as parts of a fused projection do.

        Raises:
            LaunchError: naming `layer`, `heads`, `kv_heads`, `head_dim` or `q`.
        """
        check_at_least("layer", self.layer, 0)
        self.check_rows_of_queries("q", self.q, rows_apart=rows_apart)

    def check_rows_of_queries(self, name: str, array: DeviceArray, *, rows_apart: bool = False) -> None:
        """Refuses an array that is not `[T, H, D]` of the arena's dtype.

        Raises:
            LaunchError: naming the argument.
        """
        tokens, dim = self.batch.tokens, self.arena.head_dim
        if len(array.shape) != 3:
            raise LaunchError(f"{name}: shape {array.shape}, must be ({tokens}, heads, {dim})")
        check_heads(array.shape[1], self.arena.kv_heads, dim)
        check = check_rows if rows_apart else check_array
        check(name, array, self.arena.dtype, (tokens, array.shape[1], dim))

    def check_scale(self, scale: float | None) -> None:
        """Refuses a scale of the scores that is no positive number; None stands for 1 / sqrt(D).

        Raises:
            LaunchError: naming `scale`.
        """
        if scale is not None and not (scale > 0.0 and math.isfinite(scale)):
            raise LaunchError(f"scale: {scale}, must be positive and finite")

    def check_decode(self) -> None:
        """Refuses more tokens than the decode kernels take.

        Raises:
            LaunchError: naming `positions`.
        """
        if self.batch.tokens > MAX_DECODE:
            raise LaunchError(
                f"positions: {self.batch.tokens} tokens, decode kernels take at most {MAX_DECODE}"
            )

    def check_chain(self) -> None:
        """Refuses trees: the tokens of a chunk follow one another.

        Raises:
            LaunchError: naming `tree_masks`.
        """
        if self.batch.tree_masks is not None:
            raise LaunchError(
                "tree_masks: given, but the tokens of a chunk follow one another; use decode_attention"
            )

    def check_tree(self) -> None:
        """Refuses a tree of more nodes than a mask word has bits.

        Raises:
            LaunchError: naming `tree_masks`.
        """
        if self.batch.tree_masks is not None and self.batch.tokens > MAX_TREE:
            raise LaunchError(
                f"tree_masks: given for {self.batch.tokens} tokens, a tree has at most {MAX_TREE}"
            )

    def check_nodes(self, node_fine: DeviceArray | None, node_coarse: DeviceArray | None) -> None:
        """Refuses a tree without room for the compressed keys that its nodes complete.

        Raises:
            LaunchError: naming `node_fine` or `node_coarse`.
        """
        if self.batch.tree_masks is None:
            return
        shape = (self.batch.tokens, self.arena.kv_heads, self.arena.head_dim)
        for name, nodes in (("node_fine", node_fine), ("node_coarse", node_coarse)):
            if nodes is None:
                raise LaunchError(
                    f"{name}: missing, the compressed keys that a tree's nodes complete lie there"
                )
            check_array(name, nodes, self.arena.dtype, shape)
