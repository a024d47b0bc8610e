"""Decode attention and selection beside torch SDPA: the decode rows of `bench/attention.py`.

Each figure is the median over replays of a CUDA graph that runs the operator once on each of several layers, whose
inputs are drawn independently and together exceed the L2 cache, divided by the number of layers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from _gpu import graph_ms
from torch.nn.attention import SDPBackend, sdpa_kernel

from plugins_trt.arena import Arena
from plugins_trt.contract import Batch, Bucket, DeviceArray, SelectionRule
from plugins_trt.decode_attention.contract import AttentionPlan, DecodeAttention
from plugins_trt.decode_attention.launch import DecodeAttender
from plugins_trt.decode_selection.contract import DecodeSelection, workspace_bytes
from plugins_trt.decode_selection.launch import DecodeSelector

if TYPE_CHECKING:
    from collections.abc import Callable

    from pycuda.driver import Stream

    from plugins_trt.registry import Kernels

HEADS, KV_HEADS, DIM = 32, 2, 128
REPLAYS = 30


def median_ms(stream: torch.cuda.Stream, layers: int, run: Callable[[int], None]) -> float:
    """Median time of one layer, in milliseconds, of a graph over `layers` layers."""

    def run_all() -> None:
        for layer in range(layers):
            run(layer)

    return graph_ms(stream, run_all, REPLAYS) / layers


def bucket_of(tokens: int, pages: int, kernels: Kernels) -> Bucket:
    """Of one sequence."""
    return Bucket(
        tokens=tokens,
        sequences=1,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        max_pages=pages,
        multiprocessors=kernels.multiprocessors,
    )


@dataclass
class Context:
    """Layers of paged keys and values of one sequence, and its compressed keys."""

    arena: Arena
    table: torch.Tensor  # int32 [1, pages]
    length: int
    keep: list[torch.Tensor]

    @classmethod
    def random(cls, length: int, layers: int, room: int = 64) -> Context:
        """`length` tokens in pages of random order, with room for `room` more."""
        pages = (length + room + 63) // 64
        order = list(range(pages))
        random.Random(0).shuffle(order)  # noqa: S311 -- a layout, no secret
        table = torch.tensor([order], dtype=torch.int32, device="cuda")
        shape = (layers, pages, KV_HEADS)
        keys = torch.empty(*shape, 64, DIM, dtype=torch.bfloat16, device="cuda")
        values = torch.empty_like(keys)
        fine = torch.zeros(*shape, 4, DIM, dtype=torch.bfloat16, device="cuda")
        coarse = torch.zeros(*shape, 1, DIM, dtype=torch.bfloat16, device="cuda")
        where = table[0].long()
        for layer in range(layers):
            values[layer].normal_()
            tokens = torch.randn(pages * 64, KV_HEADS, DIM, device="cuda").bfloat16()
            keys[layer, where] = tokens.view(pages, 64, KV_HEADS, DIM).transpose(1, 2)
            for kernel, stride, pool in ((32, 16, fine), (128, 64, coarse)):
                means = tokens.float().unfold(0, kernel, stride).mean(-1).bfloat16()
                last = torch.arange(len(means), device="cuda") * stride + kernel - 1
                pool[layer, where[last // 64], :, last % 64 // stride] = means
        arena = Arena.contiguous(
            layers,
            pages,
            KV_HEADS,
            DIM,
            "bfloat16",
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            fine=fine.data_ptr(),
            coarse=coarse.data_ptr(),
        )
        return cls(arena, table, length, [keys, values, fine, coarse])


class Step:
    """A decode step (one token) or a verify step (a tree) over a context; its tokens are stored already."""

    def __init__(
        self, kernels: Kernels, stream: Stream, context: Context, tokens: int, rule: SelectionRule | None
    ) -> None:
        self.stream, self.context, self.rule = stream, context, rule
        self.layers = context.arena.layers
        length = context.length - 1 if tokens == 1 else context.length
        parents = [-1] + [random.Random(node).randrange(node) for node in range(1, tokens)]  # noqa: S311 -- a tree, no secret
        masks: list[int] = []
        for node, parent in enumerate(parents):
            masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
        positions = [length + mask.bit_count() - 1 for mask in masks]

        def int32(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cuda")

        words = torch.tensor([mask - (1 << 64) if mask >> 63 else mask for mask in masks], device="cuda")
        self.keep = [int32([0, tokens]), int32([length]), int32(positions), words]
        of = DeviceArray.of
        self.batch = Batch(
            of(self.keep[0]),
            of(self.keep[1]),
            of(context.table),
            of(self.keep[2]),
            of(words) if tokens > 1 else None,
        )
        self.q = torch.randn(self.layers, tokens, HEADS, DIM, device="cuda").bfloat16()
        self.out = torch.empty_like(self.q)
        nodes = torch.randn(tokens, KV_HEADS, DIM, device="cuda").bfloat16()
        pages = context.table.shape[1]
        bucket = bucket_of(tokens, pages, kernels)
        plan = AttentionPlan.of(bucket, sparse=rule is not None, quantized=context.arena.kv_dtype is not None)
        scratch = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")
        self.keep += [nodes, scratch]
        blocks = counts = None
        self.selections = []
        if rule is not None:
            blocks = torch.empty(tokens, KV_HEADS, rule.total, dtype=torch.int32, device="cuda")
            counts = torch.empty(tokens, KV_HEADS, dtype=torch.int32, device="cuda")
            arrived = torch.zeros(1, KV_HEADS, dtype=torch.int32, device="cuda")
            size = workspace_bytes(tokens=tokens, kv_heads=KV_HEADS, max_pages=pages, lse=rule.lse)
            work = torch.empty(size, dtype=torch.uint8, device="cuda")
            self.keep += [blocks, counts, arrived, work]
            self.selections = [
                DecodeSelection(
                    batch=self.batch,
                    arena=context.arena,
                    layer=layer,
                    q=of(self.q[layer]),
                    blocks=of(blocks),
                    counts=of(counts),
                    workspace=of(work),
                    arrived=of(arrived),
                    rule=rule,
                    node_fine=of(nodes),
                    node_coarse=of(nodes),
                )
                for layer in range(self.layers)
            ]
        self.attentions = [
            DecodeAttention(
                batch=self.batch,
                arena=context.arena,
                layer=layer,
                q=of(self.q[layer]),
                out=of(self.out[layer]),
                workspace=of(scratch),
                blocks=None if blocks is None else of(blocks),
                counts=None if counts is None else of(counts),
                dense_below=0 if rule is None else rule.dense_below,
            )
            for layer in range(self.layers)
        ]
        self.selector = DecodeSelector(
            kernels.operator("decode_selection"),
            dtype="bfloat16",
            head_dim=DIM,
            multiprocessors=kernels.multiprocessors,
        )
        self.attender = DecodeAttender(
            kernels.operator("decode_attention"),
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
        """Enqueues everything of one layer, as `plugins_trt.attention` does behind `append`."""
        if self.rule is not None:
            self.select(layer)
        self.attend(layer)


def sdpa_ms(stream: torch.cuda.Stream, length: int, tokens: int, layers: int) -> tuple[float, float]:
    """Median times of torch's flash attention of `tokens` queries over `length` contiguous keys.

    Returns:
        Called from Python, events around each call; and inside a CUDA graph.
    """
    q = torch.randn(layers, 1, HEADS, tokens, DIM, device="cuda").bfloat16()
    k, v = (
        torch.empty(layers, 1, KV_HEADS, length, DIM, device="cuda", dtype=torch.bfloat16).normal_()
        for _ in "kv"
    )

    def run(layer: int) -> None:
        torch.nn.functional.scaled_dot_product_attention(q[layer], k[layer], v[layer], enable_gqa=True)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with torch.cuda.stream(stream):
            times = []
            for call in range(10 * layers):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                run(call % layers)
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
        return sorted(times)[len(times) // 2], median_ms(stream, layers, run)


def measure(
    kernels: Kernels, torch_stream: torch.cuda.Stream, stream: Stream, ceilings: dict[str, float]
) -> dict[str, float]:
    """All decode figures; times in milliseconds a layer, rates and bandwidths as shares of the ceilings."""
    figures: dict[str, float] = {}
    kv_bytes = 2 * KV_HEADS * DIM * 2
    rule = SelectionRule()
    for name, length, layers in (("32k", 32768, 16), ("128k", 131072, 12)):
        called, captured = sdpa_ms(torch_stream, length, 1, 4 if name == "128k" else 8)
        figures[f"sdpa_decode_{name}_ms"] = called
        figures[f"sdpa_decode_{name}_graph_ms"] = captured
        context = Context.random(length, layers)
        dense = Step(kernels, stream, context, 1, None)
        figures[f"dense_decode_{name}_ms"] = median_ms(torch_stream, layers, dense.run)
        sparse = Step(kernels, stream, context, 1, rule)
        figures[f"sparse_decode_{name}_ms"] = median_ms(torch_stream, layers, sparse.run)
        figures[f"sparse_decode_{name}_selection_ms"] = median_ms(torch_stream, layers, sparse.select)
        figures[f"sparse_decode_{name}_attention_ms"] = median_ms(torch_stream, layers, sparse.attend)
        seconds = figures[f"dense_decode_{name}_ms"] * 1e-3
        figures[f"dense_decode_{name}_bandwidth"] = length * kv_bytes / seconds / ceilings["copy_bytes_per_s"]
        sdpa = figures[f"sdpa_decode_{name}_ms"]
        figures[f"dense_decode_{name}_vs_sdpa"] = figures[f"dense_decode_{name}_ms"] / sdpa
        figures[f"sparse_decode_{name}_vs_sdpa"] = figures[f"sparse_decode_{name}_ms"] / sdpa
        for nodes in (4, 16, 64):
            tree = Step(kernels, stream, context, nodes, None)
            ms = median_ms(torch_stream, layers, tree.run)
            figures[f"tree{nodes}_{name}_ms"] = ms
            work = 4 * nodes * HEADS * DIM * length
            figures[f"tree{nodes}_{name}_rate"] = work / (ms * 1e-3) / ceilings["bf16_flop_per_s"]
            verify = Step(kernels, stream, context, nodes, rule)
            figures[f"sparse_tree{nodes}_{name}_ms"] = median_ms(torch_stream, layers, verify.run)
        del context
        torch.cuda.empty_cache()
    figures["sparse_decode_128k_vs_32k"] = figures["sparse_decode_128k_ms"] / figures["sparse_decode_32k_ms"]
    return figures


BOUNDS = {
    "dense_decode_128k_bandwidth": (">=", 0.70),
    "dense_decode_128k_vs_sdpa": ("<=", 0.50),
    "sparse_decode_128k_vs_sdpa": ("<=", 0.22),
    "sparse_decode_128k_vs_32k": ("<=", 1.3),
    "tree16_32k_rate": (">=", 0.30),
    "tree64_32k_rate": (">=", 0.40),
}
