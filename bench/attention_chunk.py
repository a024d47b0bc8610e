"""Prefill chunks beside torch SDPA: the chunk rows of `bench/attention.py`.

A chunk of 2048 tokens (and smaller ones) at the end of a context, dense and sparse, with its block selection. As for
the decode rows, each figure is the median over replays of a CUDA graph that runs the operator once on each of several
layers with inputs of their own, divided by the number of layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attention_decode import DIM, HEADS, KV_HEADS, Context, bucket_of, median_ms
from torch.nn.attention import SDPBackend, sdpa_kernel

from plugins_trt.chunk_attention import contract as attention_contract
from plugins_trt.chunk_attention.contract import ALWAYS, ChunkAttention
from plugins_trt.chunk_attention.launch import DenseChunkAttention, SparseChunkAttention
from plugins_trt.chunk_selection import contract as selection_contract
from plugins_trt.chunk_selection.contract import ChunkSelection, bitmap_words
from plugins_trt.chunk_selection.launch import ChunkSelector
from plugins_trt.contract import Batch, DeviceArray, SelectionRule

if TYPE_CHECKING:
    from plugins_trt.registry import Kernels

CHUNK = 2048
LAYERS = 4
RULES = {"sparse": SelectionRule(), "sparse17": SelectionRule(init_blocks=1, window=512, top_k=8)}
BOUNDS = {
    "dense_chunk_32k_vs_sdpa": ("<=", 1.2),
    "sparse_chunk_128k_vs_sdpa": ("<=", 0.22),
    "sparse17_chunk_128k_vs_sdpa": ("<=", 0.11),
}


class Chunk:
    """The last `tokens` tokens of a context as one bucket; their keys are stored already."""

    def __init__(
        self, kernels: Kernels, stream: object, context: Context, tokens: int, rule: SelectionRule | None
    ) -> None:
        self.stream, layers = stream, context.arena.layers
        first = context.length - tokens

        def int32(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cuda")

        of = DeviceArray.of
        self.keep = [int32([0, tokens]), int32([first]), int32(list(range(first, context.length)))]
        starts, lengths, positions = self.keep
        batch = Batch(of(starts), of(lengths), of(context.table), of(positions))
        self.q = torch.randn(layers, tokens, HEADS, DIM, device="cuda").bfloat16()
        out = torch.empty_like(self.q)
        bucket = bucket_of(tokens, batch.max_pages, kernels)
        scratch = torch.empty(
            max(16, attention_contract.workspace_bytes(bucket)),
            dtype=torch.uint8,
            device="cuda",
        )
        size = selection_contract.workspace_bytes(bucket)
        work = torch.empty(size, dtype=torch.uint8, device="cuda")
        # A bitmap a layer, so that attention can be timed alone.
        chosen = torch.zeros(
            layers, KV_HEADS, tokens, bitmap_words(batch.max_pages), dtype=torch.int32, device="cuda"
        )
        self.keep += [out, scratch, work, chosen]
        self.selections = [
            ChunkSelection(batch, context.arena, layer, of(self.q[layer]), of(chosen[layer]), of(work), rule)
            for layer in range(layers)
            if rule is not None
        ]
        self.attentions = [
            ChunkAttention(
                batch,
                context.arena,
                layer,
                of(self.q[layer]),
                of(out[layer]),
                dense_below=ALWAYS if rule is None else rule.dense_below,
                chosen=None if rule is None else of(chosen[layer]),
                workspace=of(scratch),
            )
            for layer in range(layers)
        ]
        self.selector = ChunkSelector(
            kernels.operator("chunk_selection"),
            multiprocessors=kernels.multiprocessors,
            dtype="bfloat16",
            head_dim=DIM,
            group=HEADS // KV_HEADS,
        )
        kind = DenseChunkAttention if rule is None else SparseChunkAttention
        self.attender = kind(
            kernels.operator("chunk_attention"),
            multiprocessors=kernels.multiprocessors,
            shared_bytes=kernels.shared_bytes,
            dtype="bfloat16",
            head_dim=DIM,
            kv_dtype=context.arena.kv_dtype,
        )

    def select(self, layer: int) -> None:
        """Enqueues the selection of one layer."""
        self.selector(self.selections[layer], self.stream)

    def attend(self, layer: int) -> None:
        """Enqueues the attention of one layer."""
        self.attender(self.attentions[layer], self.stream)

    def run(self, layer: int) -> None:
        """Enqueues everything of one layer."""
        if self.selections:
            self.select(layer)
        self.attend(layer)


def sdpa_ms(stream: torch.cuda.Stream, length: int, tokens: int) -> float:
    """Median time of torch's flash attention of `tokens` queries over `length` contiguous keys, without a mask.

    The faster of its two ways to share keys among heads: told so, or keys and values repeated beforehand. The
    causal mask that the chunk would need takes it longer.
    """
    q = torch.randn(LAYERS, 1, HEADS, tokens, DIM, device="cuda").bfloat16()
    k, v = (
        torch.empty(LAYERS, 1, KV_HEADS, length, DIM, device="cuda", dtype=torch.bfloat16).normal_()
        for _ in "kv"
    )

    def run(layer: int) -> None:
        shared = k.shape[2] != HEADS
        torch.nn.functional.scaled_dot_product_attention(q[layer], k[layer], v[layer], enable_gqa=shared)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        times = [median_ms(stream, LAYERS, run)]
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
        times.append(median_ms(stream, LAYERS, run))
    return min(times)


def measure(
    kernels: Kernels, torch_stream: torch.cuda.Stream, stream: object, ceilings: dict[str, float]
) -> dict[str, float]:
    """All chunk figures; times in milliseconds a layer, rates as shares of the bf16 ceiling."""
    figures: dict[str, float] = {}
    for name, length in (("32k", 32768), ("128k", 131072)):
        figures[f"sdpa_chunk_{name}_ms"] = sdpa_ms(torch_stream, length, CHUNK)
        torch.cuda.empty_cache()
        context = Context.random(length, LAYERS, room=0)
        dense = Chunk(kernels, stream, context, CHUNK, None)
        figures[f"dense_chunk_{name}_ms"] = median_ms(torch_stream, LAYERS, dense.run)
        work = 4 * HEADS * DIM * CHUNK * (length - CHUNK / 2)
        seconds = figures[f"dense_chunk_{name}_ms"] * 1e-3
        figures[f"dense_chunk_{name}_rate"] = work / seconds / ceilings["bf16_flop_per_s"]
        for kind, rule in RULES.items():
            sparse = Chunk(kernels, stream, context, CHUNK, rule)
            figures[f"{kind}_chunk_{name}_ms"] = median_ms(torch_stream, LAYERS, sparse.run)
            figures[f"{kind}_chunk_{name}_selection_ms"] = median_ms(torch_stream, LAYERS, sparse.select)
            figures[f"{kind}_chunk_{name}_attention_ms"] = median_ms(torch_stream, LAYERS, sparse.attend)
        exact = Chunk(kernels, stream, context, CHUNK, SelectionRule(lse="exact"))
        figures[f"exact_chunk_{name}_selection_ms"] = median_ms(torch_stream, LAYERS, exact.select)
        for kind in ("dense", *RULES):
            ratio = figures[f"{kind}_chunk_{name}_ms"] / figures[f"sdpa_chunk_{name}_ms"]
            figures[f"{kind}_chunk_{name}_vs_sdpa"] = ratio
        for tokens in (128, 512):
            for kind, small_rule in (("dense", None), ("sparse", RULES["sparse"])):
                small = Chunk(kernels, stream, context, tokens, small_rule)
                figures[f"{kind}_chunk_of_{tokens}_{name}_ms"] = median_ms(torch_stream, LAYERS, small.run)
        del context, dense, sparse, exact, small
        torch.cuda.empty_cache()
    return figures
