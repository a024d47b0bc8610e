"""What `append` takes, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from plugins_trt.contract import (
    BLOCK,
    MAX_DECODE,
    Batch,
    DeviceArray,
    LaunchError,
    check_array,
    check_heads,
    check_rows,
)

if TYPE_CHECKING:
    from plugins_trt.arena import Arena


@dataclass(frozen=True)
class Append:
    """The arguments of one launch.

    `q`, `k` and `v` may be parts of a fused projection's output: their rows may lie apart. `cosine` and `sine` are
    tables by position of each pair's angle (NeoX: element i turns with element i + D/2). With `q_norm` / `k_norm`,
    each head is first divided by its root mean square and multiplied by the weight. `q_out` gets the queries,
    zeros for padding. In a tree the compressed keys that nodes complete go to `node_fine` and `node_coarse`.
    """

    batch: Batch
    arena: Arena
    layer: int
    q: DeviceArray  # [T, H, D]
    k: DeviceArray  # [T, Hkv, D]
    v: DeviceArray  # [T, Hkv, D]
    q_out: DeviceArray  # [T, H, D]
    cosine: DeviceArray  # float32 [max_positions, D / 2]
    sine: DeviceArray  # float32 [max_positions, D / 2]
    q_norm: DeviceArray | None = None  # [D]
    k_norm: DeviceArray | None = None  # [D]
    epsilon: float = 1e-6
    node_fine: DeviceArray | None = None  # [T, Hkv, D], trees only
    node_coarse: DeviceArray | None = None  # [T, Hkv, D], trees only

    def __post_init__(self) -> None:
        """Checks everything that shapes and dtypes can tell."""
        tokens, dim, dtype = self.batch.tokens, self.arena.head_dim, self.arena.dtype
        kv_heads = self.arena.kv_heads
        if len(self.q.shape) != 3:
            raise LaunchError(f"q: shape {self.q.shape}, must be ({tokens}, heads, {dim})")
        check_heads(self.heads, kv_heads, dim)
        check_rows("q", self.q, dtype, (tokens, self.heads, dim))
        check_rows("k", self.k, dtype, (tokens, kv_heads, dim))
        check_rows("v", self.v, dtype, (tokens, kv_heads, dim))
        check_array("q_out", self.q_out, dtype, (tokens, self.heads, dim))
        check_array("cosine", self.cosine, "float32", (None, dim // 2))
        check_array("sine", self.sine, "float32", self.cosine.shape)
        if self.cosine.shape[0] < self.batch.max_pages * BLOCK:
            raise LaunchError(
                f"cosine: {self.cosine.shape[0]} positions, but page_tables of {self.batch.max_pages} pages reach "
                f"position {self.batch.max_pages * BLOCK - 1}; make the tables of angles as long"
            )
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                check_array(name, norm, dtype, (dim,))
        if self.epsilon < 0:
            raise LaunchError(f"epsilon: {self.epsilon}, must not be negative")
        if self.batch.tree_masks is not None:
            if tokens > MAX_DECODE:
                raise LaunchError(f"tree_masks: given for {tokens} tokens, a tree has at most {MAX_DECODE}")
            for name, nodes in (("node_fine", self.node_fine), ("node_coarse", self.node_coarse)):
                if nodes is None:
                    raise LaunchError(f"{name}: missing, a tree's compressed keys go there")
                check_array(name, nodes, dtype, (tokens, kv_heads, dim))

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.q.shape[1]
