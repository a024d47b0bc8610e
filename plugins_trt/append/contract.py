"""What `append` takes, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import (
    BLOCK,
    DeviceArray,
    LaunchError,
    QueryArguments,
    check_array,
    check_rows,
)


@dataclass(frozen=True)
class Append(QueryArguments):
    """The arguments of one launch.

    `q`, `k` and `v` may be parts of a fused projection's output: their rows may lie apart. `cosine` and `sine` are
    tables by position of each pair's angle (NeoX: element i turns with element i + D/2). With `q_norm` / `k_norm`,
    each head is first divided by its root mean square and multiplied by the weight. `q_out` gets the queries,
    zeros for padding. In a tree the compressed keys that nodes complete go to `node_fine` and `node_coarse`.
    """

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
        self.check_queries(rows_apart=True)
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
        self.check_tree()
        self.check_nodes(self.node_fine, self.node_coarse)
