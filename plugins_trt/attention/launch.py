"""Launches one layer's attention: the decode kernels for buckets of up to 64 tokens, the chunk kernels above."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.append.contract import Append
from plugins_trt.append.launch import Appender
from plugins_trt.chunk_attention.contract import ALWAYS, ChunkAttention
from plugins_trt.chunk_attention.launch import DenseChunkAttention, SparseChunkAttention
from plugins_trt.chunk_selection.contract import ChunkSelection, bitmap_words
from plugins_trt.chunk_selection.launch import ChunkSelector
from plugins_trt.contract import ELEMENT_BYTES, MAX_DECODE, DeviceArray, LaunchError
from plugins_trt.decode_attention.contract import DecodeAttention
from plugins_trt.decode_attention.launch import DecodeAttender
from plugins_trt.decode_selection.contract import DecodeSelection
from plugins_trt.decode_selection.launch import DecodeSelector

if TYPE_CHECKING:
    from plugins_trt.attention.contract import Attention, Layout
    from plugins_trt.contract import SelectionRule
    from plugins_trt.registry import Kernels


class Attender:
    """The kernels of one model's attention on one device."""

    def __init__(
        self,
        kernels: Kernels,
        *,
        dtype: str,
        heads: int,
        kv_heads: int,
        head_dim: int,
        kv_dtype: str | None = None,
    ) -> None:
        """Loads them; `kv_dtype` is the arena's.

        Raises:
            KernelsError: No compiled kernels suit the device.
        """
        self.multiprocessors = kernels.multiprocessors
        self._append = Appender(kernels.operator("append"), dtype=dtype, head_dim=head_dim, kv_dtype=kv_dtype)
        self._select = DecodeSelector(
            kernels.operator("decode_selection"),
            dtype=dtype,
            head_dim=head_dim,
            multiprocessors=kernels.multiprocessors,
        )
        self._attend = DecodeAttender(
            kernels.operator("decode_attention"),
            multiprocessors=kernels.multiprocessors,
            shared_bytes=kernels.shared_bytes,
            dtype=dtype,
            head_dim=head_dim,
            kv_dtype=kv_dtype,
        )
        self._select_chunk = ChunkSelector(
            kernels.operator("chunk_selection"),
            multiprocessors=kernels.multiprocessors,
            dtype=dtype,
            head_dim=head_dim,
            group=heads // kv_heads,
        )
        chunk = kernels.operator("chunk_attention")
        of_device: dict[str, Any] = {
            "multiprocessors": kernels.multiprocessors,
            "shared_bytes": kernels.shared_bytes,
            "dtype": dtype,
            "head_dim": head_dim,
            "kv_dtype": kv_dtype,
        }
        self._dense_chunk = DenseChunkAttention(chunk, **of_device)
        self._sparse_chunk = SparseChunkAttention(chunk, **of_device)

    def __call__(self, args: Attention, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one layer; captured in a CUDA graph it stays right when lengths and page tables change.

        Raises:
            LaunchError: naming the argument, before anything runs.
        """
        layout = args.layout(self.multiprocessors)
        append = _append(args, layout)
        if args.batch.tokens <= MAX_DECODE:
            self._decode(args, layout, append, stream)
        else:
            self._chunk(args, layout, append, stream)

    def _decode(self, args: Attention, layout: Layout, append: Append, stream: Any) -> None:  # noqa: ANN401
        selection = None if args.rule is None else _decode_selection(args, layout, append, args.rule)
        attention = DecodeAttention(
            batch=args.batch,
            arena=args.arena,
            layer=args.layer,
            q=append.q_out,
            out=args.out,
            workspace=_rest(args, layout.attention),
            blocks=None if selection is None else selection.blocks,
            counts=None if selection is None else selection.counts,
            dense_below=0 if args.rule is None else args.rule.dense_below,
            all_sparse=args.all_sparse,
            scale=args.scale,
        )
        self._append(append, stream)
        if selection is not None:
            self._select(selection, stream)
        self._attend(attention, stream)

    def _chunk(self, args: Attention, layout: Layout, append: Append, stream: Any) -> None:  # noqa: ANN401
        rule, q = args.rule, append.q_out
        selection = None
        if rule is not None:
            words = bitmap_words(args.batch.max_pages)
            selection = ChunkSelection(
                batch=args.batch,
                arena=args.arena,
                layer=args.layer,
                q=q,
                chosen=_part(args, layout.blocks, "int32", args.arena.kv_heads, args.batch.tokens, words),
                workspace=_rest(args, layout.selection),
                rule=rule,
                scale=args.scale,
            )
        attention = ChunkAttention(
            batch=args.batch,
            arena=args.arena,
            layer=args.layer,
            q=q,
            out=args.out,
            dense_below=ALWAYS if rule is None else rule.dense_below,
            chosen=None if selection is None else selection.chosen,
            workspace=_rest(args, layout.attention),
            scale=args.scale,
        )
        self._append(append, stream)
        if selection is not None:
            self._select_chunk(selection, stream)
            self._sparse_chunk(attention, stream)
        self._dense_chunk(attention, stream)


def _part(args: Attention, offset: int, dtype: str, *shape: int) -> DeviceArray:
    """An array in the scratch memory."""
    return DeviceArray(args.workspace.pointer + offset, dtype, shape)


def _rest(args: Attention, offset: int) -> DeviceArray:
    """The scratch memory from `offset` on, whose size `Attention.layout` has checked."""
    size = ELEMENT_BYTES[args.workspace.dtype]
    for dimension in args.workspace.shape:
        size *= dimension
    return DeviceArray(args.workspace.pointer + offset, "uint8", (size - offset,))


def _append(args: Attention, layout: Layout) -> Append:
    batch, arena = args.batch, args.arena
    nodes: list[DeviceArray | None] = [None, None]
    if batch.tree_masks is not None:
        shape = (batch.tokens, arena.kv_heads, arena.head_dim)
        nodes = [
            _part(args, offset, arena.dtype, *shape) for offset in (layout.node_fine, layout.node_coarse)
        ]
    return Append(
        batch=batch,
        arena=arena,
        layer=args.layer,
        q=args.q,
        k=args.k,
        v=args.v,
        q_out=_part(args, layout.q, arena.dtype, *args.q.shape),
        cosine=args.cosine,
        sine=args.sine,
        q_norm=args.q_norm,
        k_norm=args.k_norm,
        epsilon=args.epsilon,
        node_fine=nodes[0],
        node_coarse=nodes[1],
    )


def _decode_selection(
    args: Attention, layout: Layout, append: Append, rule: SelectionRule
) -> DecodeSelection:
    if args.arrived is None:
        raise LaunchError("arrived: missing, selection counts its thread blocks there")
    tokens, kv_heads = args.batch.tokens, args.arena.kv_heads
    return DecodeSelection(
        batch=args.batch,
        arena=args.arena,
        layer=args.layer,
        q=append.q_out,
        blocks=_part(args, layout.blocks, "int32", tokens, kv_heads, rule.total),
        counts=_part(args, layout.counts, "int32", tokens, kv_heads),
        workspace=_rest(args, layout.selection),
        arrived=args.arrived,
        rule=rule,
        node_fine=append.node_fine,
        node_coarse=append.node_coarse,
        scale=args.scale,
    )
