"""Prefill chunks over a paged arena: every stored token is there already, everything else is poison."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from decode_cases import array, fill, scales_of

from plugins_trt.append.reference import Pages, QuantizedPages
from plugins_trt.arena import Arena
from plugins_trt.chunk_attention import reference as attention_reference
from plugins_trt.chunk_attention.contract import ALWAYS, ChunkAttention, DensePlan
from plugins_trt.chunk_attention.launch import DenseChunkAttention, SparseChunkAttention
from plugins_trt.chunk_selection import reference as selection_reference
from plugins_trt.chunk_selection.contract import ChunkSelection, SelectionPlan, bitmap_words
from plugins_trt.chunk_selection.launch import ChunkSelector
from plugins_trt.contract import Batch, Bucket
from plugins_trt.quantized.reference import dequantize

H200 = 132
NAN = float("nan")


@dataclass
class ChunkCase:
    """One bucket: tensors of a one-layer arena, the batch and its queries."""

    dtype: str
    heads: int
    kv_heads: int
    dim: int
    tokens: int
    used: int  # rows that are not padding
    pages: Pages
    tables: torch.Tensor  # int32 [S, max_pages]
    starts: torch.Tensor
    lengths: torch.Tensor
    positions: torch.Tensor
    q: torch.Tensor  # [T, H, D]
    multiprocessors: int = H200
    keep: list[torch.Tensor] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def max_pages(self) -> int:
        return self.tables.shape[1]

    @property
    def bucket(self) -> Bucket:
        return Bucket(
            tokens=self.tokens,
            sequences=len(self.lengths),
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.dim,
            max_pages=self.max_pages,
            multiprocessors=self.multiprocessors,
        )

    @property
    def arena(self) -> Arena:
        pools = {name: getattr(self.pages, name).data_ptr() for name in ("keys", "values", "fine", "coarse")}
        count = self.pages.keys.shape[0]
        return Arena.contiguous(
            1, count, self.kv_heads, self.dim, self.dtype, **pools, **scales_of(self.pages)
        )

    @property
    def batch(self) -> Batch:
        return Batch(array(self.starts), array(self.lengths), array(self.tables), array(self.positions))

    def selection(self, rule, q=None, scale=None):
        """Arguments of a selection over poisoned memory, and the bitmaps it writes."""
        plan = SelectionPlan.of(self.bucket)
        workspace = torch.full((plan.workspace_bytes,), 255, dtype=torch.uint8, device=self.device)
        shape = (self.kv_heads, self.tokens, bitmap_words(self.max_pages))
        chosen = torch.full(shape, 0x5A5A5A5A, dtype=torch.int32, device=self.device)
        self.keep += [workspace, chosen]
        q = array(self.q if q is None else q)
        return ChunkSelection(
            self.batch, self.arena, 0, q, array(chosen), array(workspace), rule, scale
        ), chosen

    def attention(self, *, chosen=None, dense_below=ALWAYS, q=None, out=None, scale=None):
        """Arguments of an attention over poisoned memory, and its output."""
        plan = DensePlan.of(self.bucket)
        workspace = torch.full((max(16, plan.workspace_bytes),), 255, dtype=torch.uint8, device=self.device)
        out = torch.full_like(self.q, NAN) if out is None else out
        self.keep += [workspace, out]
        return ChunkAttention(
            self.batch,
            self.arena,
            0,
            array(self.q if q is None else q),
            array(out),
            dense_below=dense_below,
            chosen=None if chosen is None else array(chosen),
            workspace=array(workspace),
            scale=scale,
        ), out

    # ------------------------------------------------------------------ the kernels

    def selector(self, rig) -> ChunkSelector:
        return ChunkSelector(
            rig.kernels.operator("chunk_selection"),
            multiprocessors=rig.kernels.multiprocessors,
            dtype=self.dtype,
            head_dim=self.dim,
            group=self.heads // self.kv_heads,
        )

    def attender(self, kind: type[DenseChunkAttention | SparseChunkAttention], rig):
        return kind(
            rig.kernels.operator("chunk_attention"),
            multiprocessors=rig.kernels.multiprocessors,
            shared_bytes=rig.kernels.shared_bytes,
            dtype=self.dtype,
            head_dim=self.dim,
            kv_dtype=self.pages.kv_dtype if isinstance(self.pages, QuantizedPages) else None,
        )

    def select(self, rig, rule, scale=None) -> torch.Tensor:
        """The bitmaps that the kernels write."""
        args, chosen = self.selection(rule, scale=scale)
        self.selector(rig)(args, rig.stream)
        rig.stream.synchronize()
        return chosen

    def attend(self, rig, *, chosen=None, dense_below=ALWAYS, variant=None, scale=None) -> torch.Tensor:
        """The output of the kernels: dense, and sparse where bitmaps are given."""
        args, out = self.attention(chosen=chosen, dense_below=dense_below, scale=scale)
        if chosen is not None:
            self.attender(SparseChunkAttention, rig)(args, rig.stream, variant)
        self.attender(DenseChunkAttention, rig)(args, rig.stream)
        rig.stream.synchronize()
        return out

    # ------------------------------------------------------------------ the references

    def expected_selection(self, rule, scale=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Chosen blocks and scores, both [kv_heads, T, max_pages]."""
        return selection_reference.chunk_selection(
            self.q,
            self.positions,
            fine=self.pages.fine,
            coarse=self.pages.coarse,
            sequence_starts=self.starts,
            page_tables=self.tables,
            rule=rule,
            scale=scale,
        )

    def expected_attention(self, *, chosen=None, dense_below=None, scale=None) -> torch.Tensor:
        """The output, [T, H, D]; `chosen` as booleans."""
        keys, values = self.pages.keys, self.pages.values
        if isinstance(self.pages, QuantizedPages):
            keys = dequantize(keys, self.pages.key_scales)
            values = dequantize(values, self.pages.value_scales)
        return attention_reference.chunk_attention(
            self.q,
            self.positions,
            keys=keys,
            values=values,
            sequence_starts=self.starts,
            page_tables=self.tables,
            chosen=chosen,
            dense_below=dense_below,
            scale=scale,
        )


def make_chunk(
    sequences: list[tuple[int, int]],
    *,
    heads: int = 32,
    kv_heads: int = 2,
    dim: int = 128,
    dtype: str = "bfloat16",
    tokens: int | None = None,
    max_pages: int | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    rig=None,
) -> ChunkCase:
    """A bucket in which sequence s has `sequences[s][0]` tokens before the step and brings `sequences[s][1]`."""
    device = torch.device("cuda" if rig is not None else device)
    generator = torch.Generator(device).manual_seed(seed)
    kind = getattr(torch, dtype)
    stored = [length + new for length, new in sequences]
    needed = [-(-count // 64) for count in stored]
    max_pages = max_pages or max(1, *needed)
    total = sum(needed) + 3
    pages = Pages(
        *(
            torch.full((total, kv_heads, slots, dim), NAN, dtype=kind, device=device)
            for slots in (64, 64, 4, 1)
        )
    )
    order = list(range(total))
    random.Random(seed).shuffle(order)
    tables = torch.full((len(sequences), max_pages), -(1 << 30), dtype=torch.int32, device=device)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(kind)

    starts, positions = [0], []
    for index, (length, new) in enumerate(sequences):
        own = [order.pop() for _ in range(needed[index])]
        tables[index, : needed[index]] = torch.tensor(own, dtype=torch.int32, device=device)
        fill(pages, tables[index], normal(stored[index], kv_heads, dim), normal(stored[index], kv_heads, dim))
        starts.append(starts[-1] + new)
        positions += range(length, length + new)
    tokens = tokens or starts[-1]
    q = normal(tokens, heads, dim)
    q[starts[-1] :] = NAN
    positions += [1 << 30] * (tokens - len(positions))

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return ChunkCase(
        dtype, heads, kv_heads, dim, tokens, starts[-1], pages, tables, int32(starts),
        int32([length for length, _ in sequences]), int32(positions), q,
        H200 if rig is None else rig.kernels.multiprocessors,
    )  # fmt: skip


def assert_same_choice(
    case: ChunkCase, words: torch.Tensor, rule, scale=None, tolerance: float = 5e-5
) -> None:
    """The bitmaps name the reference's blocks, except blocks whose score is within rounding of the last chosen one."""
    got = selection_reference.unpack_bitmap(words, case.max_pages)
    want, scores = case.expected_selection(rule, scale)
    assert not got[:, case.used :].any()
    assert torch.equal(got.sum(-1), want.sum(-1))
    blocks = torch.arange(case.max_pages, device=case.device)
    own = (case.positions.clamp(max=case.max_pages * 64 - 1) // 64)[:, None]
    compared = (blocks >= rule.init_blocks) & (blocks <= own - rule.local)  # [T, blocks]
    last = scores.masked_fill(~(want & compared), float("inf")).amin(-1, keepdim=True)
    near = (scores - last).abs() <= tolerance * last.abs() + 1e-30
    assert not ((got != want) & ~(compared & near)).any()
