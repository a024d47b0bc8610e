"""What one layer's attention takes, the scratch memory it needs, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.chunk_attention import contract as chunk_attention_contract
from plugins_trt.chunk_selection import contract as chunk_selection_contract
from plugins_trt.contract import (
    MAX_DECODE,
    Bucket,
    DeviceArray,
    LaunchError,
    QueryArguments,
    SelectionRule,
    check_array,
    check_workspace,
    round_up,
)
from plugins_trt.decode_attention import contract as decode_attention_contract
from plugins_trt.decode_selection import contract as decode_selection_contract


@dataclass(frozen=True)
class Layout:
    """Where one bucket's scratch memory lies, in bytes from its start; depends on sizes alone.

    Every layer of a step uses the same scratch memory, one after the other.
    """

    q: int  # rotated queries [T, H, D]
    node_fine: int  # [T, Hkv, D], decode buckets
    node_coarse: int  # [T, Hkv, D], decode buckets
    blocks: int  # decode: int32 [T, Hkv, total]; chunks: bitmaps int32 [Hkv, T, words]
    counts: int  # int32 [T, Hkv], decode buckets
    selection: int
    attention: int
    total: int

    @classmethod
    def of(
        cls, bucket: Bucket, rule: SelectionRule | None, *, trees: bool = False, quantized: bool = False
    ) -> Layout:
        """Lays out a bucket; without a `rule` every query is dense.

        `trees` makes room for the compressed keys that nodes complete; `quantized`: keys and values are in eight bits.
        """
        tokens, kv_heads, head_dim, max_pages = (
            bucket.tokens,
            bucket.kv_heads,
            bucket.head_dim,
            bucket.max_pages,
        )
        decode = tokens <= MAX_DECODE
        node_bytes = tokens * kv_heads * head_dim * 2 if trees else 0
        blocks = counts = selection = 0
        if rule is not None and decode:
            blocks = tokens * kv_heads * rule.total * 4
            counts = tokens * kv_heads * 4
            selection = decode_selection_contract.workspace_bytes(
                tokens=tokens, kv_heads=kv_heads, max_pages=max_pages, lse=rule.lse
            )
        elif rule is not None:
            blocks = tokens * kv_heads * chunk_selection_contract.bitmap_words(max_pages) * 4
            selection = chunk_selection_contract.workspace_bytes(bucket)
        if decode:
            attention = decode_attention_contract.workspace_bytes(bucket, quantized=quantized)
        else:
            attention = chunk_attention_contract.workspace_bytes(bucket)
        sizes = (
            tokens * bucket.heads * head_dim * 2,
            node_bytes,
            node_bytes,
            blocks,
            counts,
            selection,
            attention,
        )
        places = [0]
        for size in sizes:
            places.append(places[-1] + round_up(size, 256))
        return cls(
            q=places[0],
            node_fine=places[1],
            node_coarse=places[2],
            blocks=places[3],
            counts=places[4],
            selection=places[5],
            attention=places[6],
            total=places[7],
        )


def arrived_bytes(sequences: int, kv_heads: int) -> int:
    """Bytes of the counters that must be zero before the first step."""
    return sequences * kv_heads * 4


@dataclass(frozen=True)
class Attention(QueryArguments):
    """One layer of one step.

    `q`, `k`, `v` are the projections' outputs, before norm and RoPE (their rows may lie apart); `out` gets the attention's, zeros for
    padding. Buckets of up to 64 tokens take trees; larger ones are chunks. `arrived` is zero before the first
    launch and zero again after each.
    """

    k: DeviceArray  # [T, Hkv, D]
    v: DeviceArray  # [T, Hkv, D]
    out: DeviceArray  # [T, H, D]
    cosine: DeviceArray  # float32 [max_positions, D / 2]
    sine: DeviceArray  # float32 [max_positions, D / 2]
    workspace: DeviceArray  # at least Layout.total bytes
    arrived: DeviceArray | None = None  # int32 [S, Hkv], with a rule
    q_norm: DeviceArray | None = None  # [D]
    k_norm: DeviceArray | None = None  # [D]
    epsilon: float = 1e-6
    rule: SelectionRule | None = None  # None: every query is dense
    all_sparse: bool = False  # no query is dense, whatever the step; with a rule
    scale: float | None = None  # of the scores; 1 / sqrt(D) when None

    def __post_init__(self) -> None:
        """Checks what its parts do not check."""
        self.check_queries(rows_apart=True)
        check_array("out", self.out, self.arena.dtype, (self.batch.tokens, *self.q.shape[1:]))
        self.check_tree()
        if self.all_sparse and self.rule is None:
            raise LaunchError("all_sparse: True, but there is no rule: every query is dense")
        if self.rule is not None and self.arrived is None and self.batch.tokens <= MAX_DECODE:
            raise LaunchError("arrived: missing, selection counts its thread blocks there")

    def layout(self, multiprocessors: int) -> Layout:
        """Where this bucket's scratch memory lies.

        Raises:
            LaunchError: naming `workspace`, when it is too small.
        """
        layout = Layout.of(
            self.bucket(multiprocessors),
            self.rule,
            trees=self.batch.tree_masks is not None,
            quantized=self.arena.kv_dtype is not None,
        )
        check_workspace("workspace", self.workspace, layout.total)
        return layout
