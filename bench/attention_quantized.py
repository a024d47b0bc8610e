"""Attention over keys and values in eight bits beside bfloat16 ones: the quantized rows of `bench/attention.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from attention_chunk import CHUNK, Chunk
from attention_decode import DIM, KV_HEADS, Context, Step, median_ms

from plugins_trt.arena import Arena
from plugins_trt.contract import SelectionRule

if TYPE_CHECKING:
    from pycuda.driver import Stream

    from plugins_trt.registry import Kernels

FORMATS = {"int8": "int8", "fp8": "float8_e4m3fn"}


def quantized(context: Context, kv_dtype: str) -> Context:
    """A context of random bytes with the places and the compressed keys of another one."""
    arena = context.arena
    shape = (arena.layers, arena.pages, KV_HEADS, 64)
    # Bytes of both signs, of which none is a NaN of the 8-bit floating point.
    keys, values = (
        torch.randint(-127, 127, (*shape, DIM), dtype=torch.int8, device="cuda") for _ in range(2)
    )
    if kv_dtype != "int8":
        for rows in (keys, values):
            rows.bitwise_and_(~0x40)  # below 2: of the same size as what the scales expect
    key_scales, value_scales = ((0.01 + 0.01 * torch.rand(shape, device="cuda")).half() for _ in range(2))
    made = Arena.contiguous(
        arena.layers,
        arena.pages,
        KV_HEADS,
        DIM,
        "bfloat16",
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        fine=arena.fine.pointer,
        coarse=arena.coarse.pointer,
        kv_dtype=kv_dtype,
        key_scales=key_scales.data_ptr(),
        value_scales=value_scales.data_ptr(),
    )
    return replace(context, arena=made, keep=[*context.keep, keys, values, key_scales, value_scales])


def measure(
    kernels: Kernels, torch_stream: torch.cuda.Stream, stream: Stream, ceilings: dict[str, float]
) -> dict[str, float]:
    """Decode and verify steps, and chunks; times in milliseconds a layer, bandwidths as shares of the copy's."""
    figures: dict[str, float] = {}
    rule = SelectionRule()
    for name, length, layers in (("32k", 32768, 24), ("128k", 131072, 16)):
        exact = Context.random(length, layers)
        contexts = {"bf16": exact} | {kind: quantized(exact, kv) for kind, kv in FORMATS.items()}
        for kind, context in contexts.items():
            dense = Step(kernels, stream, context, 1, None)
            ms = figures[f"{kind}_decode_{name}_ms"] = median_ms(torch_stream, layers, dense.run)
            row = 2 * DIM if kind == "bf16" else DIM + 2
            rate = length * 2 * KV_HEADS * row / (ms * 1e-3)
            figures[f"{kind}_decode_{name}_bandwidth"] = rate / ceilings["copy_bytes_per_s"]
            sparse = Step(kernels, stream, context, 1, rule)
            figures[f"{kind}_sparse_decode_{name}_ms"] = median_ms(torch_stream, layers, sparse.run)
            for nodes in (16, 64):
                tree = Step(kernels, stream, context, nodes, None)
                figures[f"{kind}_tree{nodes}_{name}_ms"] = median_ms(torch_stream, layers, tree.run)
            for of, chunk_rule in (("dense", None), ("sparse", rule)):
                chunk = Chunk(kernels, stream, context, CHUNK, chunk_rule)
                figures[f"{kind}_{of}_chunk_{name}_ms"] = median_ms(torch_stream, 4, chunk.run)
                del chunk
        for kind in FORMATS:
            ratio = figures[f"{kind}_decode_{name}_ms"] / figures[f"bf16_decode_{name}_ms"]
            figures[f"{kind}_decode_{name}_vs_bf16"] = ratio
        del contexts, exact, context, dense, sparse, tree
        torch.cuda.empty_cache()
    return figures


BOUNDS = {"int8_decode_128k_vs_bf16": ("<=", 0.8), "fp8_decode_128k_vs_bf16": ("<=", 0.85)}
