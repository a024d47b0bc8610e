"""Ragged decode batches over a paged arena, poisoned where nothing was written; and the GPU they run on."""

from __future__ import annotations

import atexit
import random
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace

import torch

from plugins_trt.append import reference as append_reference
from plugins_trt.append.reference import Pages, QuantizedPages
from plugins_trt.arena import Arena
from plugins_trt.contract import Batch, Bucket, DeviceArray

TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3}


@lru_cache(maxsize=1)
def gpu():
    """The kernels, a PyCUDA stream that torch shares, and the device."""
    from pycuda import driver

    from plugins_trt.registry import Kernels

    torch.zeros(1, device="cuda")
    driver.init()
    context = driver.Device(0).retain_primary_context()
    context.push()
    atexit.register(context.pop)
    stream = driver.Stream()
    torch.cuda.set_stream(torch.cuda.ExternalStream(stream.handle))
    return SimpleNamespace(kernels=Kernels.of_current_device(), stream=stream, device=torch.device("cuda"))


def masks_of(parents: list[int]) -> list[int]:
    """The mask word of each node; node i's parent comes before it, the root's is -1."""
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    return masks


def random_parents(nodes: int, rng: random.Random, depth_first: float = 0.5) -> list[int]:
    """A random tree; `depth_first` is how often a node hangs below the one before it."""
    return [-1] + [
        node - 1 if rng.random() < depth_first else rng.randrange(node) for node in range(1, nodes)
    ]


def array(tensor: torch.Tensor) -> DeviceArray:
    return DeviceArray.of(tensor)


def scales_of(pages: Pages) -> dict[str, str | int]:
    """What an arena of these pages has beside its four pools."""
    if not isinstance(pages, QuantizedPages):
        return {}
    return {
        "kv_dtype": pages.kv_dtype,
        "key_scales": pages.key_scales.data_ptr(),
        "value_scales": pages.value_scales.data_ptr(),
    }


def copy_of(pages: Pages) -> Pages:
    return type(pages)(**{name: pool.clone() for name, pool in vars(pages).items()})


def nothing_stored(pages: Pages) -> Pages:
    """Pools of the same kind, as if nothing had been written: NaN, and bytes of the largest size."""
    return type(pages)(
        **{
            name: torch.full_like(pool, float("nan") if pool.is_floating_point() else 127)
            for name, pool in vars(pages).items()
        }
    )


def assert_same_pages(got: Pages, expected: Pages, what: object) -> None:
    """To the bit; `what` was done to them."""
    for name, pool in vars(got).items():
        assert torch.equal(pool.nan_to_num(7.0), getattr(expected, name).nan_to_num(7.0)), (what, name)


@dataclass
class Case:
    """One step: tensors of a one-layer arena, the batch and its queries."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    lengths: list[int]
    starts: list[int]
    positions: list[int]
    masks: list[int] | None
    tokens: int
    pages: Pages
    tables: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    node_fine: torch.Tensor
    node_coarse: torch.Tensor
    device: torch.device
    keep: list[torch.Tensor] = field(default_factory=list)

    def bucket(self, multiprocessors: int) -> Bucket:
        return Bucket(
            tokens=self.tokens,
            sequences=len(self.lengths),
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.dim,
            max_pages=self.tables.shape[1],
            multiprocessors=multiprocessors,
        )

    @property
    def arena(self) -> Arena:
        pages = self.pages
        return Arena.contiguous(
            1,
            pages.keys.shape[0],
            self.kv_heads,
            self.dim,
            str(self.dtype).removeprefix("torch."),
            keys=pages.keys.data_ptr(),
            values=pages.values.data_ptr(),
            fine=pages.fine.data_ptr(),
            coarse=pages.coarse.data_ptr(),
            **scales_of(pages),
        )

    @property
    def kv_dtype(self) -> str | None:
        return self.pages.kv_dtype if isinstance(self.pages, QuantizedPages) else None

    def int32(self, values) -> DeviceArray:
        tensor = torch.tensor(values, dtype=torch.int32, device=self.device)
        self.keep.append(tensor)
        return array(tensor)

    @property
    def batch(self) -> Batch:
        masks = None
        if self.masks is not None:
            padded = self.masks + [0] * (self.tokens - len(self.masks))
            signed = [mask - (1 << 64) if mask >> 63 else mask for mask in padded]
            tensor = torch.tensor(signed, dtype=torch.int64, device=self.device)
            self.keep.append(tensor)
            masks = array(tensor)
        return Batch(
            sequence_starts=self.int32(self.starts),
            lengths=self.int32(self.lengths),
            page_tables=array(self.tables),
            positions=self.int32(self.positions + [0] * (self.tokens - len(self.positions))),
            tree_masks=masks,
        )

    def queries(self):
        """(token, sequence, position, mask) of every real token."""
        for sequence in range(len(self.lengths)):
            for token in range(self.starts[sequence], self.starts[sequence + 1]):
                yield (
                    token,
                    sequence,
                    self.positions[token],
                    None if self.masks is None else self.masks[token],
                )


def fill(pages: Pages, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Stores the first tokens of a sequence, [n, Hkv, D], and the compressed keys they complete."""
    length = len(keys)
    slots = torch.arange(length, device=keys.device)
    where = table[slots // 64].long()
    pages.keys[where, :, slots % 64] = keys
    pages.values[where, :, slots % 64] = values
    for kernel, stride, pool in ((32, 16, pages.fine), (128, 64, pages.coarse)):
        if length >= kernel:
            means = keys.float().unfold(0, kernel, stride).mean(-1).to(keys.dtype)  # [n, Hkv, D]
            last = torch.arange(len(means), device=keys.device) * stride + kernel - 1
            pool[table[last // 64].long(), :, last % 64 // stride] = means


def make_case(
    sequences: list[tuple[int, int]],
    *,
    heads: int = 32,
    kv_heads: int = 2,
    dim: int = 128,
    dtype: str = "bfloat16",
    parents: list[list[int]] | None = None,
    tokens: int | None = None,
    max_pages: int | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    appended: bool = True,
) -> Case:
    """A step in which sequence s has `sequences[s][0]` tokens stored and brings `sequences[s][1]`.

    With `appended` the new tokens' keys are in the pages (RoPE left out), as after `append`.
    """
    device = torch.device(device)
    rng = random.Random(seed)
    generator = torch.Generator(device).manual_seed(seed)
    kind = getattr(torch, dtype)
    lengths = [length for length, _ in sequences]
    starts, positions, masks = [0], [], None if parents is None else []
    for index, (length, new) in enumerate(sequences):
        starts.append(starts[-1] + new)
        if parents is None:
            positions += range(length, length + new)
        else:
            own = masks_of(parents[index])
            masks += own
            positions += [length + mask.bit_count() - 1 for mask in own]
    tokens = tokens or starts[-1]
    needed = [-(-(length + new) // 64) for length, new in sequences]
    max_pages = max_pages or max(1, *needed)
    total = sum(needed) + 3
    pages = Pages(
        *(
            torch.full((total, kv_heads, slots, dim), float("nan"), dtype=kind, device=device)
            for slots in (64, 64, 4, 1)
        )
    )
    order = list(range(total))
    rng.shuffle(order)
    tables = torch.full((len(sequences), max_pages), -1, dtype=torch.int32, device=device)
    for index, count in enumerate(needed):
        tables[index, :count] = torch.tensor(
            [order.pop() for _ in range(count)], dtype=torch.int32, device=device
        )

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(kind)

    for index, length in enumerate(lengths):
        fill(pages, tables[index], normal(length, kv_heads, dim), normal(length, kv_heads, dim))
    q, k, v = normal(tokens, heads, dim), normal(tokens, kv_heads, dim), normal(tokens, kv_heads, dim)
    case = Case(
        kind, heads, kv_heads, dim, lengths, starts, positions, masks, tokens, pages, tables,
        q, k, v, torch.zeros_like(k), torch.zeros_like(k), device,
    )  # fmt: skip
    if appended:
        flat = torch.ones(max(positions) + 1, dim // 2, device=device)
        result = append_reference.append(
            pages,
            q,
            k,
            v,
            sequence_starts=starts,
            lengths=lengths,
            page_tables=tables,
            positions=torch.tensor(positions + [0] * (tokens - len(positions)), device=device),
            cosine=flat,
            sine=torch.zeros_like(flat),
            tree_masks=masks,
        )
        case.node_fine, case.node_coarse = result.node_fine, result.node_coarse
    return case


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error ‖out - expected‖ / ‖expected‖ (NaN stays NaN, and passes no comparison)."""
    return float((out.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-12))
